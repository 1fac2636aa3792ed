"""Metrics of distillation against a loop over tokens, and denominators that are easily wrong."""

import math
from dataclasses import replace

import numpy as np
import pytest

from roll_opd.samples.sample import Sample, as_columns, present, teacher_columns
from roll_opd.tracking.sample_metrics import LOG_RATIO_LIMIT, opd_metrics
from roll_opd.tracking.validation_metrics import mean_stderr


def experience(rng: np.random.Generator, number: int, teachers: tuple[str, ...], tag: str) -> Sample:
    prompt, response = int(rng.integers(1, 5)), int(rng.integers(1, 9))

    def logprobs() -> np.ndarray:
        return -rng.exponential(size=response).astype(np.float32)

    mask = rng.random(response) < 0.7
    mask[-1] = True
    return Sample(
        id=f"e{number}",
        group_id="g",
        tag=tag,
        domain="d",
        tokens=np.arange(prompt + response),
        prompt_length=prompt,
        finish_reason="length" if number % 3 == 0 else "stop",
        reward=float(number % 2) if number != 4 else None,
        columns=as_columns(
            action_mask=mask,
            rollout_logprobs=logprobs(),
            old_logprobs=logprobs(),
            **teacher_columns({name: logprobs() for name in teachers}),
        ),
    )


@pytest.fixture
def batch() -> list[Sample]:
    rng = np.random.default_rng(0)
    routes = [("a",), ("b",), ("a", "b"), (), ("a",), (), ("b",)]
    return [experience(rng, n, teachers, f"tag{n % 2}") for n, teachers in enumerate(routes)]


def naive_pairs(batch: list[Sample]) -> list[tuple[str, str, float, float]]:
    """(teacher, tag, student log-prob, teacher log-prob) of every action token that a teacher scored."""
    found = []
    for item in batch:
        for name, logprobs in item.teacher_logprobs.items():
            for position in range(item.response_length):
                if item.action_mask[position]:
                    pair = float(item.old_logprobs[position]), float(logprobs[position])
                    found.append((name, item.tag, *pair))
    return found


