"""The ledger of a run: one row per step, with the fate of each draw that the step used up.

A draw is a position in the run's sequence of prompts, counted over all epochs. A prompt that is read in two epochs has
two draws. Each draw occurs in at most one row, with one of three fates. Draws that are not yet in any row are in
flight.

The keys of a row:

- `step`: number of the step, from 1.
- `trained`: draws that the step trained on.
- `filtered`: draws whose group a filter rejected, or whose runs returned no sample on purpose.
- `failed`: draws that were not trained on because runs or rewards of their group failed. Either no sample is left, or
  the failure makes the group unusable (`replace`), or a filter rejected the rest of the group.
- `versions`: [oldest, newest] weight version of each draw in `trained`, in the order of `trained`. The key exists only
  if generation runs ahead of training. With these versions, the run can be repeated in the same order.
- `checksum`: see `ledger_checksum`.

The rows form a checksum chain: the checksum of a row covers this row and the checksum of the previous row. Therefore a
changed, missing or reordered row breaks the chain. A resume removes the rows after the checkpoint, and the resumed run
writes these rows again.
"""

import json
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from roll_opd.tracking.run_directory import FATES, LEDGER, VERSIONS, checkpoints_of, ledger_checksum, read_jsonl

STATE = "run_state.json"


def audit(run: Path) -> tuple[dict[str, int], list[str]]:
    """Check the ledger of a run and return (counts, errors).

    There are four kinds of errors:

    - A draw is in more than one row.
    - The checksum chain is broken.
    - A draw was sampled with weights of a later step.
    - The data position of a checkpoint differs from the ledger.

    Raises FileNotFoundError if there is no ledger.
    """
    if not (run / LEDGER).is_file():
        raise FileNotFoundError(f"{run / LEDGER} does not exist: only runs with a rollout have a ledger")
    rows, errors, last = read_jsonl(run / LEDGER), [], 0
    for number, row in enumerate(rows, 1):
        last = ledger_checksum(row, last)
        if last != row["checksum"]:
            errors.append(f"row {number} (step {row['step']}) has a wrong checksum: a row was changed or removed")
            last = row["checksum"]
    fates = Counter(draw for row in rows for fate in FATES for draw in row.get(fate, ()))
    errors += [f"draw {draw} occurs {times} times" for draw, times in sorted(fates.items()) if times > 1]
    ages = {row["step"]: [row["step"] - 1 - oldest for oldest, _ in row.get(VERSIONS, ())] for row in rows}
    errors += [
        f"step {step} trained on a draw that was sampled with weights of a later step"
        for step, of_step in ages.items()
        if min(of_step, default=0) < 0
    ]
    states = {
        step: json.loads((path / STATE).read_text(encoding="utf-8"))
        for step, path in sorted(checkpoints_of(run).items())
        if (path / STATE).is_file()
    }
    earlier: set[int] = set()  # draws before the ledger of a run that continues another run's checkpoint
    if states and rows and rows[0]["step"] > 1:
        earlier = _done(next(iter(states.values()))) - fates.keys()
    for step, state in states.items():
        errors += _of_checkpoint(step, state, rows, earlier)
    later = set(range(max(fates, default=-1) + 1)) - fates.keys() - earlier
    counts = {fate: sum(len(row.get(fate, ())) for row in rows) for fate in FATES}
    counts |= {"in flight before the last draw": len(later)}
    known = [age for of_step in ages.values() for age in of_step]
    return {"steps": len(rows), **counts, **({"largest age": max(known)} if known else {})}, errors


def _done(state: dict[str, Any]) -> set[int]:
    """Return the draws that a checkpoint counts as used up. `state` is the run state of the checkpoint."""
    source = state["source"]
    position = source["taken"] if "taken" in source else sum(stream["taken"] for stream in source["streams"])
    return {*range(position), *source.get("passed", ())}


def _of_checkpoint(
    step: int, state: dict[str, Any], rows: Sequence[dict[str, Any]], earlier: Collection[int]
) -> list[str]:
    """Return a list with one error if the data position of a checkpoint differs from the ledger, else an empty list.

    Args:
        step: step of the checkpoint.
        state: run state of the checkpoint.
        rows: rows of the ledger.
        earlier: draws that were used up before the ledger begins.
    """
    done = _done(state)
    known = {draw for row in rows if row["step"] <= step for fate in FATES for draw in row.get(fate, ())} | set(earlier)
    if done == known:
        return []
    missing, extra = sorted(done - known)[:3], sorted(known - done)[:3]
    return [
        f"the checkpoint of step {step} disagrees with the ledger: draws {missing} are done only in the checkpoint, and"
        f" draws {extra} are done only in the ledger"
    ]
