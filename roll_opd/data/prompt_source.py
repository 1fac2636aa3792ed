"""Endless streams of prompts. A run can resume them at any position.

Prompts are drawn from one or several weighted streams. The order in an epoch depends only on the seed, the epoch and
the number of the stream. The next stream depends only on the number of prompts that were taken from each stream. These
numbers are therefore the complete state.
"""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from roll_opd.data.dataset import Prompt, PromptSet
from roll_opd.data.row_formats import DataError

if TYPE_CHECKING:
    from roll_opd.data.teacher_files import ScoredSet


def next_stream(weights: np.ndarray, taken: np.ndarray) -> int:
    """Return the number of the stream that is furthest below its weight.

    If the counts in `taken` start at zero, any n consecutive draws contain `weights * n` prompts of each stream, with
    an error of at most two prompts.

    Args:
        weights: f64 [S], with sum 1.
        taken: int64 [S], number of prompts taken from each stream.
    """
    return int(np.argmax(weights * (taken.sum() + 1) - taken))


def epoch_order(seed: int, epoch: int, stream: int, size: int) -> np.ndarray:
    """Return the order of a stream's prompts in an epoch: a permutation of `size` numbers, int64 [size]."""
    return np.random.Generator(np.random.PCG64([seed, epoch, stream])).permutation(size)


class DrawOrder:
    """An endless sequence of prompt numbers. Each stream has separate epochs."""

    def __init__(self, members: Sequence[np.ndarray], weights: Sequence[float], seed: int) -> None:
        """Create the sequence.

        Args:
            members: the prompt numbers of each stream, int64.
            weights: the weight of each stream. It must be 0 for a stream without prompts.
            seed: seed of the order.
        """
        self._members, self._seed = members, seed
        self._weights = np.asarray(weights, dtype=np.float64) / sum(weights)
        self.taken = np.zeros(len(members), dtype=np.int64)  # prompts taken from each stream
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # stream -> (epoch, permutation), cached

    def copy(self) -> "DrawOrder":
        """Return an independent sequence at the same position."""
        other = copy(self)
        other.taken, other._orders = self.taken.copy(), dict(self._orders)
        return other

    def take(self, n: int) -> list[int]:
        """Return the next `n` prompt numbers."""
        return [self._next() for _ in range(n)]

    def _next(self) -> int:
        stream = next_stream(self._weights, self.taken)
        members = self._members[stream]
        epoch, offset = divmod(int(self.taken[stream]), len(members))
        if stream not in self._orders or self._orders[stream][0] != epoch:
            self._orders[stream] = epoch, epoch_order(self._seed, epoch, stream, len(members))
        self.taken[stream] += 1
        return int(members[self._orders[stream][1][offset]])


