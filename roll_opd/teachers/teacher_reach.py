"""The reach of a teacher's context: a change of early text must change the log-probs of all later tokens.

A teacher whose context is truncated computes plausible log-probs. These do not change by a single bit if text beyond
the context changes. The original and the changed text have the same length and therefore the same micro-batches and
shapes. So rounding causes no difference, and noise could only hide a fault.

Legend: T tokens of a text, N of them scored, K tokens of a top-k.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roll_opd.teachers.teacher_checks import Check, Verdict

PARTS = 8  # parts of a text; one is changed
SMALLEST = 1e-6  # nats; smaller differences count as equal
SHORT = 16  # tokens: texts with fewer tokens after the change give no verdict
FAR = 0.8  # share of the tested distance at which a change must have an effect


@dataclass(frozen=True)
class Change:
    """A text with a part in reverse order."""

    tokens: np.ndarray  # int64 [T]
    end: int  # the first token after the part
    differs: bool = True  # the reversed part must differ


@dataclass(frozen=True)
class Reach:
    """Distances from the end of a changed part, in tokens: to the last changed log-prob, and to the last token."""

    seen: int
    tested: int

    @property
    def falls_short(self) -> bool:
        """Whether the change has no effect on the end of the text."""
        return self.tested >= SHORT and self.seen < FAR * self.tested


def changes(texts: Sequence[np.ndarray]) -> list[Change]:
    """Return each text with one of its `PARTS` parts reversed: the first part of the first text, and so on.

    The last part is never changed: nothing follows it.
    """
    found = []
    for number, tokens in enumerate(texts):
        part = number % (PARTS - 1)
        start, end = (len(tokens) * place // PARTS for place in (part, part + 1))
        changed = tokens.copy()
        changed[start:end] = tokens[start:end][::-1]
        found.append(Change(changed, end, not np.array_equal(changed, tokens)))
    return found


def difference(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return for each token the largest difference of two computations [N, 1 + K] of log-prob and top-k, f64 [N]."""
    return np.abs(one.astype(np.float64) - other).max(1)


def reach(differences: np.ndarray, first: int, end: int) -> Reach:
    """Return distances from `end` to the last change and last token; `differences` [N] start at token `first`."""
    distances = first + np.arange(len(differences)) - end
    seen = distances[~(differences <= SMALLEST) & (distances >= 0)]
    return Reach(int(seen.max(initial=0)), int(distances.max(initial=0)))


def reach_check(found: Sequence[Reach]) -> Check:
    """Return the verdict on several changed texts: failed if two changes, or the farthest one, have no late effect."""
    farthest = max(found, key=lambda one: one.tested)
    short = [one for one in found if one.falls_short]
    verdict: Verdict = "warning" if short else "ok"
    if len(short) > 1 or farthest.falls_short:
        verdict = "failed"
    value = f"{max(one.seen for one in found)} of {farthest.tested} tokens back"
    if not short:
        return Check("reach of its context", value, verdict, "distance at which a change of the text changes log-probs")
    return Check(
        "reach of its context",
        f"{value}; {len(short)} of {len(found)} changes not seen",
        verdict,
        "changes of earlier text leave the teacher's log-probs the same to the last bit: its context is truncated, by a"
        " window of attention, a limit on its length, or a truncated prompt",
    )
