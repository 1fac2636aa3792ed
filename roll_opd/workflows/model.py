"""The model as a workflow asks it: messages or texts in, experiences out, with the very tokens that were sampled."""

import asyncio
import json
import ssl
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor

from roll_opd.config.plan import SamplingPlan
from roll_opd.data.order import derived_seed
from roll_opd.data.special_tokens import token_ids
from roll_opd.data.template_check import omission_of_shape
from roll_opd.inference.completion import Completion
from roll_opd.workflows.call_tree import Call, CallTree, experience
from roll_opd.workflows.model_facts import NOT_HERE, ModelFacts, generate_kwargs
from roll_opd.workflows.workflow_errors import NoRoomError
from roll_opd.workflows.workflow_experience import Experience

Value = TypeVar("Value")

MORE_ROOM = (
    "raise sequence_length where it is written, else prompt_length or response_length (in Trinity's files"
    " max_prompt_tokens or max_response_tokens), or say less"
)
LONG_TEXT = 20_000  # characters that are made tokens in a thread
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

# what a call may say of sampling -> what it is here
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_new_tokens": "max_new_tokens",
    "stop": "stop",
    "n": "n",
}
_NO_MATTER = {"logprobs", "top_logprobs", "timeout", "lora_request", "return_token_ids", "include_logprobs"}


class Engines(Protocol):
    """Inference engines, wherever they run."""

    async def generate(
        self, group: int, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: SamplingPlan
    ) -> list[Completion]: ...

    async def prompt_logprobs(self, group: int, tokens: Sequence[int]) -> np.ndarray: ...

    async def weights_version(self) -> int: ...


@dataclass
class RunState:
    """The runs at a prompt that one call of a workflow makes, mostly one, as their calls to the model know them."""

    group: int  # calls of one group go to one engine
    seed: tuple[int, ...]  # of the training, and the draw
    runs: tuple[int, ...]  # their numbers
    sampling: SamplingPlan
    calls: int = 0
    returned: bool = False  # the workflow has done its part
    history: list[Experience] = field(default_factory=list)
    turns: CallTree | None = None
    texts: dict[bytes, str] = field(default_factory=dict)  # tokens of prompts that were no messages -> those prompts
    reward: float | None = None  # that somebody outside gave, for experiences without one of their own
    metrics: dict[str, float] = field(default_factory=dict)  # likewise
    notes: dict[str, Any] = field(default_factory=dict)  # state set by the workflow
    asked_others: int = 0  # calls of auxiliary models
    ended: bool = False  # nothing is to be asked for it any more
    stuck: bool = False  # code of its that cannot be ended is still under way in this process

    def seeds(self, n: int) -> list[int]:
        """Return a seed for each of the `n` responses of the next call; the first of a run is a single turn's."""
        each = n == len(self.runs)  # one response a run
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
        """Those that had messages."""
        return self.turns.calls if self.turns else []

    def turns_of(self, tokenizer: Any) -> CallTree:
        """Return the tree of calls."""
        if self.turns is None:
            self.turns = CallTree(tokenizer)
        return self.turns

    def take_reward(self, body: bytes | str) -> None:
        """Read JSON: a number, or an object with `reward` and `metrics`, numbers by name. ValueError for another."""
        try:
            read = json.loads(body)
        except RecursionError:
            raise ValueError("expected a reward, and not so many brackets") from None
        given = read if isinstance(read, dict) else {"reward": read}
        metrics = given.get("metrics") or {}
        if given.keys() - {"reward", "metrics"} or not isinstance(metrics, dict):
            raise ValueError("expected an object with a reward, and metrics as an object of numbers")
        for name, value in {**metrics, "reward": given.get("reward")}.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
                raise ValueError(f"{name} is {str(value)[:40]!r}, expected a number")
        self.reward, self.metrics = float(given["reward"]), {**self.metrics, **metrics}


AsMessage = Callable[[Experience], Mapping[str, Any]]


def said(response: Experience) -> dict[str, Any]:
    """Return a response as the message that it is."""
    return {"role": "assistant", "content": response.response_text}


# whose calls these are: each run has a context of its own, in a thread as in a coroutine
RUN: ContextVar[RunState] = ContextVar("run")


