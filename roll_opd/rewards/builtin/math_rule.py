r"""The reward of an exactly right mathematical answer: 1.0, else 0.0.

`final_answer` finds the answer in the text, `notation` writes it in one way, `equality` compares it with the ground
truth: numbers exactly, as fractions; expressions and sets (LaTeX) by math-verify in processes of their own, because
what a model writes can keep a computer algebra system busy for ever.
"""

from collections.abc import Sequence

from roll_opd.rewards.interface import Failure, RewardError, RewardSample, Score
from roll_opd.rewards.mathematics.equality import number_in, same_answer
from roll_opd.rewards.mathematics.final_answer import boxed, final_answer
from roll_opd.rewards.mathematics.notation import MAX_EXPRESSION
from roll_opd.rewards.mathematics.processes import Algebra, Busy, Crashed, TimedOut
from roll_opd.rewards.registry import register

GSM8K = "####"  # behind which its rows have their answer


@register("math_rule", needs_ground_truth=True, keeps_time=True)
class MathRule:
    """1.0 for each sample whose final answer equals its ground truth, else 0.0; any text at all is taken.

    `timeout`: seconds of the processor for the algebra of one sample. An answer that takes longer is not right.
    """

    def __init__(self, timeout: float = 3.0) -> None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 3600:
            raise RewardError(f"math_rule: timeout is {timeout!r}; give a number of seconds, such as 3")
        self._timeout = timeout

    def score(self, samples: Sequence[RewardSample]) -> list[Score | Failure]:
        """Return a score each; reasons are right, wrong, no answer, timeout, crash and no ground truth."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: RewardSample) -> Score | Failure:
        if sample.ground_truth is None:  # a reward of 0 for it would be an invention
            return Score(None, reason="no ground truth")
        try:
            right = is_right(sample.response, sample.ground_truth, self._timeout)
        except TimedOut:
            return Score(0.0, reason="timeout")
        except Crashed:
            return Score(0.0, reason="crash")
        except Busy:
            return Failure("busy", "math_rule: too many answers at once that take long; raise the domain's world_size")
        if right is None:
            return Score(0.0, reason="no answer")
        return Score(float(right), reason="right" if right else "wrong")


def is_right(response: str, ground_truth: str, timeout: float = 3.0) -> bool | None:
    """Return whether the final answer of `response` equals `ground_truth`; None where it has no final answer.

    Raises `TimedOut`, `Crashed` or `Busy` where the comparison did not end.
    """
    gold = boxed(ground_truth) or ground_truth.rpartition(GSM8K)[2]
    answer = final_answer(response, numeric=number_in(gold) is not None)
    if answer is None or not answer.strip():
        return None
    if max(len(gold), len(answer)) > MAX_EXPRESSION:
        return gold.strip() == answer.strip()
    return same_answer(gold, answer, Algebra(timeout))
