"""The interface of a teacher: it computes log-probs of given tokens, and targets for distillation over several tokens.

All implementations, such as `megatron_teacher.MegatronScorer`, share the layers above them: routing by tag, order of
teachers and metrics (`teachers.scoring`), and the preflight. docs/extending.md shows how to add an implementation.

Legend: T tokens of a sequence, P prompt tokens, K tokens of a top-k. Entry t of a [T-P] array belongs to token P+t.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from roll_opd.samples.byte_alignment import Alignment
from roll_opd.samples.sample import TargetRef

TokenSequence = tuple[np.ndarray, int]  # tokens int64 [T] and the prompt length P >= 1

# Targets in addition to the log-probs of the sequence's tokens:
# "topk": the scorer's most likely tokens; "ids": the log-probs of given tokens; "hidden": final hidden states
Target = Literal["topk", "ids", "hidden"]
EVERY_TARGET: frozenset[Target] = frozenset({"topk", "ids", "hidden"})


@dataclass(frozen=True)
class Wanted:
    """The targets to compute for each response token, in addition to its log-prob."""

    topk: int | None = None
    # one `topk_ids` array per sequence, such as the student's top-k; used instead of `topk`
    ids: Sequence[TargetRef] = ()
    hidden: bool = False
    vocab_size: int | None = None  # targets are normalised over the token ids below this; None: over all ids
    plain: bool = False  # also return the log-probs of the top-k at temperature 1
    fetched: bool = False  # return arrays instead of a reference to them
    computed: bool = False  # compute the answer, even if one is stored

    @property
    def target(self) -> Target | None:
        """The kind of targets to compute, or None if only the log-probs of the sequence's own tokens are needed."""
        if self.hidden:
            return "hidden"
        return "topk" if self.topk else "ids" if self.ids else None


LOGPROBS = Wanted()


@dataclass(frozen=True)
class TeacherAnswer:
    """The log-probs of one sequence, and the targets that were requested."""

    logprobs: np.ndarray  # f32 [T-P], at the sampling temperature
    targets: TargetRef | None = None
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)  # targets if `fetched`; named as in TargetRef
    alignment: Alignment | None = None  # alignment of student and teacher tokens, set by a view; None: the same tokens


class TeacherScorer(Protocol):
    """Computes log-probs under a teacher's weights."""

    @property
    def name(self) -> str:
        """The teacher's name, for error messages."""

    @property
    def targets(self) -> frozenset[Target]:
        """The kinds of targets that the scorer can compute."""

    @property
    def is_exact(self) -> bool:
        """Whether the scorer computes in f32. Then two computations of a log-prob differ only by rounding errors."""

    async def score(
        self, sequences: Sequence[TokenSequence], temperature: float, wanted: Wanted = LOGPROBS
    ) -> list[TeacherAnswer]:
        """Return an answer for each sequence, in order. Calls may run concurrently.

        Logits are divided by `temperature` before the softmax. A log-prob that is not finite is returned unchanged; an
        update that reads it is skipped and counted.

        Raises RunError if a token is outside the vocabulary, if the scorer cannot compute the targets, or if the scorer
        fails. The message of the error has the scorer's name and a remedy.
        """

    def drain_metrics(self) -> dict[str, float]:
        """Return the metrics `opd/teacher/NAME/*` since the last call, such as the number of requests."""

    def end(self) -> None:
        """Release processes or connections. Further calls do nothing."""
