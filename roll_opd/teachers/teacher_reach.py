"""The reach of a teacher's context: a change of early text must change the log-probs of all later tokens.

If a teacher's context is truncated, its log-probs look plausible. But they do not change at all if the text beyond the
context changes. The original and the changed text have the same length. The micro-batches and shapes are therefore the
same, and rounding causes no difference. Noise could hide a truncated context, but it cannot make a complete context
look truncated.

Legend for array axes: T tokens of a text, N scored tokens, K tokens of a top-k.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roll_opd.teachers.logprob_checks import Check, Verdict

PARTS = 8  # number of parts of a text; one part is changed
SMALLEST = 1e-6  # nats; log-probs with a smaller difference count as equal
SHORT = 16  # texts with fewer tokens after the change give no verdict
FAR = 0.8  # fraction of the tested distance at which a change must still have an effect


@dataclass(frozen=True)
class Change:
    """A text in which the tokens of one part are in reverse order."""

    tokens: np.ndarray  # int64 [T]
    end: int  # number of the first token after the part
    differs: bool = True  # false if the reversed part is the same as before


@dataclass(frozen=True)
class Reach:
    """Two distances in tokens from the end of a changed part.

    `seen` is the distance to the last changed log-prob. `tested` is the distance to the last token.
    """

    seen: int
    tested: int

    @property
    def falls_short(self) -> bool:
        """Whether the change has no effect on the end of the text.

        The result is false if `tested` is below `SHORT`.
        """
        return self.tested >= SHORT and self.seen < FAR * self.tested


def changes(texts: Sequence[np.ndarray]) -> list[Change]:
    """Return each text with one of its `PARTS` parts reversed.

    In the first text, part 1 is reversed; in the second text, part 2; and so on. The last part is never reversed,
    because no text follows it.
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
    """Return the largest absolute difference of two answers for each token, f64 [N].

    Args:
        one: f32 [N, 1 + K], the log-prob and the top-k log-probs of each token.
        other: f32 [N, 1 + K], the same values of the other answer.
    """
    return np.abs(one.astype(np.float64) - other).max(1)


def reach(differences: np.ndarray, first: int, end: int) -> Reach:
    """Return the distances from the end of a changed part to the last changed log-prob and to the last token.

    Args:
        differences: f64 [N], the change of the log-probs at each scored token.
        first: number of the first scored token.
        end: number of the first token after the changed part.
    """
    distances = first + np.arange(len(differences)) - end
    seen = distances[~(differences <= SMALLEST) & (distances >= 0)]
    return Reach(int(seen.max(initial=0)), int(distances.max(initial=0)))


def reach_check(found: Sequence[Reach]) -> Check:
    """Return the check of the teacher's reach.

    The check fails if two or more changes have no effect on the end of the text, or if the farthest change has none. If
    only one other change has no effect, the result is a warning.
    """
    farthest = max(found, key=lambda one: one.tested)
    short = [one for one in found if one.falls_short]
    verdict: Verdict = "warning" if short else "ok"
    if len(short) > 1 or farthest.falls_short:
        verdict = "failed"
    value = f"sees {max(one.seen for one in found)} tokens back, of {farthest.tested} tested"
    if not short:
        return Check(
            "reach of its context",
            value,
            verdict,
            "the largest distance at which a change of the text changes log-probs",
        )
    return Check(
        "reach of its context",
        f"{value}; {len(short)} of {len(found)} changes have no effect at the end",
        verdict,
        "changes of early text have no effect on the log-probs at the end: the teacher's context is truncated by an"
        " attention window, by a limit on the length, or by a truncation of its prompt",
    )
