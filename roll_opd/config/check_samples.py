"""Checks of values: which samples of a step are learned from, and with what weight."""

from roll_opd.config.errors import Diagnostics
from roll_opd.config.schema import SampleKeys, Top, keys_of

OF_A_SWITCH = {
    "difficulty_low_threshold": "difficulty_mask",
    "difficulty_high_threshold": "difficulty_mask",
    "error_max_len_threshold": "error_max_len_clip",
}


def check_samples(top: Top, responses: int, agentic: bool, has_rewards: bool, diagnostics: Diagnostics) -> None:
    """Say where a mask of samples leaves nothing, or has nothing to decide by. `responses` are those of a prompt."""
    written = top.written & keys_of(SampleKeys).keys()
    if agentic:  # ROLL's environments know none of them
        for key in written:
            diagnostics.ignore(key)
        return
    for key in sorted(written & OF_A_SWITCH.keys()):
        if not getattr(top, OF_A_SWITCH[key]):
            diagnostics.ignore(key)
    if not has_rewards:
        for key in ("difficulty_mask", "error_max_len_clip"):
            if getattr(top, key):
                diagnostics.problem(key, "true decides by rewards, and there are none; remove it, or write rewards")
    if top.difficulty_mask and responses == 1:
        diagnostics.say("difficulty_mask", "true has no effect with one response a prompt, as in ROLL")
    if top.difficulty_mask and top.difficulty_low_threshold >= top.difficulty_high_threshold:
        diagnostics.problem(
            "difficulty_low_threshold",
            f"{top.difficulty_low_threshold:g} is not below difficulty_high_threshold"
            f" {top.difficulty_high_threshold:g}, so that no prompt is learned from; lower it",
        )
    if top.rl_loss_coef == 0:
        diagnostics.say(
            "rl_loss_coef", "0 takes the policy loss away, and with it all that rewards and advantages teach"
        )
