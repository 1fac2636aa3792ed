"""The model interface of workflows. `chat` and `generate` return experiences with the sampled tokens and log-probs."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor

from roll_opd.config.plan import SamplingPlan
from roll_opd.data.template_check import omission_of_shape
from roll_opd.data.templates import token_ids
from roll_opd.inference.vllm_requests import Completion
from roll_opd.samples.call_settings import call_row
from roll_opd.workflows.call_tree import Call, CallTree, experience
from roll_opd.workflows.run_state import RUN, ModelClients, ModelFacts, RunState
from roll_opd.workflows.workflow_experience import Experience, NoRoomError

MORE_ROOM = (
    "raise sequence_length where it is written, else prompt_length or response_length (in Trinity's files"
    " max_prompt_tokens or max_response_tokens), or shorten the prompt"
)
LONG_TEXT = 20_000  # characters above which tokenization runs in a thread

# sampling option of a call -> field of SamplingPlan
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
_IGNORED = {"logprobs", "top_logprobs", "timeout", "lora_request", "return_token_ids", "include_logprobs"}


class EngineClient(Protocol):
    """Interface through which workflows call the inference engines."""

    async def generate(
        self, group: int, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: SamplingPlan
    ) -> list[Completion]: ...

    async def prompt_logprobs(self, group: int, tokens: Sequence[int]) -> np.ndarray: ...

    async def weights_version(self) -> int: ...


AsMessage = Callable[[Experience], Mapping[str, Any]]


def text_message(response: Experience) -> dict[str, Any]:
    """Return a response as an assistant message with its text."""
    return {"role": "assistant", "content": response.response_text}


class Responses(list):
    """The list of responses of one call.

    An attribute that a list does not have is read from the first response.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not self:
            raise AttributeError(name)
        return getattr(self[0], name)


