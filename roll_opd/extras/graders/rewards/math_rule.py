r"""`math_rule`: the reward is 1.0 for an exactly right mathematical answer, else 0.0.

`final_answer` finds the answer in the text, `notation` normalises it, and `equality` compares it with the ground truth.
Numbers are compared exactly, as fractions. LaTeX expressions and sets are compared by math-verify. It runs in separate
processes, because an answer can keep a computer algebra system busy forever.
"""

from collections.abc import Sequence

from roll_opd.extras.graders.mathematics.equality import number_in, same_answer
from roll_opd.extras.graders.mathematics.final_answer import boxed, final_answer
from roll_opd.extras.graders.mathematics.notation import MAX_EXPRESSION
from roll_opd.extras.graders.mathematics.processes import Busy, Crashed, TimedAlgebra, TimedOut
from roll_opd.rewards.interface import Failure, RewardError, RewardSample, Score
from roll_opd.rewards.reward_registry import register

GSM8K = "####"  # marker before the answer in GSM8K's rows


@register("math_rule", needs_ground_truth=True, keeps_time=True)
class MathRule:
    """The score is 1.0 if the final answer of a sample equals its ground truth, else 0.0.

    Any text can be scored.

    Args:
        timeout: CPU seconds for the algebra of one sample. An answer that takes longer counts as wrong.
    """

    def __init__(self, timeout: float = 3.0) -> None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 3600:
            raise RewardError(f"math_rule: timeout is {timeout!r}; write a number of seconds, such as 3")
        self._timeout = timeout

    def score(self, samples: Sequence[RewardSample]) -> list[Score | Failure]:
        """Return one score per sample.

        The reasons of scores are: right, wrong, no answer, timeout, crash, no ground truth.
        """
        return [self._score(sample) for sample in samples]

    def _score(self, sample: RewardSample) -> Score | Failure:
        if sample.ground_truth is None:  # 0 would count as wrong
            return Score(None, reason="no ground truth")
        try:
            right = is_right(sample.response, sample.ground_truth, self._timeout)
        except TimedOut:
            return Score(0.0, reason="timeout")
        except Crashed:
            return Score(0.0, reason="crash")
        except Busy:
            return Failure("busy", "math_rule: too many slow comparisons of answers; raise the domain's world_size")
        if right is None:
            return Score(0.0, reason="no answer")
        return Score(float(right), reason="right" if right else "wrong")


def is_right(response: str, ground_truth: str, timeout: float = 3.0) -> bool | None:
    """Return whether the final answer of a response equals the ground truth.

    The result is None if the response has no final answer. Raises `TimedOut`, `Crashed` or `Busy` if the comparison did
    not finish.
    """
    gold = boxed(ground_truth) or ground_truth.rpartition(GSM8K)[2]
    answer = final_answer(response, numeric=number_in(gold) is not None)
    if answer is None or not answer.strip():
        return None
    if max(len(gold), len(answer)) > MAX_EXPRESSION:
        return gold.strip() == answer.strip()
    return same_answer(gold, answer, TimedAlgebra(timeout))


def equals(answer: str, ground_truth: str) -> bool:
    """Return whether an answer equals the ground truth; False if the comparison does not finish. Raises `Busy`."""
    try:
        return bool(is_right(rf"\boxed{{{answer}}}", ground_truth))
    except (TimedOut, Crashed):  # the answer is not proven right
        return False
