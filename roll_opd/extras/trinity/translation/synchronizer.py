"""Translate the synchronizer and the staleness control of a Trinity-RFT configuration.

Trinity-RFT bounds the age of samples by the steps between two transfers of weights; this package bounds the age itself
(`async_generation_ratio`).
"""

import math

from roll_opd.extras.trinity.translation.reading import Translation

_ALIASES = {"dynamic_by_explorer": "explorer_driven", "dynamic_by_trainer": "trainer_driven"}
STYLES = ("fixed", "explorer_driven", "trainer_driven", "fully_async")
_STALENESS = "algorithm.sample_strategy_args.max_staleness"


def synchronizer(read: Translation, updates: int) -> None:
    """Translate the bound of the samples' age, the treatment of running answers, and the correction of old samples.

    `updates` is the number of updates in a step; a step of Trinity-RFT's trainer is one update.
    """
    if not read.machine.has_gpus:
        for key in read.found:
            if key.startswith("synchronizer.") or key == _STALENESS:
                read.drop(key, "without GPUs, each step samples with the weights of the previous step")
        return
    written, style_key = read.first("synchronizer.sync_style", default="fixed")
    style = _ALIASES.get(str(written).lower(), str(written).lower())
    if style not in STYLES:
        got = read.diag.as_written(style_key, written)
        read.diag.error(style_key, f"should be one of {', '.join(STYLES)}, got {got}")
        return
    age, keys = _largest_age(read, style, updates)
    if style != "fixed":
        read.drop(style_key, f"{style} has no bound of the samples' age; here async_generation_ratio is the bound")
    limit = _limit(read, updates)
    if limit is not None:
        age = min(age, limit) if style == "fixed" else limit
        keys.append(_STALENESS)
    keys = [key for key in keys if key in read.found]
    if keys or age:
        read.put("async_generation_ratio", age, *keys)
    if age and style != "fully_async":  # Trinity-RFT finishes all running answers before it transfers weights
        read.put("on_weight_update", "wait", *keys)
    if age and not read.is_pure:  # the reward's part: Trinity-RFT's ratio is to the engine's log-probs
        read.put("train_infer_correction.is_weight.enabled", True, *keys)


def _largest_age(read: Translation, style: str, updates: int) -> tuple[int, list[str]]:
    """Return (age, keys): the largest age in steps if the explorer waits for the trainer; the keys that set it.

    The explorer samples `interval + offset` steps with the first weights, then `interval` steps with the weights that
    are `offset` steps old.
    """
    of_trainer = style in ("trainer_driven", "fully_async")
    interval_key = f"synchronizer.{'trainer' if of_trainer else 'explorer'}_sync_interval"
    if interval_key not in read.found:
        interval_key = "synchronizer.sync_interval"
    interval = read.number(interval_key, 1)
    if of_trainer and interval_key != "synchronizer.sync_interval":
        interval = math.ceil(interval / updates)
    ahead_key = "explorer.max_inflight_batches" if style == "fully_async" else "synchronizer.sync_offset"
    ahead = read.number(ahead_key, 2) if style == "fully_async" else read.number(ahead_key, 0, least=0)
    return interval - 1 + ahead, [interval_key, ahead_key]


def _limit(read: Translation, updates: int) -> int | None:
    """Return the largest age in steps that the staleness control permits; None without staleness control.

    Step s of Trinity-RFT's trainer reads experiences of version s - max_staleness or newer, and s - 1 is the trainer's
    version.
    """
    if _STALENESS not in read.found:
        return None
    limit = read.number(_STALENESS, 1) // updates - 1
    if limit < 0:
        read.diag.error(
            _STALENESS,
            f"{read.get(_STALENESS)!r} discards samples within a step, which has {updates} updates; write at least"
            f" {updates}, or set buffer.train_batch_size to all sequences of a step",
        )
        return None
    return limit