class ModelWrapper(ModelClients):
    """A client of the policy.

    `chat`, `generate`, `logprobs` and `model_version` block, so they must not be called on the event loop. Call their
    `_async` forms there.
    """

    enable_history = True  # responses are kept until the run ends or extracts them

    def __init__(
        self,
        engines: EngineClient,
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

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Responses:
        """Return `n` responses to a conversation, which is rendered with the tokenizer's chat template.

        Raises NoRoomError if the conversation leaves no room for a response. Raises ValueError if the chat template
        drops a message, a tool or a tool call.

        Args:
            messages: the conversation.
            options: sampling parameters of vLLM and OpenAI (n, temperature, top_p, top_k, max_tokens, stop,
                repetition_penalty). The defaults come from the configuration. `tools` and `chat_template_kwargs` are
                passed to the chat template.
        """
        return self._wait(self.chat_async(messages, **options))

    async def chat_async(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Responses:
        """Async form of `chat`."""
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
        """Return `n` pairs (response, call) for a conversation. The responses are those of `chat`.

        `call` is the entry of the response in the call tree. The function `as_message` converts a response to an
        assistant message. If it is None, the message has the text of the response.
        """
        given = [dict(message) for message in messages]
        continues = continue_final_message
        if continues is None:  # a last assistant message is a prefix of the response
            continues = bool(given) and given[-1].get("role") == "assistant"
        run = self._state()
        tree = run.tree_of(self.tokenizer)
        text = self._conversation(
            tree, given, tools, chat_template_kwargs, continues=continues, add_generation_prompt=not continues
        )
        # the text is not tokenized, which would be slow: it has too many tokens with any tokenizer
        if len(text) > self._most_characters:
            raise NoRoomError(
                f"the prompt has {len(text)} characters, which leaves no room for a response: prompt and response may"
                f" have {self._max_model_len} tokens together; {MORE_ROOM}"
            )
        if len(text) > LONG_TEXT:
            tokens, parent = await asyncio.to_thread(tree.tokens, text)
        else:
            tokens, parent = tree.tokens(text)
        (responses,) = await self._respond(run, [tokens], options)
        answered = []
        for response, completion in responses:
            message = partial(as_message or text_message, response)
            whole, settings = np.concatenate([tokens, completion.tokens]), response.call_settings
            of_prompt = text, whole, len(tokens), completion, self.tokenizer
            call = Call(*of_prompt, given, tools or (), message, parent, settings)
            tree.calls.append(call)
            answered.append((response, call))
            response.messages, response.prompt_text = given, text
            response.tools = [dict(tool) for tool in tools or ()] or None
        return answered

    async def get_message_token_len(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of prompt tokens that `chat` would send for a conversation. The model is not called."""
        given = [dict(message) for message in messages]
        tree = self._tree()
        continues = bool(given) and given[-1].get("role") == "assistant"
        text = self._conversation(tree, given, None, continues=continues, add_generation_prompt=not continues)
        return len(tree.tokens(text)[0])

    def forget(self, answered: Sequence[tuple[Experience, Call]]) -> None:
        """Remove responses that could not be delivered to the client. `answered` is a return value of `answer`."""
        run, lost = RUN.get(), [part for pair in answered for part in pair]
        tree = run.tree_of(self.tokenizer)
        tree.calls = [call for call in tree.calls if call not in lost]
        run.history[:] = [response for response in run.history if response not in lost]

    def convert_messages_to_experience(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        temperature: float | None = None,
    ) -> Experience:
        """Return a conversation of this run as one experience with the sampled tokens and log-probs.

        Tokens between responses are masked, and text after the last response is dropped. If the chat template rewrites
        earlier turns, the experience has only the last call, and `branches` returns the experiences of the other calls.
        Raises ValueError if the conversation does not belong to this run.
        """
        given = [dict(message) for message in messages]
        tree = self._run().tree_of(self.tokenizer)
        call = tree.continued(self._conversation(tree, given, tools))
        if call is None:
            raise ValueError(
                "no response in these messages was sampled by this run; pass responses as `chat` returned them"
            )
        made = self._described(experience(call.path()), call.completion)
        made.messages = given
        return made

    async def convert_messages_to_experience_async(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        temperature: float | None = None,
    ) -> Experience:
        """Async form of `convert_messages_to_experience`."""
        return self.convert_messages_to_experience(messages, tools)

    def branches(self) -> list[Experience]:
        """Return one experience for each conversation of this run. Each sampled token is trained on once.

        If the messages of a call do not continue an earlier call, they start a new conversation.
        """
        return [self._described(made, call.completion) for made, call in self._run().tree_of(self.tokenizer).branches()]

    def generate(self, prompts: str | Sequence[str], **options: Any) -> Responses:
        """Return `n` responses to each prompt, in the order of the prompts.

        `options` are the sampling parameters of `chat`.
        """
        return self._wait(self.generate_async(prompts, **options))

    async def generate_async(self, prompts: str | Sequence[str], **options: Any) -> Responses:
        """Async form of `generate`."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        tokens = [np.array(ids) for ids in token_ids(self.tokenizer, texts, [None] * len(texts))]
        run, found = self._state(), Responses()
        for text, responses in zip(texts, await self._respond(run, tokens, options), strict=True):
            for response, _ in responses:
                response.prompt_text = text
                found.append(response)
                run.texts[response.tokens[: response.prompt_length].numpy().tobytes()] = text
        return found

    def logprobs(self, tokens: Sequence[int] | Tensor, temperature: float = 1.0) -> Tensor:
        """Return the log-probs of all tokens after the first, at temperature 1, f32 [T-1].

        The number of tokens T must be less than the maximum sequence length, because the engine also samples one token.
        """
        return self._wait(self.logprobs_async(tokens, temperature))

    async def logprobs_async(self, tokens: Sequence[int] | Tensor, temperature: float = 1.0) -> Tensor:
        """Async form of `logprobs`."""
        if temperature != 1.0:
            raise ValueError(f"log-probs of given tokens are at temperature 1, not {temperature}; omit `temperature`")
        ids = torch.as_tensor(tokens).tolist()
        return torch.from_numpy(await self._engines.prompt_logprobs(self._run().group, ids))

    @property
    def model_version(self) -> int:
        """Version of the weights in the engines, which is the number of weight updates so far."""
        return self._wait(self._engines.weights_version())

    @property
    async def model_version_async(self) -> int:
        """Version of the weights in the engines, which is the number of weight updates so far."""
        return await self._engines.weights_version()

    async def _respond(
        self, run: RunState, prompts: Sequence[np.ndarray], options: Mapping[str, Any]
    ) -> list[list[tuple[Experience, Completion]]]:
        """Return a list of `n` pairs (response, completion) for each prompt."""
        sampling = sampling_of(run.sampling, options)
        longest = max(map(len, prompts), default=0)
        room = self._max_model_len - longest
        if room < 1:
            raise NoRoomError(
                f"the prompt has {longest} tokens, which leaves no room for a response: prompt and response may"
                f" have {self._max_model_len} tokens together; {MORE_ROOM}"
            )
        once = replace(sampling, n=1, max_new_tokens=min(sampling.max_new_tokens, room))
        asked = [prompt for prompt in prompts for _ in range(sampling.n)]
        call = run.calls
        completions = await self._engines.generate(run.group, asked, run.seeds(len(asked)), once)
        settings = call_row(sampling, run.sampling)
        run.settings.add(settings.tobytes())
        made = [self._experience(*pair) for pair in zip(asked, completions, strict=True)]
        for response in made:
            response.call_settings = np.broadcast_to(settings, (len(response.tokens) - response.prompt_length, 4))
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
            versions=completion.versions,
        )
        return self._described(made, completion)

    def _described(self, made: Experience, last: Completion) -> Experience:
        """Set the response text of an experience, and return the experience.

        The text is decoded from `last`, the last completion of the experience.
        """
        made.response_text = partial(self.tokenizer.decode, last.tokens, skip_special_tokens=True)
        return made

    def _conversation(
        self,
        tree: CallTree,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render a conversation with the chat template.

        Earlier responses of the run are rendered with their sampled text. Raises ValueError if the chat template drops
        a message, a tool or a tool call.
        """
        given_tools = [dict(tool) for tool in tools or ()]
        write = partial(
            self.tokenizer.apply_chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continues,
            **(variables or {}),
        )

        def rendered(conversation: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
            return str(write(conversation, tools=list(tools) or None))

        restored = tree.restored(messages)
        try:
            text = rendered(restored, given_tools)
        except TemplateError:  # some templates require the parsed call before a tool message
            if restored == messages:
                raise
            text = rendered(messages, given_tools)
        variant = repr((variables, continues, add_generation_prompt))
        if left := omission_of_shape(rendered, str(self.tokenizer.chat_template), variant, messages, given_tools):
            raise ValueError(f"the chat template {left}")
        return text


def sampling_of(sampling: SamplingPlan, options: Mapping[str, Any]) -> SamplingPlan:
    """Return a copy of `sampling` with the options of one call. Raises TypeError for an unknown option."""
    found: dict[str, Any] = {}
    if options.get("top_logprobs"):
        raise TypeError("top_logprobs: the engine returns only the log-probs of sampled tokens; omit top_logprobs")
    for name, value in options.items():
        if name in _SAMPLING:
            if value is not None:
                found[_SAMPLING[name]] = value
        elif name not in _IGNORED:
            raise TypeError(f"unknown option {name!r} of a call to the model; known are {', '.join(_SAMPLING)}")
    if "stop" in found:
        found["stop"] = (found["stop"],) if isinstance(found["stop"], str) else tuple(found["stop"])
    return replace(sampling, **found)
