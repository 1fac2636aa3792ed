"""Rows of the validation that are among those that are learned from. Legend: V, L their numbers."""

from collections.abc import Sequence

import numpy as np

from roll_opd.data.prompts import PromptSet


def shared_rows(validation: PromptSet, learned: Sequence[PromptSet]) -> str | None:
    """Say how many rows of `validation` have the prompt of a row that is drawn from `learned`; None where none has."""
    held_out = validation.asked(np.arange(len(validation)))  # [V]
    numbers = [prompts.drawn() for prompts in learned]
    asked = [prompts.asked(drawn) for prompts, drawn in zip(learned, numbers, strict=True)]  # [L] each
    shared = np.isin(held_out, np.concatenate(asked))
    if not shared.any():
        return None
    first = int(shared.argmax())
    same = next(
        prompts.where(int(drawn[place[0]]))
        for prompts, drawn, hashes in zip(learned, numbers, asked, strict=True)
        if len(place := np.flatnonzero(hashes == held_out[first]))
    )
    count, total = int(shared.sum()), len(validation)
    return (
        f"validation: {count} of {total} validation rows ({_share(count, total)}) are also learned from:"
        f" {validation.where(first)} asks what {same} asks. What is measured on them is no measure of new prompts; take"
        " them out of the training files, or name other files in validation.data_args.file_name"
    )


def _share(count: int, total: int) -> str:
    share = 100 * count / total
    return f"{share:.0f} %" if share >= 1 else f"{share:.1g} %"
