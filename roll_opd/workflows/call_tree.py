"""The calls of one run as a tree, so that a conversation goes on with the very tokens that were sampled.

A request whose text begins with the whole text of an earlier call, prompt and response, continues that call: its
tokens are kept, and only what is new becomes tokens. An answer that comes back among the messages is written as it was
sampled, whatever became of it on its way (a tool call that was parsed, and is written as JSON again). Where a template
writes the past in another way (a stripped thought, another system prompt), a new branch begins; what continues a call
never has other tokens than were sampled.

Legend: T tokens of a call, P of its prompt.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from typing import Any

import numpy as np
import torch

from roll_opd.data.special_tokens import token_ids
from roll_opd.inference.completion import Completion
from roll_opd.workflows.workflow_experience import Experience


@dataclass(frozen=True, eq=False)
class Call:
    """A prompt and its response."""

    prompt: str  # special tokens written out
    tokens: np.ndarray  # int64 [T]
    start: int  # P
    completion: Completion
    tokenizer: Any
    messages: Sequence[Mapping[str, Any]]  # that it answered
    tools: Sequence[Mapping[str, Any]]  # that it had
    answer: Callable[[], Mapping[str, Any]]  # the message that it became
    parent: "Call | None" = None  # the call that this one goes on with

    # of most calls, those of a single turn, none of this is ever asked

    @cached_property
    def text(self) -> str:
        """Prompt and response."""
        return self.prompt + self._written(self.completion.tokens)

    @cached_property
    def response(self) -> str:
        """The response without the token that ended it, which a template writes itself."""
        return self._written(without_end(self.tokenizer, self.completion.tokens, self.completion.finish_reason))

    @cached_property
    def conversation(self) -> bytes:
        """`digest` of the messages and the answer."""
        return digest(reduce(digest, self.messages, b""), self.answer())

    def _written(self, tokens: np.ndarray) -> str:
        return written(self.tokenizer, tokens)

    def path(self) -> "list[Call]":
        """Return this call and those that it continues, the first one first."""
        return [*(self.parent.path() if self.parent else ()), self]


class CallTree:
    """The calls of one run."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.calls: list[Call] = []

    def continued(self, text: str) -> Call | None:
        """Return the longest call that `text` continues; of several the last one."""
        found = [call for call in self.calls if text.startswith(call.text)]
        return max(reversed(found), key=lambda call: len(call.text), default=None)

    def restored(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return a conversation in which each answer of an earlier call is what was sampled."""
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
        """Return a prompt's tokens, int64 [P], and the call that it continues."""
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
        """Take a response to the prompt that `tokens` gave; `answer` makes the message that it becomes."""
        whole = np.concatenate([tokens, completion.tokens])
        self.calls.append(
            Call(prompt, whole, len(tokens), completion, self._tokenizer, messages, tools, answer, parent)
        )
        return self.calls[-1]

    def branches(self) -> list[tuple[Experience, Call]]:
        """Return an experience for each way in which the conversation went, with its last call.

        Every response is learned from once: one that several branches have in common, in the first of them.
        """
        learned: set[Call] = set()
        found = []
        for leaf in self.leaves():
            path = leaf.path()
            found.append((experience(path, without=learned), leaf))
            learned.update(path)
        return found

    def leaves(self) -> list[Call]:
        """Return the calls that no other continues."""
        continued = {call.parent for call in self.calls}
        return [call for call in self.calls if call not in continued]


def written(tokenizer: Any, tokens: np.ndarray) -> str:
    """Return tokens as text, special ones written out."""
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@cache
def _special(tokenizer: Any) -> dict[int, str]:
    """Return every special token, also those that end a turn and are none of the tokenizer's own few."""
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def without_end(tokenizer: Any, tokens: np.ndarray, finish_reason: str) -> np.ndarray:
    """Return a response's tokens without the one that ended it, which a template writes itself."""
    ended = finish_reason == "stop" and len(tokens) and int(tokens[-1]) in _special(tokenizer)
    return tokens[:-1] if ended else tokens


def without_special(tokenizer: Any, text: str | None) -> str:
    """Return a text without what special tokens are written as."""
    text = text or ""
    for special in _special(tokenizer).values():
        text = text.replace(special, "")
    return text


def digest(before: bytes, message: Mapping[str, Any]) -> bytes:
    """Return what a conversation that ends with `message` is known by, `before` being that of what comes before it.

    Two ways to write one message make no difference: numbers of tool calls, and spaces in their arguments.
    """
    role, said = message.get("role"), message.get("content")
    said = "" if said is None else said
    if isinstance(role, str) and isinstance(said, str) and not message.get("tool_calls"):
        meant = f"{role}\0{said}"  # most messages are no more than this
    else:
        calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
        called = [[c.get("name"), _read(c.get("arguments"))] for c in calls]
        meant = json.dumps([role, said, called], sort_keys=True, default=str)
    return hashlib.blake2b(before + meant.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _read(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def experience(path: Sequence[Call], without: "set[Call] | frozenset[Call]" = frozenset()) -> Experience:
    """Return calls that continue each other as one experience.

    What lies between their responses, and the responses `without`, the model is not asked to learn.
    """
    first, last = path[0], path[-1]
    versions = sorted({call.completion.weights_version for call in path})
    if len(versions) > 1:
        raise ValueError(
            f"weights {versions} have answered in one conversation; they are to stay while it is under way"
        )
    length = len(last.tokens) - first.start
    mask, logprobs = np.zeros(length, bool), np.zeros(length, np.float32)
    for call in path:
        place = slice(call.start - first.start, len(call.tokens) - first.start)
        mask[place] = call not in without
        logprobs[place] = call.completion.logprobs
    return Experience(
        tokens=torch.from_numpy(last.tokens),
        prompt_length=first.start,
        logprobs=torch.from_numpy(logprobs),
        action_mask=torch.from_numpy(mask),
        finish_reason=last.completion.finish_reason,
        weights_version=last.completion.weights_version,
    )
