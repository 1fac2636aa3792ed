"""Checks of values: which samples of a step are learned from, and with what weight."""

from roll_opd.config.schema import Top


def check_samples(top: Top, responses: int, has_rewards: bool) -> None:
    """Say where a mask of samples leaves nothing, or has nothing to decide by. `responses` are those of a prompt."""
    if not has_rewards:
        for key in ("difficulty_mask", "error_max_len_clip"):
            if getattr(top, key):
                top.tell.problem(key, "true decides by rewards, and there are none; remove it, or write rewards")
    if top.difficulty_mask and responses == 1:
        top.tell.say("difficulty_mask", "true has no effect with one response a prompt, as in ROLL")
    if top.difficulty_mask and top.difficulty_low_threshold >= top.difficulty_high_threshold:
        top.tell.problem(
            "difficulty_low_threshold",
            f"{top.difficulty_low_threshold:g} is not below difficulty_high_threshold"
            f" {top.difficulty_high_threshold:g}, so that no prompt is learned from; lower it",
        )
    if top.rl_loss_coef == 0:
        top.tell.say("rl_loss_coef", "0 takes the policy loss away, and with it all that rewards and advantages teach")
