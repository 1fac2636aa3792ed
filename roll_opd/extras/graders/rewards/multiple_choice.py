"""`multiple_choice`: the reward is 1.0 if a response chooses exactly the options of the ground truth, else 0.0."""

from collections.abc import Sequence

from roll_opd.extras.graders.choices import chosen, options_of, right_choices
from roll_opd.rewards.interface import RewardSample, Score, flag
from roll_opd.rewards.reward_registry import register


@register("multiple_choice", needs_ground_truth=True)
class MultipleChoice:
    """Multiple-choice score.

    The part `boxed` is 1 if the choice is boxed, else 0.

    Args:
        require_boxed: whether a choice without a box is wrong.
    """

    def __init__(self, require_boxed: bool = False) -> None:
        self.require_boxed = flag("multiple_choice", "require_boxed", require_boxed)

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        return [choice_score(sample, self.require_boxed) for sample in samples]


def choice_score(sample: RewardSample, require_boxed: bool = False) -> Score:
    """Return the score of one sample.

    The value of the score is None if the ground truth names no option.
    """
    options = options_of(sample.extra)
    right = None if sample.ground_truth is None else right_choices(sample.ground_truth, options)
    if right is None:
        return Score(None, reason="ground truth names no option")
    letters, boxed = chosen(sample.response, options)
    if not letters or (require_boxed and not boxed):
        return Score(0.0, {"boxed": float(boxed)}, "no choice")
    is_right = letters == right
    return Score(float(is_right), {"boxed": float(boxed)}, "right" if is_right else "wrong choice")
