"""The ledger of a run's prompts: a row per step, with the draws trained on or filtered out, in a checksum chain.

A draw is a position in the run's sequence of prompts, over all epochs: a prompt that is read in two epochs has two
draws. A row's checksum covers the row and the checksum before it, so a changed, missing or reordered row breaks the
chain. A resume removes the rows after its checkpoint; the resumed run writes these rows again. Each draw has one row at
most: trained, or dropped by a filter. Draws after the last row are in flight. With generation ahead of training a row
also has the versions of the weights that sampled each trained draw; with these, the run can be repeated in the same
order.
"""

import json
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from roll_opd.tracking.run_directory import FATES, LEDGER, VERSIONS, checkpoints_of, ledger_checksum, read_jsonl

STATE = "run_state.json"


def audit(run: Path) -> tuple[dict[str, int], list[str]]:
    """Return the counts of a run's ledger, and its errors: each draw must be trained or filtered exactly once.

    Checkpoints must have the position in the data that the ledger implies. Raises FileNotFoundError if there is no
    ledger.
    """
    if not (run / LEDGER).is_file():
        raise FileNotFoundError(f"{run / LEDGER} does not exist: only runs with a rollout have a ledger")
    rows, errors, last = read_jsonl(run / LEDGER), [], 0
    for number, row in enumerate(rows, 1):
        last = ledger_checksum(row, last)
        if last != row["checksum"]:
            errors.append(f"row {number} (step {row['step']}) has a wrong checksum: a row was changed or removed")
            last = row["checksum"]
    fates = Counter(draw for row in rows for fate in FATES for draw in row[fate])
    errors += [f"draw {draw} occurs {times} times" for draw, times in sorted(fates.items()) if times > 1]
    ages = {row["step"]: [row["step"] - 1 - oldest for oldest, _ in row.get(VERSIONS, ())] for row in rows}
    errors += [
        f"step {step} trained on a draw that later weights sampled"
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
    counts = {fate: sum(len(row[fate]) for row in rows) for fate in FATES}
    counts |= {"in flight before the last draw": len(later)}
    known = [age for of_step in ages.values() for age in of_step]
    return {"steps": len(rows), **counts, **({"largest age": max(known)} if known else {})}, errors


def _done(state: dict[str, Any]) -> set[int]:
    """Return the draws that are trained or filtered according to the state of a checkpoint."""
    source = state["source"]
    position = source["taken"] if "taken" in source else sum(stream["taken"] for stream in source["streams"])
    return {*range(position), *source.get("passed", ())}


def _of_checkpoint(
    step: int, state: dict[str, Any], rows: Sequence[dict[str, Any]], earlier: Collection[int]
) -> list[str]:
    """Return an error if a checkpoint's position in the data differs from the ledger's, else an empty list.

    `earlier` has the draws before the ledger.
    """
    done = _done(state)
    known = {draw for row in rows if row["step"] <= step for fate in FATES for draw in row[fate]} | set(earlier)
    if done == known:
        return []
    missing, extra = sorted(done - known)[:3], sorted(known - done)[:3]
    return [
        f"the checkpoint of step {step} counts draws {missing} as done, which are not in the ledger, and draws {extra}"
        " as open, which are in the ledger"
    ]