class Responses(list):
    """The responses of one call. What is asked of all of them is asked of the first, for who expects a single one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not self:
            raise AttributeError(name)
        return getattr(self[0], name)


class ModelWrapper:
    """The policy that is trained. Calls without `_async` may be made from any thread but the event loop's."""

    enable_history = True  # what a run's calls answered is kept until it ends or asks for it

    def __init__(
        self,
        engines: Engines,
        tokenizer: Any,
        *,
        model_path: str,
        max_model_len: int,
        loop: asyncio.AbstractEventLoop,
        name: str | None = None,
    ) -> None:
        self.config = ModelFacts(model_path, name)
        self.tokenizer = tokenizer
        self._engines, self._max_model_len, self._loop = engines, max_model_len, loop
        self._most_characters = max_model_len * max(map(len, tokenizer.get_vocab()))
        self.endpoint: Any = None  # an `Endpoint`, which in turn asks this model

    @property
    def model_path(self) -> str:
        """The directory of the model, by which an OpenAI client asks for it."""
        return self.config.model_path

    model_name = model_path

    @property
    def model_config(self) -> ModelFacts:
        """What `config` is, under Trinity-RFT's other name."""
        return self.config

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """How it samples unless a call says more, in the words of OpenAI's chat completions."""
        return generate_kwargs(self._run().sampling)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Responses:
        """Return `n` responses to a conversation, through the tokenizer's chat template.

        `options` are vLLM's and OpenAI's words for sampling (n, temperature, top_p, top_k, max_tokens, stop,
        repetition_penalty); what is not given is as the configuration has it. `tools` and `chat_template_kwargs` go to
        the template. NoRoomError for a conversation that leaves no room for a response, ValueError for one of which the
        template drops a message, a tool or a call.
        """
        return self._wait(self.chat_async(messages, **options))

    async def chat_async(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Responses:
        """Return what `chat` does."""
        return Responses(response for response, _ in await self.answer(messages, **options))

    async def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool | None = None,
        as_message: AsMessage | None = None,
        **options: Any,
    ) -> list[tuple[Experience, Call]]:
        """Return what `chat` does, each response with its call.

        `as_message` makes the message that a response becomes; None: one with its text.
        """
        given = [dict(message) for message in messages]
        goes_on = continue_final_message
        if goes_on is None:  # an assistant's words are the beginning of the response
            goes_on = bool(given) and given[-1].get("role") == "assistant"
        run = self._state()
        turns = run.turns_of(self.tokenizer)
        text = self._conversation(
            turns, given, tools, chat_template_kwargs, goes_on=goes_on, add_generation_prompt=not goes_on
        )
        if len(text) > self._most_characters:  # which would take its time to become tokens
            raise NoRoomError(
                f"the prompt has {len(text)} characters, which leaves no room for a response: prompt and response have"
                f" {self._max_model_len} tokens together; {MORE_ROOM}"
            )
        if len(text) > LONG_TEXT:
            tokens, parent = await asyncio.to_thread(turns.tokens, text)
        else:
            tokens, parent = turns.tokens(text)
        (responses,) = await self._respond(run, [tokens], options)
        answered = []
        for response, completion in responses:
            message = partial(as_message or said, response)
            answered.append((response, turns.add(text, tokens, completion, parent, given, tools or (), message)))
            response.messages, response.prompt_text = given, text
            response.tools = [dict(tool) for tool in tools or ()] or None
        return answered

    async def get_message_token_len(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Return how many tokens the prompt of `chat` has for a conversation. Nothing is asked."""
        given = [dict(message) for message in messages]
        turns = self._turns()
        goes_on = bool(given) and given[-1].get("role") == "assistant"
        text = self._conversation(turns, given, None, goes_on=goes_on, add_generation_prompt=not goes_on)
        return len(turns.tokens(text)[0])

    def forget(self, answered: Sequence[tuple[Experience, Call]]) -> None:
        """Take back what `answer` returned: it did not reach who asked."""
        run, lost = RUN.get(), [part for pair in answered for part in pair]
        turns = run.turns_of(self.tokenizer)
        turns.calls = [call for call in turns.calls if call not in lost]
        run.history[:] = [response for response in run.history if response not in lost]

    def convert_messages_to_experience(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        temperature: float | None = None,
    ) -> Experience:
        """Return a conversation that this run has had as one experience; its log-probs are those of sampling.

        It has the very tokens that were sampled, and those of the turns between them, which are not learned from. What
        comes behind the last response is left out. ValueError where this run has had no such conversation; where the
        chat template rewrites the past, it is that of the last call alone, and `branches` has the others.
        """
        given = [dict(message) for message in messages]
        turns = self._run().turns_of(self.tokenizer)
        call = turns.continued(self._conversation(turns, given, tools))
        if call is None:
            raise ValueError("no response in these messages was sampled by this run; give them as `chat` answered")
        made = self._described(experience(call.path()), call.completion)
        made.messages = given
        return made

    async def convert_messages_to_experience_async(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        temperature: float | None = None,
    ) -> Experience:
        """Return what `convert_messages_to_experience` does."""
        return self.convert_messages_to_experience(messages, tools)

    def branches(self) -> list[Experience]:
        """Return this run's conversations, each as one experience; every sampled token is learned from once.

        Mostly it is one. A new one begins where a call's messages do not continue an earlier call's.
        """
        return [
            self._described(made, call.completion) for made, call in self._run().turns_of(self.tokenizer).branches()
        ]

    def generate(self, prompts: str | Sequence[str], **options: Any) -> Responses:
        """Return `n` responses to each text, one after another; `options` as for `chat`."""
        return self._wait(self.generate_async(prompts, **options))

    async def generate_async(self, prompts: str | Sequence[str], **options: Any) -> Responses:
        """Return what `generate` does."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        tokens = [np.array(ids) for ids in token_ids(self.tokenizer, texts, [True] * len(texts))]
        run, found = self._state(), Responses()
        for text, responses in zip(texts, await self._respond(run, tokens, options), strict=True):
            for response, _ in responses:
                response.prompt_text = text
                found.append(response)
                run.texts[response.tokens[: response.prompt_length].numpy().tobytes()] = text
        return found

    def logprobs(self, tokens: Sequence[int] | Tensor, temperature: float = 1.0) -> Tensor:
        """Return log-probs of tokens 1 to T-1 at temperature 1, f32 [T-1]; T must leave room for one more token."""
        return self._wait(self.logprobs_async(tokens, temperature))

    async def logprobs_async(self, tokens: Sequence[int] | Tensor, temperature: float = 1.0) -> Tensor:
        """Return what `logprobs` does."""
        if temperature != 1.0:
            raise ValueError(f"log-probs of given tokens are at temperature 1, not {temperature}; leave it out")
        ids = torch.as_tensor(tokens).tolist()
        return torch.from_numpy(await self._engines.prompt_logprobs(self._run().group, ids))

    @property
    def model_version(self) -> int:
        """How many times the weights have been updated."""
        return self._wait(self._engines.weights_version())

    @property
    async def model_version_async(self) -> int:
        """How many times the weights have been updated."""
        return await self._engines.weights_version()

    @property
    def api_address(self) -> str:
        """The URL of the policy's server in this process."""
        return str(self._endpoint.address)

    @property
    def base_url(self) -> str:
        """What an OpenAI client needs as its `base_url`, with `api_key`."""
        return f"{self.api_address}/v1"

    @property
    def session_url(self) -> str:
        """The same for a client whose key is `endpoint_api_key`: it names this run."""
        return f"{self.api_address}/sessions/{self._endpoint.session(self._run()).id}/v1"

    @property
    def api_key(self) -> str:
        """The key of this run: what is asked with it belongs to the run, until that ends."""
        return str(self._endpoint.session(self._run()).key)

    def get_openai_client(self) -> Any:
        """Return an `openai.OpenAI` client, for threads; it asks for the run that calls it."""
        from openai import DefaultHttpxClient, OpenAI

        def key() -> str:
            self._may_wait()
            return self.api_key

        return self._client(OpenAI, key, DefaultHttpxClient)

    def get_openai_async_client(self) -> Any:
        """Return an `openai.AsyncOpenAI` client; it asks for the run that calls it."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        async def key() -> str:
            return self.api_key

        return self._client(AsyncOpenAI, key, DefaultAsyncHttpxClient)

    @property
    def reward(self) -> float | None:
        """This run's reward, where an agent has posted it."""
        return self._run().reward

    def take_reward(self, body: bytes | str) -> None:
        """Take this run's reward as an agent would post it; see `RunState.take_reward`."""
        self._run().take_reward(body)

    @property
    def history(self) -> list[Experience]:
        """What the calls of this run answered, in order."""
        return self._run().history

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """Return what the calls of this run answered since the history was cleared."""
        found = list(self.history)
        if clear_history:
            self.history.clear()
        return found

    async def set_workflow_state(self, state: Mapping[str, Any]) -> None:
        """Store state of the workflow by name, until the run ends."""
        self._run().notes.update(state)

    async def get_workflow_state(self) -> dict[str, Any]:
        """Return the stored state of this run."""
        return dict(self._run().notes)

    async def clean_workflow_state(self) -> None:
        """Clear the stored state and the history of this run."""
        run = self._run()
        run.notes.clear()
        run.history.clear()

    def __getattr__(self, name: str) -> Any:
        if instead := NOT_HERE.get(name):
            raise AttributeError(f"{name} of Trinity-RFT's ModelWrapper is not available; {instead}")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    async def _respond(
        self, run: RunState, prompts: Sequence[np.ndarray], options: Mapping[str, Any]
    ) -> list[list[tuple[Experience, Completion]]]:
        """Return the `n` responses to each prompt."""
        sampling = sampling_of(run.sampling, options)
        longest = max(map(len, prompts), default=0)
        room = self._max_model_len - longest
        if room < 1:
            raise NoRoomError(
                f"the prompt has {longest} tokens, which leaves no room for a response: prompt and response have"
                f" {self._max_model_len} together; {MORE_ROOM}"
            )
        once = replace(sampling, n=1, max_new_tokens=min(sampling.max_new_tokens, room))
        asked = [prompt for prompt in prompts for _ in range(sampling.n)]
        call = run.calls
        completions = await self._engines.generate(run.group, asked, run.seeds(len(asked)), once)
        made = [self._experience(*pair) for pair in zip(asked, completions, strict=True)]
        for number, response in enumerate(made):
            response.eid.run, response.eid.step = number % sampling.n, call
        run.history += made
        answered = list(zip(made, completions, strict=True))
        return [answered[start : start + sampling.n] for start in range(0, len(answered), sampling.n)]

    def _experience(self, prompt: np.ndarray, completion: Completion) -> Experience:
        made = Experience(
            tokens=torch.from_numpy(np.concatenate([prompt, completion.tokens])),
            prompt_length=len(prompt),
            logprobs=torch.from_numpy(completion.logprobs),
            finish_reason=completion.finish_reason,
            weights_version=completion.weights_version,
        )
        return self._described(made, completion)

    def _described(self, made: Experience, last: Completion) -> Experience:
        """Fill in the text of its `last` response."""
        made.response_text = partial(self.tokenizer.decode, last.tokens, skip_special_tokens=True)
        return made

    def _conversation(
        self,
        turns: CallTree,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None = None,
        *,
        goes_on: bool = False,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return a conversation as the chat template writes it, earlier answers as they were sampled.

        ValueError if the template drops a message, a tool or a call.
        """
        given_tools = [dict(tool) for tool in tools or ()]
        write = partial(
            self.tokenizer.apply_chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=goes_on,
            **(variables or {}),
        )

        def rendered(conversation: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
            return str(write(conversation, tools=list(tools) or None))

        restored = turns.restored(messages)
        try:
            text = rendered(restored, given_tools)
        except TemplateError:  # some want to see the call that a tool's message answers
            if restored == messages:
                raise
            text = rendered(messages, given_tools)
        variant = repr((variables, goes_on, add_generation_prompt))
        if left := omission_of_shape(rendered, str(self.tokenizer.chat_template), variant, messages, given_tools):
            raise ValueError(f"the chat template {left}")
        return text

    def _client(self, kind: Any, key: Callable, http: Any) -> Any:
        # one context for all clients: to make it takes 50 ms, and this address is none of TLS, nor behind a proxy
        client = kind(
            base_url=self.base_url, api_key=key, timeout=None, http_client=http(verify=NO_TLS, trust_env=False)
        )
        client.model_path = self.model_path  # where Trinity-RFT's workflows read it
        return client

    @property
    def _endpoint(self) -> Any:
        if self.endpoint is None:
            raise RuntimeError("this model has no address; it is asked by its own methods")
        return self.endpoint

    def _run(self) -> RunState:
        try:
            run = RUN.get()
        except LookupError:
            raise RuntimeError(
                "the model is asked by a thread that belongs to no run; start threads with contextvars.copy_context()"
            ) from None
        if run.ended:
            raise RuntimeError("the model is asked for a run that has ended; end threads and tasks with their run")
        return run

    def _state(self) -> RunState:
        """Return where a call and its answers are kept."""
        return self._run()

    def _turns(self) -> CallTree:
        """Return the calls that a conversation may go on with."""
        return self._run().turns_of(self.tokenizer)

    def _may_wait(self) -> None:
        """Raise RuntimeError on the event loop, where to wait stops everybody."""
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            raise RuntimeError("this call would stop all other runs; use its form with _async, and await it")

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


def sampling_of(sampling: SamplingPlan, options: Mapping[str, Any]) -> SamplingPlan:
    """Return `sampling` with a call's own `options`; TypeError for one that is not known."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in _SAMPLING:
            if value is not None:
                found[_SAMPLING[name]] = value
        elif name not in _NO_MATTER:
            raise TypeError(f"unknown option {name!r} of a call to the model; known are {', '.join(_SAMPLING)}")
    if "stop" in found:
        found["stop"] = (found["stop"],) if isinstance(found["stop"], str) else tuple(found["stop"])
    return replace(sampling, **found)
