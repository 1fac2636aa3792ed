"""Auxiliary models of a workflow, such as judges, simulated users and teachers. They are never trained.

An auxiliary model runs in local engines or behind a remote API.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll_opd.base.addresses import chat_url
from roll_opd.config.plan import SamplingPlan
from roll_opd.workflows.call_tree import CallTree
from roll_opd.workflows.model_wrapper import ModelWrapper, Responses
from roll_opd.workflows.run_state import ModelFacts, RunState, generate_kwargs
from roll_opd.workflows.workflow_experience import Experience

AUXILIARY_SEEDS = 2**32  # offset of the seeds of auxiliary models, above any draw number


class AuxiliaryModel(ModelWrapper):
    """A frozen model in engines of this run. It is called like the policy, but its responses are not trained on."""

    def __init__(self, number: int, sampling: SamplingPlan, *args: Any, **settings: Any) -> None:
        """Create the wrapper of one auxiliary model.

        Args:
            number: index of the model in `auxiliary_models`.
            sampling: default sampling parameters of the model.
        """
        super().__init__(*args, **settings)
        self._number, self._sampling = number, sampling

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """The default sampling parameters, with the parameter names of OpenAI's chat completions."""
        return generate_kwargs(self._sampling)

    @property
    def history(self) -> list[Experience]:
        """An empty list, because responses of auxiliary models are not recorded."""
        return []

    def branches(self) -> list[Experience]:
        """Return an empty list, because responses of auxiliary models are not recorded."""
        return []

    def _tree(self) -> CallTree:
        return CallTree(self.tokenizer)

    def _state(self) -> RunState:
        """Return a new state for each call. The run itself only keeps the number of auxiliary calls."""
        run = self._run()
        run.auxiliary_calls += 1
        seed = (*run.seed, AUXILIARY_SEEDS + self._number, run.auxiliary_calls)
        return RunState(run.group, seed, run.runs[:1], self._sampling)


@dataclass(frozen=True)
class RemoteResponse:
    """Response of a remote model."""

    response_text: str
    finish_reason: str


class RemoteModel:
    """A model on a server with an OpenAI-compatible API. It returns text without tokens or log-probs."""

    def __init__(
        self, model_name: str, base_url: str, api_key: str, name: str | None = None, seconds: float | None = None
    ) -> None:
        """Create a client for a model on a server.

        Args:
            model_name: name of the model on the server.
            base_url: address of the server's API, in any form that `chat_url` accepts.
            api_key: API key of the server.
            name: name of the model in the configuration.
            seconds: timeout of one attempt. None means the default of OpenAI's client. The client makes three attempts.
        """
        self._limits = {} if seconds is None else {"timeout": seconds}
        self.base_url, self.api_key = chat_url(base_url).removesuffix("/chat/completions"), api_key
        self.model_path = self.model_name = model_name
        self.config = self.model_config = ModelFacts(model_name, name)
        self.generate_kwargs: dict[str, Any] = {}  # the server's defaults apply
        self.api_address = self.base_url.removesuffix("/v1")

    def get_openai_client(self) -> Any:
        """Return an `openai.OpenAI` client."""
        from openai import OpenAI

        return self._client(OpenAI)

    def get_openai_async_client(self) -> Any:
        """Return an `openai.AsyncOpenAI` client."""
        from openai import AsyncOpenAI

        return self._client(AsyncOpenAI)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Responses:
        """Return the responses to a conversation. Raises openai.APIError.

        `options` are the options of chat completions in OpenAI's client.
        """
        with self.get_openai_client() as client:
            return _read(client.chat.completions.create(model=self.model_path, messages=messages, **options))

    async def chat_async(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Responses:
        """Async form of `chat`."""
        async with self.get_openai_async_client() as client:
            return _read(await client.chat.completions.create(model=self.model_path, messages=messages, **options))

    def _client(self, kind: Any) -> Any:
        client = kind(base_url=self.base_url, api_key=self.api_key, **self._limits)
        client.model_path = self.model_path
        return client

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(ModelWrapper, name):
            raise AttributeError(name)
        raise AttributeError(
            f"{name}: {self.model_path} at {self.base_url} returns only text; if tokens are needed, run the model"
            " in engines of this run"
        )


def _read(completion: Any) -> Responses:
    return Responses(RemoteResponse(c.message.content or "", c.finish_reason) for c in completion.choices)
