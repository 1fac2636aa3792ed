"""Metrics of a step's samples: distillation, advantages, rewards and lengths.

Token statistics include only action tokens. The statistics of a teacher do not include samples without log-probs of
this teacher. For teachers with another tokenizer, further metrics show how much the student's tokens and the teacher's
tokens of the same answers differ. In array shapes, K is the number of action tokens of all samples.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from roll_opd.config.plan import ObjectivePlan
from roll_opd.objective.external_advantages import token_level_rewards
from roll_opd.objective.reference_kl import reference_kl_mean
from roll_opd.objective.reverse_kl import reverse_kl
from roll_opd.samples.sample import Sample, end_to_end, one_a_run, picked
from roll_opd.tracking.reward_metrics import statistics
from roll_opd.tracking.validation_metrics import mean_stderr


@dataclass(frozen=True)
class Cut:
    """Statistics of how student and teacher split the same text into tokens.

    The text consists of the action tokens. All fractions are 0 if there are no tokens.
    """

    chunks: int
    chunked_bytes: float  # fraction of the covered bytes in chunks that are not one student token and one teacher token
    longest_chunk: int  # student tokens
    uncovered: float  # fraction of action tokens without a teacher log-prob
    teacher_tokens: float  # teacher tokens in all chunks divided by student tokens in them


def cut_of(samples: Sequence[Sample], teacher: str) -> Cut:
    """Return the statistics of the samples that the teacher has scored."""
    scored = [sample for sample in samples if teacher in sample.alignments]
    sizes = np.concatenate([np.zeros((0, 3), np.int64), *(sample.alignments[teacher].sizes for sample in scored)])
    students, teachers, lengths = sizes.T
    is_chunk = (students != 1) | (teachers != 1)
    tokens = sum(sample.action_tokens for sample in scored)
    uncovered = sum(sample.alignments[teacher].uncovered for sample in scored)
    return Cut(
        chunks=len(sizes),
        chunked_bytes=float(lengths[is_chunk].sum() / max(lengths.sum(), 1)),
        longest_chunk=int(students.max(initial=0)),
        uncovered=uncovered / max(tokens, 1),
        teacher_tokens=float(teachers.sum() / max(students.sum(), 1)),
    )


def alignment_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics `opd/alignment/TEACHER/...` for each teacher with another tokenizer.

    docs/metrics.md describes these metrics.
    """
    found: dict[str, float] = {}
    for teacher in dict.fromkeys(name for sample in samples for name in sample.alignments):
        cut = cut_of(samples, teacher)
        found |= {
            f"opd/alignment/{teacher}/chunked_bytes": cut.chunked_bytes,
            f"opd/alignment/{teacher}/longest_chunk": float(cut.longest_chunk),
            f"opd/alignment/{teacher}/uncovered": cut.uncovered,
            f"opd/alignment/{teacher}/teacher_tokens": cut.teacher_tokens,
        }
    return found


LOG_RATIO_LIMIT = 10.0  # bounds the weight of a single token in the mean `opd/prob_ratio`


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


def opd_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of a step's samples: distillation, external reward, lengths and train/inference mismatch.

    The student's log-probs are `old_logprobs`, or `rollout_logprobs` if they were not recomputed. Every (sample,
    teacher) pair counts once. A metric whose denominator is 0 is left out. Raises `ValueError` if the number of
    log-probs differs from the length of the response.
    """
    pairs = [pair for sample in samples for pair in _scored(sample)]
    metrics = _distillation(pairs)
    metrics.update(_rewards(samples))
    metrics.update(_lengths(samples))
    metrics.update(_mismatch(samples))
    return metrics


def distillation_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics `opd/*` of samples. The dict is empty if no sample has teacher log-probs.

    The samples may come from a rollout or from a data set.
    """
    return _distillation([pair for sample in samples for pair in _scored(sample)])


def log_ratio_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics `opd/*` of answers that the student has not sampled.

    The mean of student's − teacher's log-prob over such answers is no KL divergence and may have either sign, so it is
    named `opd/log_ratio`. The entropy and ROLL's `critic/kl` are means over the student's samples, and are left out.
    """
    found = distillation_metrics(samples)
    for name in ("critic/kl", "opd/student_entropy"):
        found.pop(name, None)
    return {name.replace("reverse_kl", "log_ratio"): value for name, value in found.items()}


def _scored(sample: Sample) -> Iterable[_Scored]:
    student = sample.old_logprobs if sample.old_logprobs is not None else sample.rollout_logprobs
    for teacher, logprobs in sample.teacher_logprobs.items():
        yield _Scored(
            teacher,
            sample.tag,
            _checked(sample, student, "student"),
            _checked(sample, logprobs, f"teacher {teacher!r}"),
            sample.taught_by(teacher),
        )


def _action_values(logprobs: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate arrays of shape [T-P], and return the values at the action tokens, f64 [K]."""
    if not logprobs:
        return np.zeros(0)
    joined, mask = np.concatenate(logprobs), np.concatenate(masks)
    return (joined if mask.all() else joined[mask]).astype(np.float64)


