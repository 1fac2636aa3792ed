r"""`math_verify`: the reward is 1.0 if math-verify finds the final answer equal to the ground truth, else 0.0.

math-verify finds the answer in the text, such as `\boxed{...}`, and compares expressions, sets and numbers. A
configuration's `math_rule` means this reward if no installed package has a reward of that name.
"""

import logging
from collections.abc import Sequence

from roll_opd.rewards.interface import RewardSample, Score
from roll_opd.rewards.reward_registry import register

GSM8K = "####"  # marker before the answer in GSM8K's rows


@register("math_verify", needs_ground_truth=True)
def math_verify(samples: Sequence[RewardSample]) -> list[Score]:
    """Return one score per sample. The reasons are: right, wrong, no answer, no ground truth."""
    return [_score(sample) for sample in samples]


def _score(sample: RewardSample) -> Score:
    if sample.ground_truth is None:  # 0 would count as wrong
        return Score(None, reason="no ground truth")
    right = is_right(sample.response, sample.ground_truth)
    if right is None:
        return Score(0.0, reason="no answer")
    return Score(float(right), reason="right" if right else "wrong")


def is_right(response: str, ground_truth: str) -> bool | None:
    """Return whether the final answer of a response equals the ground truth; None if the response has no answer.

    Only text after `</think>` is read. The comparison has no time limit. A caller that scores answers of a model runs
    it in a process that it can replace, as the reward workers do.
    """
    from math_verify import parse, verify  # takes a second

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it sets no time limit
    _, thought, answer = response.rpartition("</think>")
    if not thought and "<think>" in response:  # truncated within the thought
        return None
    found = parse(answer.rpartition(GSM8K)[2], parsing_timeout=0)
    if not found:
        return None
    gold = ground_truth.rpartition(GSM8K)[2].strip()
    wanted = parse(gold if "\\boxed" in gold else f"\\boxed{{{gold}}}", parsing_timeout=0)
    return bool(verify(wanted, found, timeout_seconds=None))
