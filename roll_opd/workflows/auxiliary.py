"""Models that a workflow may ask beside the policy: judges, users, teachers. They are never trained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll_opd.config.plan import SamplingPlan
from roll_opd.workflows.call_tree import CallTree
from roll_opd.workflows.model import ModelWrapper, Responses, RunState
from roll_opd.workflows.model_facts import ModelFacts, generate_kwargs
from roll_opd.workflows.workflow_experience import Experience

OTHERS = 2**32  # where seeds of auxiliary models begin, far from draws


class AuxiliaryModel(ModelWrapper):
    """A model in engines of the run's own, asked as the policy is. What it answers is not learned from."""

    def __init__(self, number: int, sampling: SamplingPlan, *args: Any, **settings: Any) -> None:
        """`number` tells it from other auxiliary models, `sampling` is how it samples unless a call says more."""
        super().__init__(*args, **settings)
        self._number, self._sampling = number, sampling

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """How it samples unless a call says more, in the words of OpenAI's chat completions."""
        return generate_kwargs(self._sampling)

    @property
    def history(self) -> list[Experience]:
        """Nothing: what it answers is not kept."""
        return []

    def branches(self) -> list[Experience]:
        """Return nothing, likewise."""
        return []

    def _turns(self) -> CallTree:
        return CallTree(self.tokenizer)

    def _state(self) -> RunState:
        """Return a state of its own for each call: nothing is kept of it but how many there were."""
        run = self._run()
        run.asked_others += 1
        seed = (*run.seed, OTHERS + self._number, run.asked_others)
        return RunState(run.group, seed, run.runs[:1], self._sampling)


@dataclass(frozen=True)
class RemoteResponse:
    """What a model elsewhere has answered."""

    response_text: str
    finish_reason: str


class RemoteModel:
    """A model behind an OpenAI-compatible address. It answers messages; tokens and log-probs are not known of it."""

    def __init__(
        self, model_name: str, base_url: str, api_key: str, name: str | None = None, seconds: float | None = None
    ) -> None:
        """`model_name` is what it is called there, `name` what the configuration calls it.

        `seconds` is what a try of a request may take, of which OpenAI's client makes three; None: its own limit.
        """
        self._limits = {} if seconds is None else {"timeout": seconds}
        self.base_url, self.api_key = base_url, api_key
        self.model_path = self.model_name = model_name
        self.config = self.model_config = ModelFacts(model_name, name)
        self.generate_kwargs: dict[str, Any] = {}  # as it is set there
        self.api_address = base_url.removesuffix("/v1")

    def get_openai_client(self) -> Any:
        """Return an `openai.OpenAI` client."""
        from openai import OpenAI

        return self._client(OpenAI)

    def get_openai_async_client(self) -> Any:
        """Return an `openai.AsyncOpenAI` client."""
        from openai import AsyncOpenAI

        return self._client(AsyncOpenAI)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Responses:
        """Return its responses; `options` are those of OpenAI's chat completions. What fails is openai.APIError."""
        with self.get_openai_client() as client:
            return _read(client.chat.completions.create(model=self.model_path, messages=messages, **options))

    async def chat_async(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Responses:
        """Return what `chat` does."""
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
            f"{name}: of {self.model_path} at {self.base_url} only texts are known; run it here for more"
        )


def _read(completion: Any) -> Responses:
    return Responses(RemoteResponse(c.message.content or "", c.finish_reason) for c in completion.choices)