def test_distillation_metrics_equal_a_loop_over_tokens(batch: list[Sample]) -> None:
    metrics = opd_metrics(batch)
    pairs = naive_pairs(batch)
    kls = sorted(student - teacher for _, _, student, teacher in pairs)
    count = len(kls)
    mean_student = sum(pair[2] for pair in pairs) / count
    mean_teacher = sum(pair[3] for pair in pairs) / count
    expected = {
        "opd/reverse_kl/mean": sum(kls) / count,
        "critic/kl": sum(kls) / count,
        "opd/reverse_kl/max": kls[-1],
        "opd/reverse_kl/p50": (kls[(count - 1) // 2] + kls[count // 2]) / 2,
        "opd/student_logprob": mean_student,
        "opd/student_entropy": -mean_student,
        "opd/agreement": sum(min(1.0, math.exp(teacher - student)) for _, _, student, teacher in pairs) / count,
        "opd/teacher_logprob": mean_teacher,
        "opd/abs_gap": sum(map(abs, kls)) / count,
        "opd/student_perplexity": math.exp(-mean_student),
        "opd/teacher_perplexity": math.exp(-mean_teacher),
        "opd/prob_ratio": sum(math.exp(max(-LOG_RATIO_LIMIT, min(LOG_RATIO_LIMIT, kl))) for kl in kls) / count,
    }
    for position, group in ((0, "teacher"), (1, "tag")):
        for name in {pair[position] for pair in pairs}:
            own = [pair[2] - pair[3] for pair in pairs if pair[position] == name]
            expected[f"opd/{group}/{name}/reverse_kl/mean"] = sum(own) / len(own)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-9), name
    below = sum(kl <= metrics["opd/reverse_kl/p95"] for kl in kls) / count
    assert 0.9 <= below <= 1.0


def test_samples_without_a_teacher_or_outside_the_mask_change_nothing(batch: list[Sample]) -> None:
    scored = [item for item in batch if item.teacher_logprobs]

    def teacher_part(items: list[Sample]) -> dict[str, float]:
        metrics = opd_metrics(items)
        return {name: metrics[name] for name in metrics if name.startswith("opd/") and "length" not in name}

    assert teacher_part(batch) == teacher_part(scored)
    noise = [item.with_columns(old_logprobs=np.where(item.action_mask, item.old_logprobs, -99.0)) for item in scored]
    assert teacher_part(noise) == teacher_part(scored)
    assert teacher_part(scored[::-1]) == pytest.approx(teacher_part(scored))


def test_a_teacher_equal_to_the_student_has_no_reverse_kl(batch: list[Sample]) -> None:
    others = [item.with_columns(**dict.fromkeys(teacher_columns(item.teacher_logprobs))) for item in batch]
    same = [item.with_columns(**teacher_columns({"t": present(item.old_logprobs)})) for item in others]
    metrics = opd_metrics(same)
    assert metrics["opd/reverse_kl/mean"] == metrics["opd/abs_gap"] == 0.0
    assert metrics["opd/prob_ratio"] == 1.0


def test_without_recomputed_logprobs_the_rollouts_count(batch: list[Sample]) -> None:
    off = [item.with_columns(old_logprobs=None) for item in batch]
    as_old = [item.with_columns(old_logprobs=item.rollout_logprobs) for item in batch]
    assert opd_metrics(off)["critic/kl"] == opd_metrics(as_old)["critic/kl"] != 0.0
    assert "rollout/train_logprob_gap/mean" not in opd_metrics(off)
    assert opd_metrics(as_old)["rollout/train_logprob_gap/max"] == 0.0


def test_rewards_and_lengths(batch: list[Sample]) -> None:
    metrics = opd_metrics(batch)
    rewards = [item.reward for item in batch if item.reward is not None]
    assert len(rewards) == len(batch) - 1
    assert metrics["critic/score/mean"] == sum(rewards) / len(rewards)
    assert (metrics["critic/score/max"], metrics["critic/score/min"]) == (1.0, 0.0)
    assert metrics["critic/score/prompts"] == len({item.group_id for item in batch})
    lengths = [sum(map(bool, item.action_mask)) for item in batch]
    whole = [len(item.tokens) - item.prompt_length for item in batch]
    assert metrics["tokens/non_prompt_length/mean"] == pytest.approx(sum(whole) / len(whole))
    assert metrics["tokens/response_length/mean"] == metrics["opd/response_length/mean"]
    assert metrics["opd/response_length/mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert metrics["opd/response_length/max"] == max(lengths)
    assert metrics["rollout/finish_length_rate"] == pytest.approx(3 / 7)
    gaps = [
        abs(float(item.rollout_logprobs[t]) - float(item.old_logprobs[t]))
        for item in batch
        for t in range(item.response_length)
        if item.action_mask[t]
    ]
    assert metrics["rollout/train_logprob_gap/mean"] == pytest.approx(sum(gaps) / len(gaps))
    assert metrics["rollout/train_logprob_gap/max"] == pytest.approx(max(gaps))


def test_no_samples_give_no_metrics(batch: list[Sample]) -> None:
    assert opd_metrics([]) == {}
    masked = [replace(item, reward=None).with_columns(action_mask=np.zeros_like(item.action_mask)) for item in batch]
    metrics = opd_metrics(masked)
    assert not [name for name in metrics if "reverse_kl" in name or "reward" in name]
    assert all(math.isfinite(value) for value in metrics.values())


def test_logprobs_of_another_length_are_named(batch: list[Sample]) -> None:
    wrong = batch[0].with_columns(**teacher_columns({"a": batch[0].old_logprobs[:-1]}))
    with pytest.raises(ValueError, match=r"sample e0: .*teacher 'a'"):
        opd_metrics([wrong])


def test_the_standard_error_of_a_mean_is_over_prompts() -> None:
    """Against drawing the same kind of step very often: groups of several sizes, samples of a prompt correlated."""
    rng = np.random.default_rng(0)
    sizes = [4, 4, 2, 6, 4, 4, 1, 3, 4, 4, 5, 4, 4, 4, 4, 4]
    draws = [[(rng.random(size) < rng.beta(0.3, 0.7)).astype(float) for size in sizes] for _ in range(3000)]
    means = [np.concatenate(groups).mean() for groups in draws]
    squared = np.mean([mean_stderr(groups) ** 2 for groups in draws])
    assert np.sqrt(squared) == pytest.approx(np.std(means), rel=0.05)
    naive = np.mean([np.concatenate(groups).var() / sum(sizes) for groups in draws])
    assert squared > 2 * naive
