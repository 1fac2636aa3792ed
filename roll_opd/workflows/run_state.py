"""The state of a workflow run: its model calls, its history, its reward, and the teachers' prompts for its calls.

OpenAI clients of the policy for the calling run, and the model attributes that workflows of Trinity-RFT read.
"""

import asyncio
import json
import ssl
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from roll_opd.base.frozen import FrozenDict, freeze
from roll_opd.config.plan import ContextPlan, SamplingPlan
from roll_opd.data.prompt_source import Prompt, derived_seed
from roll_opd.data.row_formats import BadRow, Row
from roll_opd.data.teacher_prompts import TeacherPrompts
from roll_opd.workflows.call_tree import Call, CallTree
from roll_opd.workflows.workflow_experience import Experience

Value = TypeVar("Value")


@dataclass
class RunState:
    """State of one call of a workflow.

    The call produces one run of a prompt, or several runs if the workflow sets `can_repeat`.
    """

    group: int  # all calls of a group go to the same engine
    seed: tuple[int, ...]  # (training seed, draw)
    runs: tuple[int, ...]  # run numbers
    sampling: SamplingPlan
    calls: int = 0
    settings: set[bytes] = field(default_factory=set)  # bytes of the calls' rows of `samples.call_settings`
    returned: bool = False  # whether the workflow's run method has returned
    history: list[Experience] = field(default_factory=list)
    turns: CallTree | None = None
    texts: dict[bytes, str] = field(default_factory=dict)  # token bytes of a text prompt -> the text
    reward: float | None = None  # posted by an agent; applies to experiences without a reward
    metrics: dict[str, float] = field(default_factory=dict)  # metrics posted with the reward
    notes: dict[str, Any] = field(default_factory=dict)  # state set by the workflow
    auxiliary_calls: int = 0
    ended: bool = False  # if set, further model calls are refused
    stuck: bool = False  # whether user code that cannot be stopped still runs in this process

    def seeds(self, n: int) -> list[int]:
        """Return `n` seeds, one for each response of the next model call.

        The responses of the first call have the same seeds as in a single-turn run.
        """
        each = n == len(self.runs)  # True: one response per run
        numbers = [
            (*self.seed, self.runs[place], *([self.calls] if self.calls else []))
            if each
            else (*self.seed, self.runs[0], self.calls, place)
            for place in range(n)
        ]
        self.calls += 1
        return [derived_seed(*key) for key in numbers]

    @property
    def calls_made(self) -> list[Call]:
        """The model calls of this run whose prompt was given as messages."""
        return self.turns.calls if self.turns else []

    def tree_of(self, tokenizer: Any) -> CallTree:
        """Return the call tree. The first access creates it."""
        if self.turns is None:
            self.turns = CallTree(tokenizer)
        return self.turns

    def take_reward(self, body: bytes | str) -> None:
        """Set the reward from JSON. Raises ValueError if the JSON is not valid.

        The JSON is a number, or an object with `reward` and optionally `metrics`.
        """
        try:
            read = json.loads(body)
        except RecursionError:
            raise ValueError("expected a reward; the JSON is nested too deeply") from None
        given = read if isinstance(read, dict) else {"reward": read}
        metrics = given.get("metrics") or {}
        if given.keys() - {"reward", "metrics"} or not isinstance(metrics, dict):
            raise ValueError("expected an object with a reward, and metrics as an object of numbers")
        for name, value in {**metrics, "reward": given.get("reward")}.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
                raise ValueError(f"{name} is {str(value)[:40]!r}, expected a number")
        self.reward, self.metrics = float(given["reward"]), {**self.metrics, **metrics}


# the run of the current call; every run's thread or coroutine has a separate context
RUN: ContextVar[RunState] = ContextVar("run")


