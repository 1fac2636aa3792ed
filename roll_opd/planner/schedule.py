"""Reads `lr_scheduler_type`, its arguments and the warm-up: the learning rate of each update, in Megatron's terms."""

import math
from typing import Any

from roll_opd.config.roll_keys import SCHEDULES
from roll_opd.config.schema import TrainingArgs


def read_schedule(args: TrainingArgs, total: int) -> dict[str, Any]:
    """Return the schedule's fields of an `OptimizerPlan` for a run of `total` updates."""
    style, kwargs = SCHEDULES[args.lr_scheduler_type], args.lr_scheduler_kwargs
    warmup = args.warmup_steps or math.ceil(args.warmup_ratio * total)
    peak = args.learning_rate if kwargs.max_lr is None else kwargs.max_lr
    if not peak:
        args.diag.warn("learning_rate", "0 leaves the weights as they are: such a run measures and learns nothing")
    if warmup > total:
        args.diag.note("", f"{warmup} warm-up updates are more than the run's {total}")
    for name, rate in (("min_lr", kwargs.min_lr), ("init_lr", kwargs.init_lr)):
        if rate > peak:
            kwargs.diag.error(name, f"{rate:g} is above the {peak:g} after the warm-up; lower it")
    if kwargs.lr_decay_steps is not None and kwargs.lr_decay_steps <= warmup:
        kwargs.diag.error(
            "lr_decay_steps",
            f"{kwargs.lr_decay_steps} is not more than the {warmup} updates of the warm-up; raise it",
        )
    if style == "WSD" and kwargs.wsd_decay_steps is None:
        kwargs.diag.error(
            "wsd_decay_steps",
            f"is missing; {args.lr_scheduler_type} needs it, write how many updates its decay takes",
        )
    elif style in ("linear", "cosine") and total == 1 and not (warmup or kwargs.min_lr or kwargs.lr_decay_steps):
        args.diag.warn(
            "lr_scheduler_type",
            f"{args.lr_scheduler_type} is 0 in a run's last update, and this one has no other; write constant",
        )
    return {
        "learning_rate": peak,
        "lr_scheduler_type": style,
        "warmup_steps": warmup,
        "total_steps": total,
        "decay_steps": kwargs.lr_decay_steps,
        "initial_learning_rate": kwargs.init_lr,
        "min_learning_rate": kwargs.min_lr,
        "wsd_decay_steps": kwargs.wsd_decay_steps if style == "WSD" else None,
        "wsd_decay_style": (kwargs.lr_wsd_decay_style or "exponential") if style == "WSD" else None,
    }
