"""The tree of a run's model calls. A continued conversation keeps the sampled tokens, so they are not tokenized again.

The text of a call is its prompt and its response. A request continues an earlier call if the request's text starts with
the text of that call. The tokens of the earlier call are then kept, and only the new text is tokenized.

A client may serialize an earlier response differently, for example as a parsed tool call. Therefore such a response is
rendered with its sampled text. If the chat template renders earlier turns differently, for example without a thought, a
new branch starts.

In array shapes, T is the number of tokens of a call, and P is the number of tokens of its prompt.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from typing import Any

import numpy as np
import torch

from roll_opd.data.templates import token_ids
from roll_opd.inference.vllm_requests import Completion
from roll_opd.samples.call_settings import OF_RUN
from roll_opd.samples.versions import Versions, concatenated
from roll_opd.workflows.workflow_experience import Experience


@dataclass(frozen=True, eq=False)
class Call:
    """One model call: a prompt and its response."""

    prompt: str  # text with special tokens
    tokens: np.ndarray  # int64 [T]
    start: int  # P
    completion: Completion
    tokenizer: Any
    messages: Sequence[Mapping[str, Any]]  # messages of the request
    tools: Sequence[Mapping[str, Any]]  # tools of the request
    answer: Callable[[], Mapping[str, Any]]  # the response as an assistant message
    parent: "Call | None" = None  # the call that this call continues
    settings: np.ndarray | None = None  # of `samples.call_settings`, f32 [T-P, 4]

    # computed on demand: most calls are single-turn and never need these

    @cached_property
    def text(self) -> str:
        """Text of the prompt and the response."""
        return self.prompt + self._text_of(self.completion.tokens)

    @cached_property
    def response(self) -> str:
        """Text of the response without its end token. The chat template adds the end token again."""
        return self._text_of(without_end(self.tokenizer, self.completion.tokens, self.completion.finish_reason))

    @cached_property
    def conversation(self) -> bytes:
        """Hash of the conversation that ends with this response (see `digest`)."""
        return digest(reduce(digest, self.messages, b""), self.answer())

    def _text_of(self, tokens: np.ndarray) -> str:
        return text_of(self.tokenizer, tokens)

    def path(self) -> "list[Call]":
        """Return the calls from the root to this call."""
        return [*(self.parent.path() if self.parent else ()), self]


class CallTree:
    """The tree of all model calls of one run."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.calls: list[Call] = []

    def continued(self, text: str) -> Call | None:
        """Return the call that `text` continues, or None.

        If there are several such calls, return the call with the longest text. Among calls of equal text, return the
        latest.
        """
        found = [call for call in self.calls if text.startswith(call.text)]
        return max(reversed(found), key=lambda call: len(call.text), default=None)

    def restored(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return a copy of `messages` in which the sampled text replaces each earlier response of this run."""
        if not self.calls or not any(message.get("role") == "assistant" for message in messages):
            return [dict(message) for message in messages]
        known = {call.conversation: call for call in self.calls}
        found, so_far = [], b""
        for message in messages:
            so_far = digest(so_far, message)
            call = known.get(so_far) if message.get("role") == "assistant" else None
            found.append({"role": "assistant", "content": call.response} if call else dict(message))
        return found

    def tokens(self, text: str) -> tuple[np.ndarray, Call | None]:
        """Return (tokens, call) for the prompt `text`.

        `tokens` are the tokens of the prompt, int64 [P]. `call` is the call that the prompt continues, or None if the
        prompt starts a new branch.
        """
        parent = self.continued(text)
        new = text[len(parent.text) :] if parent else text
        own = np.array(token_ids(self._tokenizer, [new], [parent.text if parent else None])[0], dtype=np.int64)
        return (np.concatenate([parent.tokens, own]) if parent else own), parent

    def branches(self) -> list[tuple[Experience, Call]]:
        """Return (experience, last call) for each branch.

        Each response is trained on only once. If several branches share a response, it is trained on in the first of
        them.
        """
        learned: set[Call] = set()
        found = []
        for leaf in self.leaves():
            path = leaf.path()
            found.append((experience(path, without=learned), leaf))
            learned.update(path)
        return found

    def leaves(self) -> list[Call]:
        """Return the calls that no other call continues."""
        continued = {call.parent for call in self.calls}
        return [call for call in self.calls if call not in continued]


def text_of(tokenizer: Any, tokens: np.ndarray) -> str:
    """Return the text of tokens, including special tokens."""
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@cache
def _special(tokenizer: Any) -> dict[int, str]:
    """Return a dict from id to text of all special tokens. It includes added tokens, such as the end of a turn."""
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def without_end(tokenizer: Any, tokens: np.ndarray, finish_reason: str) -> np.ndarray:
    """Return the tokens of a response without its end token. The chat template adds the end token again."""
    ended = finish_reason == "stop" and len(tokens) and int(tokens[-1]) in _special(tokenizer)
    return tokens[:-1] if ended else tokens


def without_special(tokenizer: Any, text: str | None) -> str:
    """Return a text without special tokens."""
    text = text or ""
    for special in _special(tokenizer).values():
        text = text.replace(special, "")
    return text


def digest(before: bytes, message: Mapping[str, Any]) -> bytes:
    """Return the hash of a conversation.

    The hash does not depend on the ids of tool calls or on spaces in the arguments of tool calls.

    Args:
        before: hash of the conversation without its last message.
        message: last message of the conversation.
    """
    role, content = message.get("role"), message.get("content")
    content = "" if content is None else content
    if isinstance(role, str) and isinstance(content, str) and not message.get("tool_calls"):
        key = f"{role}\0{content}"  # faster, for plain messages
    else:
        calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
        called = [[c.get("name"), _read(c.get("arguments"))] for c in calls]
        key = json.dumps([role, content, called], sort_keys=True, default=str)
    return hashlib.blake2b(before + key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _read(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def experience(path: Sequence[Call], without: "set[Call] | frozenset[Call]" = frozenset()) -> Experience:
    """Return a path of calls as one experience.

    The action mask is False at all tokens between responses. It is also False at the responses of the calls in
    `without`.
    """
    first, last = path[0], path[-1]
    length = len(last.tokens) - first.start
    mask, logprobs = np.zeros(length, bool), np.zeros(length, np.float32)
    settings = np.tile(OF_RUN, (length, 1))
    versions: list[Versions] = []
    end = first.start
    for call in path:
        place = slice(call.start - first.start, len(call.tokens) - first.start)
        mask[place] = call not in without
        logprobs[place] = call.completion.logprobs
        if call.settings is not None:
            settings[place] = call.settings
        versions += [((None, call.start - end),), call.completion.versions]
        end = len(call.tokens)
    return Experience(
        tokens=torch.from_numpy(last.tokens),
        prompt_length=first.start,
        logprobs=torch.from_numpy(logprobs),
        action_mask=torch.from_numpy(mask),
        finish_reason=last.completion.finish_reason,
        versions=concatenated(versions),
        call_settings=settings,
    )
