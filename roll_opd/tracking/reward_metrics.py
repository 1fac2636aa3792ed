"""Metrics of validation and of a step's rewards in each domain, and statistics of values.

`docs/metrics.md` lists every name. Metrics that also exist in ROLL have the same names.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from roll_opd.samples.sample import Sample, one_a_run

PERCENTS = {"p50": 50, "p95": 95}
REDUCTIONS: dict[str, Callable[[np.ndarray], float]] = {
    "mean": lambda values: float(values.mean()),
    "sum": lambda values: float(values.sum()),
    "max": lambda values: float(values.max()),
    "min": lambda values: float(values.min()),
    "last": lambda values: float(values[-1]),
    "p50": lambda values: float(np.percentile(values, PERCENTS["p50"])),
    "p95": lambda values: float(np.percentile(values, PERCENTS["p95"])),
}

GRADED = "val/reward/max"  # present if some reward is neither 0 nor 1; the accuracy is then not the mean reward
RIGHT = 1.0  # smallest reward of a correct answer; rule rewards are 1 for correct and 0 for wrong answers


def statistics(prefix: str, values: Sequence[float] | np.ndarray, kinds: Sequence[str]) -> dict[str, float]:
    """Reduce `values` with each reduction in `kinds`.

    Return a dict from `prefix/kind` to the result. The dict is empty if there are no values.
    """
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        return {}
    ranks = [kind for kind in kinds if kind in PERCENTS]
    # sorted once for all quantiles
    found = np.percentile(array, [PERCENTS[kind] for kind in ranks]).tolist() if ranks else []
    known = dict(zip(ranks, found, strict=True))
    return {f"{prefix}/{kind}": known[kind] if kind in known else REDUCTIONS[kind](array) for kind in kinds}


MAX_REASONS, OTHERS = 20, "other"  # number of reasons with a separate metric; name for the sum of all other reasons
MAX_REASON_LENGTH = 40  # maximum characters of a reason in a metric's name


def reward_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics `reward/<domain>/...` of all samples that have a reward domain.

    The dict is empty if no sample has a reward domain.
    """
    domains = dict.fromkeys(sample.domain for sample in samples if sample.domain)
    found: dict[str, float] = {}
    for domain in domains:
        found |= _domain_metrics(domain, [e for e in samples if e.domain == domain])
    return found


def scoring_metrics(
    domain: str, errors: Mapping[str, int], latencies: Sequence[float], queued: Sequence[int], restarts: int
) -> dict[str, float]:
    """Return `reward/<domain>/{errors,timeouts}` and `time/reward/<domain>/{latency,queue,restarts}` of a step.

    Args:
        errors: failed attempts by kind.
        latencies: seconds from the end of a sample to its score.
        queued: the length of the queue after each change.
        restarts: number of replaced workers.
    """
    by_name: Counter[str] = Counter()
    for kind, count in errors.items():
        by_name[_metric_part(kind)] += count
    return {
        f"reward/{domain}/errors": float(sum(errors.values())),
        f"reward/{domain}/timeouts": float(errors.get("timeout", 0)),
        **{f"reward/{domain}/errors/{name}": float(count) for name, count in sorted(by_name.items())},
        **statistics(f"time/reward/{domain}/latency", latencies, ("p50", "p95", "max")),
        **statistics(f"time/reward/{domain}/queue", queued, ("mean", "max")),
        f"time/reward/{domain}/restarts": float(restarts),
    }


def _metric_part(text: str) -> str:
    """Convert a reason or an error kind to a valid part of a metric's name."""
    return re.sub(r"[^\w.-]+", "_", text)[:MAX_REASON_LENGTH].strip("_")


def _most_common(counts: Counter[str]) -> dict[str, int]:
    """Return the counts of the most common reasons, and one sum for all other reasons.

    The number of reasons is limited, because every reason becomes a metric with its own chart.
    """
    common = dict(counts.most_common(MAX_REASONS))
    others = counts.total() - sum(common.values())
    return common | ({OTHERS: others + common.get(OTHERS, 0)} if others else {})


def _domain_metrics(domain: str, samples: Sequence[Sample]) -> dict[str, float]:
    runs = [sample for sample in one_a_run(samples) if sample.reward is not None]
    rewards = [e.reward for e in runs if e.reward is not None]
    groups: dict[str, list[float]] = {}
    parts: dict[str, list[float]] = {}
    for sample, reward in zip(runs, rewards, strict=True):
        groups.setdefault(sample.group_id, []).append(reward)
    for sample in samples:
        for part, value in sample.reward_parts.items():
            parts.setdefault(part, []).append(value)
    several = [group for group in groups.values() if len(group) > 1]
    found = statistics(f"reward/{domain}", rewards, ("mean", "max", "min"))
    if rewards:
        found[f"reward/{domain}/std"] = float(np.std(rewards))
    if several:
        found[f"reward/{domain}/zero_variance_rate"] = float(np.mean([len(set(group)) == 1 for group in several]))
    for part, values in parts.items():
        found |= statistics(f"reward/{domain}/{part}", values, ("mean",))
    reasons = Counter(_metric_part(sample.reward_reason) for sample in samples if sample.reward_reason)
    found |= {
        f"reward/{domain}/reason/{reason}": float(count) for reason, count in sorted(_most_common(reasons).items())
    }
    excluded = sum(sample.excluded for sample in samples)
    return found | ({f"reward/{domain}/excluded": float(excluded)} if excluded else {})
