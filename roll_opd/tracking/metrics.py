"""Metrics of distillation, rewards and validation, and a collector that reduces named values over a step.

`docs/metrics.md` lists every name. Metrics that also exist in ROLL have the same names.

Token statistics include only action tokens. The statistics of a teacher do not include samples without log-probs of
this teacher. In array shapes, K is the number of action tokens of all samples.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

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
LOG_RATIO_LIMIT = 10.0  # bounds the weight of a single token in the mean `opd/prob_ratio`


class Metrics:
    """Collects values by name. Each name has one reduction, such as the mean."""

    def __init__(self) -> None:
        self._values: dict[str, list[np.ndarray]] = {}
        self._reductions: dict[str, str] = {}

    def add(self, name: str, values: float | Sequence[float] | np.ndarray, reduction: str = "mean") -> None:
        """Add one value or several values.

        A suffix of the name, such as `@sum`, sets the reduction. Raises `ValueError` for an unknown reduction, or if
        the name was added earlier with a different reduction.
        """
        name, _, suffix = name.partition("@")
        reduction = suffix or reduction
        if reduction not in REDUCTIONS:
            raise ValueError(f"metric {name}: {reduction!r} is not one of {', '.join(REDUCTIONS)}")
        known = self._reductions.setdefault(name, reduction)
        if known != reduction:
            raise ValueError(
                f"metric {name} is already reduced by {known!r}; it cannot also be reduced by {reduction!r}"
            )
        self._values.setdefault(name, []).append(np.atleast_1d(np.asarray(values, dtype=np.float64)).ravel())

    def update(self, metrics: dict[str, float]) -> None:
        """Add every item of a dict. A name may have a suffix that sets the reduction (see `add`)."""
        for name, value in metrics.items():
            self.add(name, value)

    def reduce(self) -> dict[str, float]:
        """Return one number per name.

        The names have the order in which they were first added. Names without a value are omitted.
        """
        joined = {name: np.concatenate(parts) for name, parts in self._values.items()}
        return {name: REDUCTIONS[self._reductions[name]](values) for name, values in joined.items() if values.size}


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


@dataclass(frozen=True)
class _Scored:
    """Student and teacher log-probs of one (sample, teacher) pair. All arrays have the shape [T-P].

    `action_mask` is True at action tokens with a log-prob of the teacher.
    """

    teacher: str
    tag: str
    student_logprobs: np.ndarray
    teacher_logprobs: np.ndarray
    action_mask: np.ndarray


def opd_metrics(experiences: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of a step's samples: distillation, external reward, lengths and train/inference mismatch.

    The student's log-probs are `old_logprobs`, or `rollout_logprobs` if they were not recomputed. Every (sample,
    teacher) pair counts once. A metric whose denominator is 0 is left out. Raises `ValueError` if the number of
    log-probs differs from the length of the response.
    """
    pairs = [pair for experience in experiences for pair in _scored(experience)]
    metrics = _distillation(pairs)
    metrics.update(_rewards(experiences))
    metrics.update(_lengths(experiences))
    metrics.update(_mismatch(experiences))
    return metrics


