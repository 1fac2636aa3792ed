"""Audit a run: compare its ledger with all other files of the run.

A forger of the ledger can compute its checksums again. Therefore `examine` compares the ledger with the other files
(`audit_checks`). A run over rows with answers has no ledger. It draws its prompts in order, so `prompts.jsonl` takes
the place of the ledger.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from roll_opd.tracking.audit_checks import CHECKS, EPOCH, unchecked
from roll_opd.tracking.audit_facts import Facts
from roll_opd.tracking.audit_records import Evidence, LedgerRow, read
from roll_opd.tracking.ledger import FATES
from roll_opd.tracking.run_directory import LEDGER, LOSSES, METRICS, PROMPTS, read_jsonl


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
    if losses := read_jsonl(run / LOSSES):
        counts["lost processes"] = len(losses)
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
