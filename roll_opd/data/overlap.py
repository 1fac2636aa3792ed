"""Overlap between validation and training rows. Legend: V validation rows, L training rows."""

from collections.abc import Sequence

import numpy as np

from roll_opd.data.dataset import PromptSet


def overlap_warning(validation: PromptSet, learned: Sequence[PromptSet]) -> str | None:
    """Return a warning with the number of validation rows whose prompts are also trained on; None without overlap."""
    held_out = validation.prompt_hashes(np.arange(len(validation)))  # [V]
    numbers = [prompts.drawn() for prompts in learned]
    trained = [prompts.prompt_hashes(drawn) for prompts, drawn in zip(learned, numbers, strict=True)]  # [L] each
    shared = np.isin(held_out, np.concatenate(trained))
    if not shared.any():
        return None
    first = int(shared.argmax())
    same = next(
        prompts.where(int(drawn[place[0]]))
        for prompts, drawn, hashes in zip(learned, numbers, trained, strict=True)
        if len(place := np.flatnonzero(hashes == held_out[first]))
    )
    count, total = int(shared.sum()), len(validation)
    return (
        f"validation: {count} of {total} validation rows ({_share(count, total)}) are also training rows:"
        f" {validation.where(first)} has the same prompt as {same}. Their results do not measure new prompts; remove"
        " them from the training files, or name other files in validation.data_args.file_name"
    )


def _share(count: int, total: int) -> str:
    share = 100 * count / total
    return f"{share:.0f} %" if share >= 1 else f"{share:.1g} %"