def distillation_metrics(experiences: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics `opd/*` of samples. The dict is empty if no sample has teacher log-probs.

    The samples may come from a rollout or from a data set.
    """
    return _distillation([pair for experience in experiences for pair in _scored(experience)])


def log_ratio_metrics(experiences: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics `opd/*` of answers that the student has not sampled.

    The mean of student's − teacher's log-prob over such answers is no KL divergence and may have either sign, so it is
    named `opd/log_ratio`. The entropy and ROLL's `critic/kl` are means over the student's samples, and are left out.
    """
    found = distillation_metrics(experiences)
    for name in ("critic/kl", "opd/student_entropy"):
        found.pop(name, None)
    return {name.replace("reverse_kl", "log_ratio"): value for name, value in found.items()}


def _scored(experience: Sample) -> Iterable[_Scored]:
    student = experience.old_logprobs if experience.old_logprobs is not None else experience.rollout_logprobs
    for teacher, logprobs in experience.teacher_logprobs.items():
        yield _Scored(
            teacher,
            experience.tag,
            _checked(experience, student, "student"),
            _checked(experience, logprobs, f"teacher {teacher!r}"),
            experience.taught_by(teacher),
        )


def _action_values(logprobs: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate arrays of shape [T-P], and return the values at the action tokens, f64 [K]."""
    if not logprobs:
        return np.zeros(0)
    joined, mask = np.concatenate(logprobs), np.concatenate(masks)
    return (joined if mask.all() else joined[mask]).astype(np.float64)


def _checked(experience: Sample, logprobs: np.ndarray | None, whose: str) -> np.ndarray:
    """Check the log-probs of a sample and return them, [T-P].

    Raises `ValueError` if the log-probs are missing, or if their number differs from the length of the response.
    """
    if logprobs is None:
        raise ValueError(f"sample {experience.id}: no log-probs of the {whose}")
    if not len(logprobs) == len(experience.action_mask) == experience.response_length:
        raise ValueError(
            f"sample {experience.id}: {len(logprobs)} log-probs of the {whose} and "
            f"{len(experience.action_mask)} mask entries for {experience.response_length} response tokens"
        )
    return logprobs


def _distillation(pairs: Sequence[_Scored]) -> dict[str, float]:
    if not pairs:
        return {}
    masks = [pair.action_mask for pair in pairs]
    student = _action_values([pair.student_logprobs for pair in pairs], masks)
    teacher = _action_values([pair.teacher_logprobs for pair in pairs], masks)
    if not student.size:
        return {}
    student_mean, teacher_mean = float(student.mean()), float(teacher.mean())
    reverse_kl = np.subtract(student, teacher, out=student)  # in place, since these arrays are large
    del student, teacher
    return {
        **statistics("opd/reverse_kl", reverse_kl, ("mean", "p50", "p95", "max")),
        "critic/kl": float(reverse_kl.mean()),
        "opd/student_logprob": student_mean,
        "opd/teacher_logprob": teacher_mean,
        "opd/abs_gap": float(np.abs(reverse_kl).mean()),
        "opd/student_perplexity": float(np.exp(-student_mean)),
        "opd/teacher_perplexity": float(np.exp(-teacher_mean)),
        "opd/prob_ratio": float(_exp(np.clip(reverse_kl, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).mean()),
        "opd/student_entropy": -student_mean,
        "opd/agreement": float(_exp(np.minimum(-reverse_kl, 0)).mean()),
        **_groups("opd/teacher", [pair.teacher for pair in pairs], reverse_kl, masks),
        **_groups("opd/tag", [pair.tag for pair in pairs], reverse_kl, masks),
    }


def _exp(values: np.ndarray) -> np.ndarray:
    """Compute exp(values) in place and return it."""
    return np.exp(values, out=values)


def _groups(prefix: str, names: Sequence[str], reverse_kl: np.ndarray, masks: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the mean reverse KL of each distinct name, such as each teacher.

    Args:
        names: one name per sample.
        reverse_kl: f64 [K].
        masks: action mask of each sample.
    """
    if len(set(names)) == 1:
        return statistics(f"{prefix}/{names[0]}/reverse_kl", reverse_kl, ("mean",))
    groups: dict[str, list[np.ndarray]] = {}
    parts = np.split(reverse_kl, np.cumsum([np.count_nonzero(mask) for mask in masks])[:-1])
    for name, part in zip(names, parts, strict=True):
        groups.setdefault(name, []).append(part)
    metrics: dict[str, float] = {}
    for name, own in groups.items():
        metrics.update(statistics(f"{prefix}/{name}/reverse_kl", np.concatenate(own), ("mean",)))
    return metrics


def _rewards(experiences: Sequence[Sample]) -> dict[str, float]:
    by_prompt = _by_prompt(one_a_run(experiences))
    rewards = [reward for group in by_prompt.values() for reward in group]
    found = statistics("critic/score", rewards, ("mean", "max", "min"))
    if rewards:
        found["critic/score/prompts"] = float(len(by_prompt))
    if len(by_prompt) > 1:
        found["critic/score/stderr"] = mean_stderr(list(by_prompt.values()))
    return found


def _by_prompt(experiences: Iterable[Sample]) -> dict[str, list[float]]:
    """Return the rewards of each prompt's samples. Samples without a reward are left out."""
    found: dict[str, list[float]] = {}
    for experience in experiences:
        if experience.reward is not None:
            found.setdefault(experience.group_id, []).append(experience.reward)
    return found


def mean_stderr(groups: Sequence[Sequence[float]]) -> float:
    """Return the standard error of the mean over all values. There must be at least two groups.

    Values of different groups are independent. Values of one group, such as the rewards of one prompt's samples, may be
    correlated. Therefore each group counts as one observation (Cochran, Sampling Techniques, eq. 11.29: cluster
    sampling, ratio estimate).
    """
    sums, counts = (np.array([measure(group) for group in groups], dtype=np.float64) for measure in (sum, len))
    residuals = sums - counts * (sums.sum() / counts.sum())
    return float(np.sqrt((residuals**2).sum() * len(groups) / (len(groups) - 1)) / counts.sum())


def _lengths(experiences: Sequence[Sample]) -> dict[str, float]:
    if not experiences:
        return {}
    kinds = ("mean", "max", "min")
    responses = [experience.action_tokens for experience in experiences]
    lengths = [experience.response_length for experience in experiences]
    return {
        **statistics("tokens/response_length", responses, kinds),
        **statistics("opd/response_length", responses, kinds),
        **(statistics("tokens/non_prompt_length", lengths, kinds) if lengths != responses else {}),
        **statistics("tokens/prompt_length", [item.prompt_length for item in experiences], kinds),
        "rollout/finish_length_rate": float(np.mean([item.finish_reason == "length" for item in experiences])),
    }


def _mismatch(experiences: Sequence[Sample]) -> dict[str, float]:
    """Return metrics of the difference between the log-probs of the inference engine and of the training engine.

    Both engines compute the log-probs of the same tokens with the same weights.
    """
    both = [item for item in experiences if item.old_logprobs is not None]
    masks = [item.action_mask for item in both]
    gaps = _action_values([_checked(item, item.rollout_logprobs, "rollout") for item in both], masks)
    gaps -= _action_values([_checked(item, item.old_logprobs, "student") for item in both], masks)
    return statistics("rollout/train_logprob_gap", np.abs(gaps, out=gaps), ("mean", "max"))


def validation_metrics(experiences: Sequence[Sample], samples: int) -> dict[str, float]:
    """Return validation metrics over all held-out prompts, and for each tag. Each prompt has `samples` (k) answers.

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
    runs = one_a_run(experiences, returns=True)
    for experience in runs:
        if experience.reward is not None:
            for tag in dict.fromkeys(("all", experience.tag)):
                rewards.setdefault(tag, {}).setdefault(experience.group_id, []).append(experience.reward)
    given = [experience.reward for experience in runs if experience.reward is not None]
    is_graded = bool(set(given) - {0.0, 1.0})
    metrics: dict[str, float] = {}
    for tag, groups in rewards.items():
        by_prompt = list(groups.values())
        metrics |= _mean(f"val_correct/{tag}", [[float(reward >= RIGHT) for reward in group] for group in by_prompt])
        if is_graded:
            metrics |= _mean(f"val/reward/{tag}", by_prompt)
        right = [sum(reward >= RIGHT for reward in group) for group in groups.values() if len(group) == samples]
        if samples > 1 and right:
            metrics[f"val_correct/{tag}/avg@{samples}"] = float(np.mean(right)) / samples
            for draws in _powers_of_two(samples):
                chances = [pass_at(draws, samples, count) for count in right]
                metrics[f"val_correct/{tag}/pass@{draws}"] = float(np.mean(chances))
    if is_graded:
        metrics |= statistics("val/reward", given, ("max", "min"))
    lengths = [experience.action_tokens for experience in experiences]
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
