"""Settings and checks of runs with async rollouts."""

from collections.abc import Sequence

from runs import Run

from roll_opd.samples.versions import sampling_versions
from roll_opd.tracking.audit import audit


def ahead(bound: int, depth: int | None = None, on_update: str = "continue") -> tuple[str, ...]:
    """Return the overrides for a bound and a depth in batches."""
    settings = ("deterministic=false", f"async_generation_ratio={bound}", f"on_weight_update={on_update}")
    return (*settings, f"async_depth={depth}") if depth is not None else settings


def check_ahead(run: Run, bound: int, groups: int, steps: int, resumed_after: int = 0) -> None:
    """Check the ages of all tokens, the ledger and the updates of a run with batches of `groups` groups.

    samples.jsonl must have every sample. The counts of groups begin again after the step `resumed_after`.
    """
    assert run.code == 0, run.output[-3000:]
    rows = [row for row in run.rows("metrics.jsonl") if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    counts, errors = audit(run.path)
    assert errors == [] and counts["trained"] == steps * groups
    samples, largest = run.rows("samples.jsonl"), 0
    for row, entry in zip(rows, run.rows("ledger.jsonl"), strict=True):
        version = row["step"] - 1
        ages = ages_of([sample for sample in samples if sample["step"] == row["step"]], version)
        oldest = version - min(first for first, _ in entry["versions"])
        assert min(ages) >= 0 and max(ages) == row["rollout/async/age_max"] == oldest <= bound
        assert len(entry["trained"]) == groups
        counted = row["step"] - (resumed_after if row["step"] > resumed_after else 0)
        assert row["rollout/async/trained_groups"] == counted * groups <= row["rollout/async/admitted_groups"]
        assert row.get("actor/skipped_updates", 0) == 0 and 0 < row["rollout/mismatch/ess"] <= 1 + 1e-9
        largest = max(largest, *ages)
    assert largest > 0  # otherwise nothing was ahead
    norms = [row["actor/grad_norm"] for row in rows if "actor/grad_norm" in row]  # none while a critic warms up
    assert norms and all(norm > 0 for norm in norms)


def ages_of(samples: Sequence[dict], version: int) -> set[int]:
    """Return the ages in versions of all sampled tokens; every action token must have a version."""
    ages = set()
    for sample in samples:
        if sample.get("demonstration"):
            continue
        labelled = [of is not None for of, tokens in sample["versions"] for _ in range(tokens)]
        assert labelled == [bool(acted) for acted in sample["action_mask"]]
        ages |= {version - of for of in sampling_versions(tuple(map(tuple, sample["versions"])))}
    return ages
