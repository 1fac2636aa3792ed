"""Compute the metrics of a validation: mean rewards, pass@k and their standard errors."""

import math
from collections.abc import Sequence

import numpy as np

from roll_opd.samples.sample import Sample, one_a_run
from roll_opd.tracking.reward_metrics import RIGHT, statistics


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
