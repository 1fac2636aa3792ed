"""Metrics of validation and of a step's rewards in each domain, and statistics of values.

`docs/metrics.md` lists every name. Metrics that also exist in ROLL have the same names.
"""

import math
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


def mean_stderr(groups: Sequence[Sequence[float]]) -> float:
    """Return the standard error of the mean over all values. There must be at least two groups.

    Values of different groups are independent. Values of one group, such as the rewards of one prompt's samples, may be
    correlated. Therefore each group counts as one observation (Cochran, Sampling Techniques, eq. 11.29: cluster
    sampling, ratio estimate).
    """
    sums, counts = (np.array([measure(group) for group in groups], dtype=np.float64) for measure in (sum, len))
    residuals = sums - counts * (sums.sum() / counts.sum())
    return float(np.sqrt((residuals**2).sum() * len(groups) / (len(groups) - 1)) / counts.sum())


def validation_metrics(samples: Sequence[Sample], per_prompt: int) -> dict[str, float]:
    """Return validation metrics over all held-out prompts, and for each tag. Each prompt has `per_prompt` (k) answers.

    The samples of a prompt share a `group_id`. Samples without a reward do not count. An episode of several steps
    counts as one sample. Its reward is the mean over its steps. If each step has a separate reward, as in a game, its
    reward is the sum over its steps.

    An answer is correct if its reward is at least `RIGHT`. `val_correct/<tag>/mean` is the fraction of correct answers,
    and `val_correct/<tag>/stderr` is its standard error over prompts. If some reward is neither 0 nor 1, the metrics
    `val/reward/<tag>/mean` and `val/reward/<tag>/stderr` of the rewards, `val/reward/max` (`GRADED`) and
    `val/reward/min` are also returned.

    If k > 1, two more metrics are computed over the prompts with k rewards.

    - `avg@k` is the mean fraction of correct answers.
    - `pass@j` is the probability that at least one of j answers is correct if the j answers are drawn without
      replacement. It is computed for j = k and for each power of two below k.
    """
    rewards: dict[str, dict[str, list[float]]] = {}
    runs = one_a_run(samples, returns=True)
    for sample in runs:
        if sample.reward is not None:
            for tag in dict.fromkeys(("all", sample.tag)):
                rewards.setdefault(tag, {}).setdefault(sample.group_id, []).append(sample.reward)
    given = [sample.reward for sample in runs if sample.reward is not None]
    is_graded = bool(set(given) - {0.0, 1.0})
    metrics: dict[str, float] = {}
    for tag, groups in rewards.items():
        by_prompt = list(groups.values())
        metrics |= _mean(f"val_correct/{tag}", [[float(reward >= RIGHT) for reward in group] for group in by_prompt])
        if is_graded:
            metrics |= _mean(f"val/reward/{tag}", by_prompt)
        right = [sum(reward >= RIGHT for reward in group) for group in groups.values() if len(group) == per_prompt]
        if per_prompt > 1 and right:
            metrics[f"val_correct/{tag}/avg@{per_prompt}"] = float(np.mean(right)) / per_prompt
            for draws in _powers_of_two(per_prompt):
                chances = [pass_at(draws, per_prompt, count) for count in right]
                metrics[f"val_correct/{tag}/pass@{draws}"] = float(np.mean(chances))
    if is_graded:
        metrics |= statistics("val/reward", given, ("max", "min"))
    lengths = [sample.action_tokens for sample in samples]
    return {**metrics, **statistics("val/response_length", lengths, ("mean",))}


def _mean(name: str, groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the mean over all values and, for several groups, its standard error."""
    mean = float(np.mean([value for group in groups for value in group]))
    return {f"{name}/mean": mean, **({f"{name}/stderr": mean_stderr(groups)} if len(groups) > 1 else {})}


def pass_at(draws: int, samples: int, right: int) -> float:
    """Return the unbiased pass@k of one prompt, 1 - C(n-c, k) / C(n, k).

    This is equation 1 of Chen et al. 2021, "Evaluating Large Language Models Trained on Code". Raises `ValueError`
    unless 1 <= draws <= samples and 0 <= right <= samples.

    Args:
        draws: k.
        samples: n, the number of answers of the prompt.
        right: c, the number of correct answers.
    """
    if not (1 <= draws <= samples and 0 <= right <= samples):
        raise ValueError(f"pass@{draws} is not defined for {samples} samples with {right} right samples")
    return 1.0 - math.comb(samples - right, draws) / math.comb(samples, draws)


def _powers_of_two(limit: int) -> list[int]:
    """Return the powers of two below `limit`, followed by `limit`."""
    return [*(2**power for power in range(limit.bit_length()) if 2**power < limit), limit]


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
