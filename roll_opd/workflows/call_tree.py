"""The tree of a run's model calls: a continued conversation reuses the sampled tokens instead of tokenizing again.

A request continues an earlier call if its text starts with the prompt and the response of that call. The tokens of the
call are then kept, and only the new text is tokenized. A response that occurs in later messages is rendered with its
sampled text, even if a client has serialized it differently (as a parsed tool call, for example). If a template renders
earlier turns differently (without a thought, or with another system prompt), a new branch starts.

Legend for array axes: T is the number of tokens of a call, and P the number of tokens of its prompt.
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
from roll_opd.inference.completion import Completion
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

    # computed on demand: most calls are single-turn and never need these

    @cached_property
    def text(self) -> str:
        """Prompt and response."""
        return self.prompt + self._text_of(self.completion.tokens)

    @cached_property
    def response(self) -> str:
        """Text of the response without its end token. The chat template adds this token again."""
        return self._text_of(without_end(self.tokenizer, self.completion.tokens, self.completion.finish_reason))

    @cached_property
    def conversation(self) -> bytes:
        """The `digest` of the request's messages and the response."""
        return digest(reduce(digest, self.messages, b""), self.answer())

    def _text_of(self, tokens: np.ndarray) -> str:
        return text_of(self.tokenizer, tokens)

    def path(self) -> "list[Call]":
        """Return the calls from the root to this call."""
        return [*(self.parent.path() if self.parent else ()), self]


class CallTree:
    """Tree of the model calls of one run."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.calls: list[Call] = []

    def continued(self, text: str) -> Call | None:
        """Return the longest call that `text` continues.

        If several calls have this length, return the latest of them.
        """
        found = [call for call in self.calls if text.startswith(call.text)]
        return max(reversed(found), key=lambda call: len(call.text), default=None)

    def restored(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return a copy of `messages` in which each earlier response is replaced by its sampled text."""
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
        """Return the tokens of a prompt, int64 [P], and the call that the prompt continues.

        The call is None if the prompt starts a new branch.
        """
        parent = self.continued(text)
        new = text[len(parent.text) :] if parent else text
        own = np.array(token_ids(self._tokenizer, [new], [parent is None])[0], dtype=np.int64)
        return (np.concatenate([parent.tokens, own]) if parent else own), parent

    def add(
        self,
        prompt: str,
        tokens: np.ndarray,
        completion: Completion,
        parent: Call | None,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        answer: Callable[[], Mapping[str, Any]],
    ) -> Call:
        """Add a response to the prompt `tokens`. The callable `answer` returns the response as an assistant message."""
        whole = np.concatenate([tokens, completion.tokens])
        self.calls.append(
            Call(prompt, whole, len(tokens), completion, self._tokenizer, messages, tools, answer, parent)
        )
        return self.calls[-1]

    def branches(self) -> list[tuple[Experience, Call]]:
        """Return (experience, last call) for each branch.

        Every response is trained on once. If several branches share a response, only the first of these branches trains
        on it.
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
    """Return id -> text of all special tokens, including added tokens such as the end of a turn."""
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def without_end(tokenizer: Any, tokens: np.ndarray, finish_reason: str) -> np.ndarray:
    """Return a response's tokens without its end token. The chat template adds this token again."""
    ended = finish_reason == "stop" and len(tokens) and int(tokens[-1]) in _special(tokenizer)
    return tokens[:-1] if ended else tokens


def without_special(tokenizer: Any, text: str | None) -> str:
    """Return a text without special tokens."""
    text = text or ""
    for special in _special(tokenizer).values():
        text = text.replace(special, "")
    return text


def digest(before: bytes, message: Mapping[str, Any]) -> bytes:
    """Return the digest of a conversation whose last message is `message`.

    `before` is the digest of the previous messages.

    The digest does not depend on the ids of tool calls or on spaces in the arguments of tool calls.
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

    The action mask is False for the tokens between responses and for the responses of the calls in `without`.
    """
    first, last = path[0], path[-1]
    length = len(last.tokens) - first.start
    mask, logprobs = np.zeros(length, bool), np.zeros(length, np.float32)
    versions: list[Versions] = []
    end = first.start
    for call in path:
        place = slice(call.start - first.start, len(call.tokens) - first.start)
        mask[place] = call not in without
        logprobs[place] = call.completion.logprobs
        versions += [((None, call.start - end),), call.completion.versions]
        end = len(call.tokens)
    return Experience(
        tokens=torch.from_numpy(last.tokens),
        prompt_length=first.start,
        logprobs=torch.from_numpy(logprobs),
        action_mask=torch.from_numpy(mask),
        finish_reason=last.completion.finish_reason,
        versions=concatenated(versions),
    )
