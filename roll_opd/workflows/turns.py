"""The calls of one run as a tree, so that a conversation goes on with the very tokens that were sampled.

A request whose text begins with the whole text of an earlier call, prompt and response, continues that call: its
tokens are kept, and only what is new becomes tokens. Where a template writes the past in another way (a stripped
thought, another system prompt), a new branch begins; what continues a call never has other tokens than were sampled.

Legend: T tokens of a call, P of its prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from roll_opd.inference.completion import Completion
from roll_opd.workflows.experience import Experience


@dataclass(frozen=True, eq=False)
class Call:
    """A prompt and its response."""

    prompt: str  # special tokens written out
    tokens: np.ndarray  # int64 [T]
    start: int  # P
    completion: Completion
    written: Callable[[np.ndarray], str]  # tokens as text, special ones written out
    parent: "Call | None" = None  # the call that this one goes on with

    @cached_property
    def text(self) -> str:
        """Prompt and response; most calls of one turn are never asked."""
        return self.prompt + self.written(self.completion.tokens)

    def path(self) -> "list[Call]":
        """Return this call and those that it continues, the first one first."""
        return [*(self.parent.path() if self.parent else ()), self]


class Turns:
    """The calls of one run."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.calls: list[Call] = []

    def continued(self, text: str) -> Call | None:
        """Return the longest call that `text` continues; of several the last one."""
        found = [call for call in self.calls if text.startswith(call.text)]
        return max(reversed(found), key=lambda call: len(call.text), default=None)

    def tokens(self, text: str) -> tuple[np.ndarray, Call | None]:
        """Return a prompt's tokens, int64 [P], and the call that it continues."""
        parent = self.continued(text)
        new = self._tokenizer(text[len(parent.text) :] if parent else text, add_special_tokens=False).input_ids
        own = np.array(new, dtype=np.int64)
        return (np.concatenate([parent.tokens, own]) if parent else own), parent

    def add(self, prompt: str, tokens: np.ndarray, completion: Completion, parent: Call | None) -> Call:
        """Take a response to the prompt that `tokens` gave."""
        whole = np.concatenate([tokens, completion.tokens])
        self.calls.append(Call(prompt, whole, len(tokens), completion, self._written, parent))
        return self.calls[-1]

    def _written(self, tokens: np.ndarray) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

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


def experience(path: Sequence[Call], without: "set[Call] | frozenset[Call]" = frozenset()) -> Experience:
    """Return calls that continue each other as one experience.

    What lies between their responses, and the responses `without`, the model is not asked to learn.
    """
    first, last = path[0], path[-1]
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