def _checked(sample: Sample, logprobs: np.ndarray | None, whose: str) -> np.ndarray:
    """Check the log-probs of a sample and return them, [T-P].

    Raises `ValueError` if the log-probs are missing, or if their number differs from the length of the response.
    """
    if logprobs is None:
        raise ValueError(f"sample {sample.id}: no log-probs of the {whose}")
    if not len(logprobs) == len(sample.action_mask) == sample.response_length:
        raise ValueError(
            f"sample {sample.id}: {len(logprobs)} log-probs of the {whose} and "
            f"{len(sample.action_mask)} mask entries for {sample.response_length} response tokens"
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
    kl = reverse_kl(student, teacher)
    del student, teacher  # these arrays are large
    return {
        **statistics("opd/reverse_kl", kl, ("mean", "p50", "p95", "max")),
        "critic/kl": float(kl.mean()),
        "opd/student_logprob": student_mean,
        "opd/teacher_logprob": teacher_mean,
        "opd/abs_gap": float(np.abs(kl).mean()),
        "opd/student_perplexity": float(np.exp(-student_mean)),
        "opd/teacher_perplexity": float(np.exp(-teacher_mean)),
        "opd/prob_ratio": float(_exp(np.clip(kl, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).mean()),
        "opd/student_entropy": -student_mean,
        "opd/agreement": float(_exp(np.minimum(-kl, 0)).mean()),
        **_groups("opd/teacher", [pair.teacher for pair in pairs], kl, masks),
        **_groups("opd/tag", [pair.tag for pair in pairs], kl, masks),
    }


def _exp(values: np.ndarray) -> np.ndarray:
    """Compute exp(values) in place and return it."""
    return np.exp(values, out=values)


def _groups(prefix: str, names: Sequence[str], kl: np.ndarray, masks: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the mean reverse KL of each distinct name, such as each teacher.

    Args:
        names: one name per sample.
        kl: f64 [K].
        masks: action mask of each sample.
    """
    if len(set(names)) == 1:
        return statistics(f"{prefix}/{names[0]}/reverse_kl", kl, ("mean",))
    groups: dict[str, list[np.ndarray]] = {}
    parts = np.split(kl, np.cumsum([np.count_nonzero(mask) for mask in masks])[:-1])
    for name, part in zip(names, parts, strict=True):
        groups.setdefault(name, []).append(part)
    metrics: dict[str, float] = {}
    for name, own in groups.items():
        metrics.update(statistics(f"{prefix}/{name}/reverse_kl", np.concatenate(own), ("mean",)))
    return metrics


def _rewards(samples: Sequence[Sample]) -> dict[str, float]:
    by_prompt = _by_prompt(one_a_run(samples))
    rewards = [reward for group in by_prompt.values() for reward in group]
    found = statistics("critic/score", rewards, ("mean", "max", "min"))
    if rewards:
        found["critic/score/prompts"] = float(len(by_prompt))
    if len(by_prompt) > 1:
        found["critic/score/stderr"] = mean_stderr(list(by_prompt.values()))
    return found


def _by_prompt(samples: Iterable[Sample]) -> dict[str, list[float]]:
    """Return the rewards of each prompt's samples. Samples without a reward are left out."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        if sample.reward is not None:
            found.setdefault(sample.group_id, []).append(sample.reward)
    return found


def _lengths(samples: Sequence[Sample]) -> dict[str, float]:
    if not samples:
        return {}
    kinds = ("mean", "max", "min")
    responses = [sample.action_tokens for sample in samples]
    lengths = [sample.response_length for sample in samples]
    return {
        **statistics("tokens/response_length", responses, kinds),
        **statistics("opd/response_length", responses, kinds),
        **(statistics("tokens/non_prompt_length", lengths, kinds) if lengths != responses else {}),
        **statistics("tokens/prompt_length", [item.prompt_length for item in samples], kinds),
        "rollout/finish_length_rate": float(np.mean([item.finish_reason == "length" for item in samples])),
    }


def _mismatch(samples: Sequence[Sample]) -> dict[str, float]:
    """Return metrics of the difference between the log-probs of the inference engine and of the training engine.

    Both engines compute the log-probs of the same tokens with the same weights.
    """
    both = [item for item in samples if item.old_logprobs is not None]
    masks = [item.action_mask for item in both]
    gaps = _action_values([_checked(item, item.rollout_logprobs, "rollout") for item in both], masks)
    gaps -= _action_values([_checked(item, item.old_logprobs, "student") for item in both], masks)
    return statistics("rollout/train_logprob_gap", np.abs(gaps, out=gaps), ("mean", "max"))


def advantage_metrics(samples: Sequence[Sample], objective: ObjectivePlan) -> dict[str, float]:
    """Return mean, max and min of `critic/rewards` and `critic/advantages`.

    The reward of a sample is the sum of its token rewards. Advantages are those of the update, taken per token.
    Excluded samples are left out.

    With a token-level KL, `critic/kl_coef` and `critic/reference_kl` are added. `critic/reference_kl` is the mean over
    samples of each sample's mean KL over tokens.
    """
    samples = [sample for sample in samples if not sample.excluded]
    rewards = [token_level_rewards(sample, objective).sum() for sample in samples]
    totals_M = end_to_end([sample.total_advantages for sample in samples], np.float64)
    mask_M = end_to_end([sample.action_mask for sample in samples], np.bool_)
    kinds = ("mean", "max", "min")
    return {
        **statistics("critic/rewards", rewards, kinds),
        **statistics("critic/advantages", picked(totals_M, mask_M), kinds),
        **(_reference_metrics(samples, objective) if objective.init_kl_coef else {}),
    }


def _reference_metrics(samples: Sequence[Sample], objective: ObjectivePlan) -> dict[str, float]:
    acted = [sample for sample in samples if sample.action_mask.any()]
    if not acted:
        return {}
    return {
        "critic/kl_coef": acted[0].metrics["kl_coef"],
        "critic/reference_kl": reference_kl_mean(samples, objective),
    }