def derived_seed(*numbers: int) -> int:
    """Return a 31-bit seed that depends on the given numbers and their order. The numbers must not be negative."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint32)[0] & 0x7FFFFFFF)


_NEW_RUN = "Restore it, or start a new run."


PASSED = "passed"  # key of a state: later draws whose prompts have been trained on or filtered out


class TaskSource(Protocol):
    """An endless stream of prompts that can be resumed. A prompt is a row of a file or a task of an environment."""

    @property
    def passed(self) -> frozenset[int]: ...

    @property
    def position(self) -> int: ...

    @property
    def epochs(self) -> float: ...

    def take(self, n: int) -> list[Prompt]: ...

    def peek(self, n: int) -> list[Prompt]: ...

    def skip(self, n: int) -> None: ...

    def copy(self) -> Self: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class PromptSource:
    """A stream of rows, which are drawn from the streams of `prompts` by weight.

    Each epoch of a stream has a new order. A batch that spans two epochs may have a prompt twice.

    The draws of a run are numbered from 0. The next call of `take` starts with the draw number `position`.
    """

    def __init__(self, prompts: "PromptSet | ScoredSet", seed: int) -> None:
        self.passed: frozenset[int] = frozenset()  # draws after the position; a resumed run skips them
        self._prompts, self._seed = prompts, seed
        self._streams = prompts.streams
        members = [prompts.members(stream) for stream in self._streams]
        self._size = sum(len(numbers) for numbers in members)
        self._order = DrawOrder(members, [stream.weight for stream in self._streams], seed)

    @property
    def position(self) -> int:
        """Number of prompts taken since the start of the run."""
        return int(self._order.taken.sum())

    @property
    def epochs(self) -> float:
        """Number of passes over the data so far.

        This is the number of draws, divided by the number of prompts in all streams.
        """
        return self.position / self._size

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts, and advance the position."""
        prompts = self.peek(n)
        self.skip(n)
        return prompts

    def peek(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts without advancing the position. They may belong to different epochs.

        Raises `DataError` if a file is missing, or if a row has changed since the start of the run.
        """
        before = self._order.taken.copy()
        numbers = self._order.take(n)
        self._order.taken = before
        return self._prompts.read(numbers)

    def skip(self, n: int) -> None:
        """Advance the position by `n` prompts."""
        self._order.take(n)

    def copy(self) -> Self:
        """Return a source at the same position, which advances independently. Both have the same demonstrations."""
        other = copy(self)
        other._order = self._order.copy()
        return other

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in JSON types.

        It has the seed, the digests of the files, and the number of prompts taken from each stream.
        """
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
        """Restore the position from a state. Raises `DataError` if prompts, streams or seed have changed."""
        own = self.state_dict()
        if state.keys() - {PASSED} != own.keys():
            raise DataError(
                "the position in the data was saved by another version of roll_opd, or a `demonstrations` section was"
                f" added or removed since. {_NEW_RUN}"
            )
        if difference := _files_differ(state["files"], own["files"]):
            raise DataError(
                f"the prompts differ from those with which this run was saved ({difference}), so it cannot be resumed."
                f" A file, `limit`, `prompt_length`, a template, a hint or the tokenizer has changed. {_NEW_RUN}"
            )
        if state["seed"] != self._seed:
            raise DataError(
                f"the run was saved with seed {state['seed']} and is resumed with seed {self._seed}, which changes the"
                f" order of the prompts. Set `seed: {state['seed']}`, or start a new run."
            )
        if _shares(state["streams"]) != _shares(own["streams"]):
            raise DataError(
                f"the mixture of prompts has changed since the run was saved, from {_describe(state['streams'])} to "
                f"{_describe(own['streams'])}; restore `domain_interleave_probs`, `interleave_probs` and the "
                f"`tag_included` of the rewards. {_NEW_RUN}"
            )
        self.passed = frozenset(state.get(PASSED, ()))
        self._order.taken = np.array([stream["taken"] for stream in state["streams"]], dtype=np.int64)


class MixedSource(PromptSource):
    """A stream of prompts, together with a stream of demonstrations (rows with answers).

    The two streams have separate orders and separate positions.
    """

    def __init__(self, prompts: PromptSet, demonstrations: PromptSet, seed: int) -> None:
        super().__init__(prompts, seed)
        self.demonstrations = PromptSource(demonstrations, seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both streams for a checkpoint."""
        return {**super().state_dict(), "demonstrations": self.demonstrations.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore both positions from a state. Raises `DataError` in the same cases as `PromptSource`."""
        super().load_state_dict(state)
        try:
            self.demonstrations.load_state_dict(state["demonstrations"])
        except DataError as error:
            raise DataError(f"demonstrations: {error}") from error


def _files_differ(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> str:
    """Return the first difference between two lists of files as text; "" if they are equal.

    The names of the files are not compared.
    """
    if len(saved) != len(own):
        return f"{len(saved)} files when it was saved, {len(own)} now"
    for then, now in zip(saved, own, strict=True):
        if then["prompts"] != now["prompts"]:
            return f"{now['name']}: {then['prompts']} prompts when it was saved, {now['prompts']} now"
        if then["digest"] != now["digest"]:
            return f"{now['name']}: the {now['prompts']} prompts have different ids, tags, ground truths or tokens"
    return ""


def _shares(streams: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in stream.items() if key != "taken"} for stream in streams]


def _describe(streams: list[dict[str, Any]]) -> str:
    shares = [f"{stream['name']}: {stream['weight']:g}" for stream in streams]
    return "{" + ", ".join(shares) + "}"
