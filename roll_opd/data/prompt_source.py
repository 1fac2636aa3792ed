"""Where a run takes its prompts from: an endless stream that can be resumed at any prompt."""

from typing import Any, Protocol

import numpy as np

from roll_opd.data.dataset import Prompt, PromptSet
from roll_opd.data.order import DrawOrder
from roll_opd.data.rows import DataError

_NEW_RUN = "Restore what it was, or start a new run."


class Source(Protocol):
    """What a run takes its prompts from: rows of files, or tasks of environments."""

    @property
    def position(self) -> int: ...

    @property
    def epochs(self) -> float: ...

    def take(self, n: int) -> list[Prompt]: ...

    def peek(self, n: int) -> list[Prompt]: ...

    def skip(self, n: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class PromptSource:
    """Draws from the streams of `prompts` by their weights; each epoch of a stream is a fresh permutation.

    A batch that spans the end of an epoch may hold the same prompt twice; `position` before `take` numbers
    the draws uniquely over the whole run, where a unique name for each is needed.
    """

    def __init__(self, prompts: PromptSet, seed: int) -> None:
        self._prompts, self._seed = prompts, seed
        self._streams = prompts.streams
        members = [prompts.members(stream) for stream in self._streams]
        self._size = sum(len(numbers) for numbers in members)
        self._order = DrawOrder(members, [stream.weight for stream in self._streams], seed)

    @property
    def position(self) -> int:
        """Prompts taken since the run began."""
        return int(self._order.taken.sum())

    @property
    def epochs(self) -> float:
        """Passes over the prompts since the run began; of several streams, their mean by size."""
        return self.position / self._size

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts, as `peek` does, and count them as taken."""
        prompts = self.peek(n)
        self.skip(n)
        return prompts

    def peek(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts, on into the next epoch where a stream's ends; read from the files now.

        Raises `DataError` where a file is gone or a row is no longer what it was when the run began.
        """
        before = self._order.taken.copy()
        numbers = self._order.take(n)
        self._order.taken = before
        return self._prompts.read(numbers)

    def skip(self, n: int) -> None:
        """Count the next `n` prompts as taken."""
        self._order.take(n)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in JSON types: prompts taken by stream, and what the order depends on."""
        return {
            "seed": self._seed,
            "files": self._prompts.fingerprint(),
            "streams": [
                {
                    "name": stream.name,
                    "weight": stream.weight,
                    "tags": stream.tags and list(stream.tags),
                    "taken": count,
                }
                for stream, count in zip(self._streams, self._order.taken.tolist(), strict=True)
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state` exactly; `DataError` where the prompts, their streams or the seed are not those it
        was saved with.
        """
        own = self.state_dict()
        if state.keys() != own.keys():
            raise DataError(
                "the position in the data was saved by another version of roll_opd, or by a run of which a"
                f" `demonstrations` section was, or was not, a part. {_NEW_RUN}"
            )
        if difference := _files_differ(state["files"], own["files"]):
            raise DataError(
                f"the prompts are not the ones this run was saved with ({difference}), so it cannot go on from where "
                f"it stopped. A file, `limit`, `prompt_length`, a template, a hint or the tokenizer has changed."
                f" {_NEW_RUN}"
            )
        if state["seed"] != self._seed:
            raise DataError(
                f"the run was saved with seed {state['seed']} and is resumed with seed {self._seed}, which "
                f"gives another order of the prompts. Set `seed: {state['seed']}`, or start a new run."
            )
        if _shares(state["streams"]) != _shares(own["streams"]):
            raise DataError(
                f"the run was saved with the prompts drawn as {_describe(state['streams'])} and is resumed with "
                f"{_describe(own['streams'])}; look at `domain_interleave_probs`, `interleave_probs` and the "
                f"`tag_included` of the rewards. {_NEW_RUN}"
            )
        self._order.taken = np.array([stream["taken"] for stream in state["streams"]], dtype=np.int64)


class MixedSource(PromptSource):
    """Prompts and demonstrations (rows with answers), each with its own order and position."""

    def __init__(self, prompts: PromptSet, demonstrations: PromptSet, seed: int) -> None:
        super().__init__(prompts, seed)
        self.demonstrations = PromptSource(demonstrations, seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both orders."""
        return {**super().state_dict(), "demonstrations": self.demonstrations.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue both from `state` exactly; raises `DataError` as `PromptSource` does."""
        super().load_state_dict(state)
        try:
            self.demonstrations.load_state_dict(state["demonstrations"])
        except DataError as error:
            raise DataError(f"demonstrations: {error}") from error


def _files_differ(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> str:
    """Return what differs, in words; file names alone make no difference."""
    if len(saved) != len(own):
        return f"{len(saved)} files then, {len(own)} now"
    for then, now in zip(saved, own, strict=True):
        if then["prompts"] != now["prompts"]:
            return f"{now['name']}: {then['prompts']} prompts then, {now['prompts']} now"
        if then["digest"] != now["digest"]:
            return f"{now['name']}: the {now['prompts']} prompts have other ids, tags, ground truths or tokens"
    return ""


def _shares(streams: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in stream.items() if key != "taken"} for stream in streams]


def _describe(streams: list[dict[str, Any]]) -> str:
    shares = [f"{stream['name']}: {stream['weight']:g}" for stream in streams]
    return "{" + ", ".join(shares) + "}"
