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
- `versions`: [oldest, newest] weight version of each draw in `trained`, in the order of `trained`. With these
  versions, the run can be repeated in the same order. Rows of earlier versions have the key only with async rollouts.
- `run`: id of the run, as in `run.json`; only in the first row.
- `checksum`: see `ledger_checksum`.

The rows form a checksum chain: the checksum of a row covers this row and the checksum of the previous row. Therefore a
changed, missing or reordered row breaks the chain. A resume removes the rows after the checkpoint, and the resumed run
writes these rows again.

A forger can compute the checksums again. Therefore `examine` compares the ledger with all other files
of the run (`ledger_checks`). A run over rows with answers has no ledger. It draws its prompts in order, so
`prompts.jsonl` takes the place of the ledger.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from roll_opd.tracking.audit_records import Evidence, LedgerRow, read
from roll_opd.tracking.ledger_checks import CHECKS, EPOCH, unchecked
from roll_opd.tracking.ledger_facts import Facts
from roll_opd.tracking.run_directory import FATES, LEDGER, METRICS, PROMPTS


@dataclass(frozen=True)
class Audit:
    """The result of an audit."""

    counts: dict[str, int]
    errors: list[str]  # contradictions
    damaged: list[str]  # what cannot be read
    checked: list[str]
    unchecked: list[str]  # what cannot be checked, and why


def audit(run: Path) -> tuple[dict[str, int], list[str]]:
    """Return the counts of a run's ledger, and all contradictions and damage that `examine` found."""
    found = examine(run)
    return found.counts, [*found.errors, *found.damaged]


def examine(run: Path, drawn_ids: Callable[[Evidence, int], list[str] | str] | None = None) -> Audit:
    """Compare the files of a run with each other.

    `drawn_ids` returns the ids of the first prompts in the data files, or the reason why they are unknown.
    Raises FileNotFoundError if no file has the draws of the run, and another OSError if the directory
    cannot be read.
    """
    found = read(run)
    rows = found.ledger if found.ledger is not None else _drawn_in_order(found)
    if rows is None:
        raise FileNotFoundError(_without_draws(found))
    draws = max((draw for row in rows for draw in row.draws), default=-1) + 1
    facts = Facts.of(found, rows, drawn_ids(found, draws) if drawn_ids else "only with --data")
    made = [check for check in CHECKS if check.lacks(facts) is None]
    errors = [error for check in made for error in check.errors(facts)]
    counts = {"steps": len(rows), **{fate: sum(len(row.fates.get(fate, ())) for row in rows) for fate in FATES}}
    counts["in flight before the last draw"] = facts.holes
    if ages := [row.step - 1 - oldest for row in rows for oldest, _ in row.versions]:
        counts["largest age"] = max(ages)
    damaged = [sentence for sentences in found.damaged.values() for sentence in sentences]
    return Audit(counts, errors, damaged, [check.what for check in made], [*found.cut, *unchecked(facts)])


def _drawn_in_order(found: Evidence) -> list[LedgerRow] | None:
    """Return the rows of a run without a ledger, which draws its prompts in order; None if it must have a ledger.

    A session has neither a ledger nor draws. A run that was killed before its first step has no rows.
    """
    is_run = any(part is not None for part in (found.prompts, found.metrics, found.facts, found.config))
    if not is_run or LEDGER in found.damaged or _has_rollout(found):
        return None
    prompts = {step: row["ids"] for step, row in sorted((found.prompts or {}).items()) if "filtered" not in row}
    rows: list[LedgerRow] = []
    first, draw = min(prompts, default=1), 0
    if first > 1:  # a run from another run's checkpoint
        step = min((step for step in found.states if step >= first - 1), default=None)
        if step is None:
            return []
        draw = found.states[step].position - sum(len(ids) for of_step, ids in prompts.items() if of_step <= step)
    for step, ids in prompts.items():
        end = draw + len(ids)
        rows.append(LedgerRow(step, {"trained": list(range(draw, end)), "filtered": []}, [], 0, None, {}))
        draw = end
    return rows


def _has_rollout(found: Evidence) -> bool:
    """Whether a step of the run has drawn prompts for samples."""
    drawn = any("filtered" in ids and any(ids.values()) for ids in (found.prompts or {}).values())
    logged = (found.metrics or {}).values()
    return drawn or any(bool(row.get(EPOCH)) and "rollout/filtered_prompts" in row for row in logged)


def _without_draws(found: Evidence) -> str:
    if LEDGER in found.damaged:
        return found.damaged[LEDGER][0]
    if _has_rollout(found):
        return f"{found.run / LEDGER} does not exist, although steps of this run have drawn prompts: it was removed"
    absent = " and ".join(name for name in (METRICS, PROMPTS) if name in found.missing)
    return f"{found.run / LEDGER} does not exist: only runs with a rollout have a ledger ({absent} are missing too)"
