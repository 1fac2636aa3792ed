"""The interface of a teacher: log-probs of given tokens, and targets for distillation over several tokens.

The layers above (routing by tag, the order of teachers, the preflight, metrics) are the same for every implementation,
such as `megatron_teacher.MegatronScorer`. docs/extending.md shows how to add one.

Legend: T tokens of a sequence, P prompt tokens, K tokens of a top-k. Entry t of a [T-P] array belongs to token P+t.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from roll_opd.samples.alignment import Alignment
from roll_opd.samples.sample import TargetRef

TokenSequence = tuple[np.ndarray, int]  # tokens int64 [T] and the prompt length P >= 1

# Targets beyond the log-probs of the sequence's own tokens:
# "topk": the scorer's most likely tokens; "ids": the log-probs of given tokens; "hidden": final hidden states
Target = Literal["topk", "ids", "hidden"]
EVERY_TARGET: frozenset[Target] = frozenset({"topk", "ids", "hidden"})


@dataclass(frozen=True)
class Wanted:
    """Targets to compute for each response token, in addition to its log-prob."""

    topk: int | None = None
    ids: Sequence[TargetRef] = ()  # a `topk_ids` array per sequence, such as the student's; instead of `topk`
    hidden: bool = False
    vocab_size: int | None = None  # top-k and ids are normalised over token ids below this; None: over all
    plain: bool = False  # also the log-probs of the top-k at temperature 1
    fetched: bool = False  # return arrays instead of a reference to them

    @property
    def target(self) -> Target | None:
        """The kind of targets; None: log-probs of the sequence's own tokens suffice."""
        if self.hidden:
            return "hidden"
        return "topk" if self.topk else "ids" if self.ids else None


LOGPROBS = Wanted()


@dataclass(frozen=True)
class TeacherAnswer:
    """Log-probs of one sequence, with the requested targets."""

    logprobs: np.ndarray  # f32 [T-P], at the sampling temperature
    targets: TargetRef | None = None
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)  # targets if `fetched`; names as of TargetRef
    alignment: Alignment | None = None  # of the student's and the teacher's tokens, from a view; None: the same tokens


class TeacherScorer(Protocol):
    """Computes log-probs under a teacher's weights."""

    @property
    def name(self) -> str:
        """The teacher's name for error messages."""

    @property
    def targets(self) -> frozenset[Target]:
        """Kinds of targets that the scorer can compute."""

    @property
    def is_exact(self) -> bool:
        """Whether the scorer computes in f32, so that two computations of a log-prob differ only by rounding errors."""

    async def score(
        self, sequences: Sequence[TokenSequence], temperature: float, wanted: Wanted = LOGPROBS
    ) -> list[TeacherAnswer]:
        """Return an answer for each sequence, in order. Calls may run concurrently.

        Logits are divided by `temperature` before the softmax. A log-prob that is not finite is returned unchanged: the
        update that reads it is skipped and counted. RunError, with the scorer's name and a remedy, for a token outside
        the vocabulary, for targets that the scorer cannot compute, and after a failure.
        """

    def drain_metrics(self) -> dict[str, float]:
        """Return metrics `opd/teacher/NAME/*` since the last call, such as requests and tokens sent."""

    def end(self) -> None:
        """Release processes or connections; may be called again."""