class RunAccess:
    """Base class of a model wrapper. It gives access to the run that calls the model.

    It has the history, the reward and the state of that run. It also lets threads make blocking calls.
    """

    tokenizer: Any
    _loop: asyncio.AbstractEventLoop

    @property
    def reward(self) -> float | None:
        """The reward that an agent has posted for this run, or None."""
        return self._run().reward

    def take_reward(self, body: bytes | str) -> None:
        """Set the reward of this run, as if an agent had posted it. See `RunState.take_reward`."""
        self._run().take_reward(body)

    @property
    def history(self) -> list[Experience]:
        """The responses of this run, in the order of the calls."""
        return self._run().history

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """Return the responses of this run that are in the history. Clear the history if `clear_history` is set."""
        found = list(self.history)
        if clear_history:
            self.history.clear()
        return found

    async def set_workflow_state(self, state: Mapping[str, Any]) -> None:
        """Add entries to the stored state of this run.

        The state is a dict from name to value. It is kept until the run ends.
        """
        self._run().notes.update(state)

    async def get_workflow_state(self) -> dict[str, Any]:
        """Return the stored state of this run."""
        return dict(self._run().notes)

    async def clean_workflow_state(self) -> None:
        """Clear the stored state and the history of this run."""
        run = self._run()
        run.notes.clear()
        run.history.clear()

    def _run(self) -> RunState:
        try:
            run = RUN.get()
        except LookupError:
            raise RuntimeError(
                "a thread outside of any run called the model; start threads with contextvars.copy_context()"
            ) from None
        if run.ended:
            raise RuntimeError(
                "the model was called for a run that has ended; end threads and tasks before their run returns"
            )
        return run

    def _state(self) -> RunState:
        """Return the state in which the next model call is recorded."""
        return self._run()

    def _tree(self) -> CallTree:
        """Return the call tree whose calls a conversation may continue."""
        return self._run().tree_of(self.tokenizer)

    def _may_wait(self) -> None:
        """Raise RuntimeError if this is the event loop, because a blocking call would stop all runs."""
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            raise RuntimeError("this call would block all other runs; await its _async form instead")

    def _wait(self, work: Coroutine[Any, Any, Value]) -> Value:
        try:
            self._may_wait()
        except RuntimeError:
            work.close()
            raise

        async def in_context() -> Value:
            RUN.set(state)
            return await work

        state = self._run()
        return asyncio.run_coroutine_threadsafe(in_context(), self._loop).result()


class TeacherContexts:
    """Builds the teachers' prompts for the model calls of a workflow."""

    def __init__(self, contexts: Sequence[ContextPlan], tokenizer: Any) -> None:
        """Create a builder. `tokenizer` is the student's tokenizer."""
        self._contexts, self._prompts = contexts, TeacherPrompts(contexts, tokenizer)

    def prompts(self, tokens: np.ndarray, run: RunState, prompt: Prompt) -> dict[str, np.ndarray]:
        """Return a dict from teacher to prompt tokens, int64 [P].

        Each teacher reads its prompt tokens in place of the student's prompt. Raises ValueError if no call of the run
        has the student's prompt, or if a context cannot be added to the prompt.

        Args:
            tokens: tokens of the student's prompt.
            run: the run that made the call.
            prompt: the prompt of the run in the data.
        """
        if not self._contexts:
            return {}
        row = self._row(tokens, run, prompt)
        try:
            (found,) = self._prompts.encode([self._prompts.texts(row, "native")])
        except BadRow as bad:
            raise ValueError(f"{bad.kind}: {bad.detail}") from None
        if too_long := self._prompts.too_long(found):
            raise ValueError(too_long)
        return found

    def _row(self, tokens: np.ndarray, run: RunState, prompt: Prompt) -> Row:
        """Return a dataset row with the prompt of a call, as messages or as text.

        `tokens` are the tokens of the call's prompt.
        """
        key = self._contexts[0].key
        call = next((c for c in run.calls_made if np.array_equal(c.tokens[: c.start], tokens)), None)
        messages, text = (call.messages, None) if call else ((), run.texts.get(tokens.astype(np.int64).tobytes()))
        if call is None and text is None:
            raise ValueError(
                f"{key}: the prompt of an experience was never sent to the model; return experiences from the model"
            )
        tools = call.tools if call else None
        if tools and any(context.hint or context.system_prompt for context in self._contexts):
            raise ValueError(
                f"{key}: a teacher context cannot be added to a prompt with tools; remove the context or the tools"
            )
        if messages and messages[-1].get("role") == "assistant":
            raise ValueError(f"{key}: a teacher context cannot be added to a prompt that ends in an assistant message")
        kept = tuple(freeze(message) for message in messages)
        tools = tuple(FrozenDict(tool) for tool in tools or ())
        return Row(prompt.id, prompt.tag, kept, text, prompt.ground_truth, extra=prompt.extra, tools=tools)


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
    **dict.fromkeys(
        ("sync_model_weights", "init_process_group", "shutdown"), "remove the call, because the run itself does this"
    ),
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
