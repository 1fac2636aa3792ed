"""OpenAI clients of the policy for the calling run, and the model attributes that workflows of Trinity-RFT read."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roll_opd.config.plan import SamplingPlan
from roll_opd.workflows.run_state import RunAccess

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_RECORDED = "return the experiences, or derive from WorkflowWithRecording and call its update_reward"
NOT_HERE = {  # method of Trinity-RFT's ModelWrapper -> alternative here
    "set_api_key": "use self.model.api_key, which differs for each run",
    **dict.fromkeys(("overwrite_history_experiences_async", "update_experience_reward_async"), _RECORDED),
    "clone_with_isolated_history": "use self.model.history, which belongs to one run",
    **dict.fromkeys(
        ("get_lora_request", "get_lora_request_async"), "remove the call, because requests always use the adapter"
    ),
    **dict.fromkeys(("get_current_load", "get_available_address_async"), "use api_address, which serves all engines"),
    **dict.fromkeys(("sync_model_weights", "init_process_group", "shutdown"), "remove the call, as the run does this"),
}


@dataclass(frozen=True)
class ModelFacts:
    """The attribute `config` of a model. It has the fields that workflows of Trinity-RFT read."""

    model_path: str
    name: str | None = None  # name of an auxiliary model in the configuration


def generate_kwargs(sampling: SamplingPlan) -> dict[str, Any]:
    """Return sampling parameters with the parameter names of OpenAI's chat completions."""
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_new_tokens}


class ModelClients(RunAccess):
    """The name, the addresses and the OpenAI clients of a model."""

    config: ModelFacts
    endpoint: Any = None  # HTTP server of this model

    @property
    def model_path(self) -> str:
        """Directory of the model. It is also the name of the model in requests."""
        return self.config.model_path

    model_name = model_path

    @property
    def model_config(self) -> ModelFacts:
        """Same as `config`, under the name that Trinity-RFT uses."""
        return self.config

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """Default sampling parameters, with the parameter names of OpenAI's chat completions."""
        return generate_kwargs(self._run().sampling)

    @property
    def api_address(self) -> str:
        """URL of the policy's server in this process."""
        return str(self._endpoint.address)

    @property
    def base_url(self) -> str:
        """The `base_url` for an OpenAI client that uses the key of this run (`api_key`)."""
        return f"{self.api_address}/v1"

    @property
    def session_url(self) -> str:
        """The `base_url` for an OpenAI client that uses the key of the server (`endpoint_api_key`).

        The path contains the id of this run's session.
        """
        return f"{self.api_address}/sessions/{self._endpoint.session(self._run()).id}/v1"

    @property
    def api_key(self) -> str:
        """API key of this run. Requests with this key belong to the run. The key is valid until the run ends."""
        return str(self._endpoint.session(self._run()).key)

    def get_openai_client(self) -> Any:
        """Return an `openai.OpenAI` client for use in threads. Its requests belong to the calling run."""
        from openai import DefaultHttpxClient, OpenAI

        def key() -> str:
            self._may_wait()
            return self.api_key

        return self._client(OpenAI, key, DefaultHttpxClient)

    def get_openai_async_client(self) -> Any:
        """Return an `openai.AsyncOpenAI` client. Its requests belong to the calling run."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        async def key() -> str:
            return self.api_key

        return self._client(AsyncOpenAI, key, DefaultAsyncHttpxClient)

    def __getattr__(self, name: str) -> Any:
        if instead := NOT_HERE.get(name):
            raise AttributeError(f"{name} of Trinity-RFT's ModelWrapper is not available; {instead}")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _client(self, kind: Any, key: Callable, http: Any) -> Any:
        # one SSL context for all clients (50 ms to create); this address uses neither TLS nor a proxy
        client = kind(
            base_url=self.base_url, api_key=key, timeout=None, http_client=http(verify=NO_TLS, trust_env=False)
        )
        client.model_path = self.model_path  # where Trinity-RFT's workflows read it
        return client

    @property
    def _endpoint(self) -> Any:
        if self.endpoint is None:
            raise RuntimeError("this model has no endpoint; call chat or generate of the model")
        return self.endpoint
