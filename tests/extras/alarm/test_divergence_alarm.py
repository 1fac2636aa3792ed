"""The alarms of a run: when they are given, and when a similar change is learning or noise."""

import gzip
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest

from roll_opd.extras.alarm.divergence_alarm import (
    AGE,
    AGREEMENT,
    ENTROPY,
    ESS,
    KL,
    LENGTH,
    REWARD,
    TRUNCATED,
    WINDOW,
    DivergenceAlarm,
    Remedies,
)
from roll_opd.samples.sample import Sample, as_columns, teacher_columns
from roll_opd.tracking.sample_metrics import opd_metrics
from roll_opd.tracking.summary import ACCURACY
from tests.each import each

FIRST = {ENTROPY: 1.0, AGREEMENT: 0.6, LENGTH: 20.0, REWARD: 0.3}
STALE = Path(__file__).parents[3] / "benchmarks/results/async_effective_samples.json"
RECORDED = Path(__file__).parents[3] / "benchmarks/results/privileged_context.json"
AHEAD = sorted((STALE.parent / "gpu/2026-11-27_h100").glob("*/async_*/metrics.jsonl.gz"))


def sounded(rows: list[dict], *, is_itself: bool = True, remedies: Remedies | None = None) -> dict[str, str]:
    """Return the warnings of a run by the metric that they begin with."""
    alarm = DivergenceAlarm(is_itself=is_itself, remedies=remedies)
    texts = [text for row in rows for text in alarm.after(row)]
    found = {text.partition(": ")[0]: text for text in texts}
    assert len(found) == len(texts)  # each sounds once
    return found


def run(first: dict, last: dict, steps: int = 30, noise: float = 0.02, seed: int = 0) -> list[dict]:
    """Return rows whose metrics change from one value to the other between the thirds of the run, with noise."""
    rng = np.random.default_rng(seed)
    shares = np.clip(np.arange(steps) * 3 / steps - 1, 0, 1)
    return [
        {name: (first[name] + (last[name] - first[name]) * share) * (1 + noise * rng.normal()) for name in first}
        for share in shares
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, set()),
        ({ENTROPY: 0.15}, {ENTROPY}),
        ({ENTROPY: 0.25}, set()),
        ({LENGTH: 9.0}, {LENGTH}),
        ({LENGTH: 43.0}, {LENGTH}),
        ({AGREEMENT: 0.95}, {AGREEMENT}),
        ({ENTROPY: 0.01, LENGTH: 1.0, AGREEMENT: 0.99, REWARD: 0.1}, {ENTROPY, LENGTH, AGREEMENT}),
        ({ENTROPY: 0.01, LENGTH: 1.0, AGREEMENT: 0.99, REWARD: 0.9}, set()),  # it has learned
    ],
)
def test_a_collapse_of_one_metric_sounds_its_alarms(change: dict, expected: set) -> None:
    rows = run(FIRST, FIRST | change, noise=0.004)
    assert set(sounded(rows)) == expected
    assert set(sounded(rows, is_itself=False)) == expected - {AGREEMENT}  # to become as another teacher is the aim


@pytest.mark.parametrize(
    ("shares", "kl", "age", "sounds_after"),
    [
        ([0.9, 0.7, 0.4, 0.2, 0.15, 0.1], 0.02, 1.0, 5),
        ([0.9, 0.7, 0.4, 0.2, 0.15, 0.1], 0.02, 0.0, 6),
        ([0.9, 0.7, 0.4, 0.2, 0.15, 0.1], 0.02, None, 6),  # a synchronous run
        ([0.9, 0.7, 0.4, 0.2, 0.15, 0.1], 0.009, 1.0, None),  # long answers: each token is near
        ([0.1, 0.1], 0.1, None, None),  # too few steps
        ([1.0, 0.05, 1.0] * 5, 0.1, 0.5, 2),
        ([1.0, 0.05, 1.0] * 5, 0.1, None, None),  # single steps
        ([0.3] * 40, 0.1, 1.0, None),
        ([None, float("nan"), 0.1, 0.1], 0.1, 1.0, 3),
    ],
)
def test_samples_far_from_the_student_sound_the_alarm_once(
    shares: list[float | None], kl: float, age: float | None, sounds_after: int | None
) -> None:
    """With any reward."""
    alarm = DivergenceAlarm(is_itself=False, remedies=Remedies(fresher=("lower async_generation_ratio (8)",)))
    found = {
        step: alarm.after({ESS: share, KL: kl, AGE: age, REWARD: step / 9}) for step, share in enumerate(shares, 1)
    }
    assert [step for step, texts in found.items() if texts] == ([sounds_after] if sounds_after else [])
    if sounds_after:
        (text,) = found[sounds_after]
        assert text.startswith(f"{ESS}: ") and text.endswith("lower async_generation_ratio (8) or lower learning_rate")


@pytest.mark.parametrize(("bound", "sounds_after"), [(0, None), (1, 3), (2, 3), (4, 3), (8, 3)])
def test_the_alarm_of_old_samples_sounds_before_the_recorded_reward_falls(bound: int, sounds_after: int | None) -> None:
    """GRPO on the demo: with S = 0 it learns; with older samples it collapses at the same learning rate."""
    rows = json.loads(STALE.read_text())["runs"][f"{bound}"]
    rewards = np.array([row[REWARD] for row in rows])
    alarm = DivergenceAlarm(is_itself=False)
    ages = {AGE: float(bound > 0)}
    sounding = [row["step"] for row in rows if any(text.startswith(ESS) for text in alarm.after(row | ages))]
    assert sounding == ([sounds_after] if sounds_after else [])
    if sounds_after:
        assert rewards[20:].mean() < 0.1 < 0.2 < rewards[:sounds_after].min() and not alarm.after({})
    else:
        assert rewards[-5:].mean() > 0.6


# runs of which the alarm warned although no later validation was 0.4 lower; four ended within ten steps of it
WARNED = {"async_S8_forward_42", "async_S8_grpo_42", "async_cap1000_S4_42", "async_demo_S8_42", "async_demo_S8_43"}


@each("file", AHEAD)
def test_the_alarm_of_old_samples_sounds_before_a_validation_that_is_much_lower(file: Path) -> None:
    """In runs with S = 0 to 8 on one H100, a loss of 0.4; validations were four or eight steps apart."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    alarm, best, sounded_at, fallen_at = DivergenceAlarm(is_itself=False), 0.0, math.inf, math.inf
    for row in rows:
        if any(text.startswith(ESS) for text in alarm.after(row)):
            sounded_at = row["step"]
        if ACCURACY in row:
            best = max(best, row[ACCURACY])
            fallen_at = min(fallen_at, row["step"] if best - row[ACCURACY] >= 0.4 else math.inf)
    if fallen_at < math.inf:
        assert sounded_at < fallen_at
    else:
        assert (sounded_at < math.inf) == (file.parent.name in WARNED)


def test_there_are_recorded_runs_ahead() -> None:
    assert len(AHEAD) > 20


def test_large_changes_within_noise_sound_no_alarm() -> None:
    """Entropies and lengths that are different in every step, by more than any alarm's limit."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        rows = [
            {ENTROPY: rng.lognormal(0, 1.5), LENGTH: rng.lognormal(3, 1), AGREEMENT: rng.beta(4, 1), REWARD: 0.3}
            for _ in range(40)
        ]
        assert not sounded(rows)


def test_a_reward_that_rises_and_falls_sounds_the_alarm() -> None:
    """Rewards of 16 x 4 samples; also of a teacher that is another model."""
    rng = np.random.default_rng(1)
    up, level = np.linspace(0.2, 0.8, 40), np.full(40, 0.8)
    for last, sounds in ((0.8, False), (0.3, True), (0.5, True)):
        for is_itself in (True, False):
            curve = np.concatenate([up, level, np.linspace(0.8, last, 20), np.full(40, last)])
            rows = [{REWARD: rng.binomial(64, share) / 64} for share in curve]
            assert (REWARD in sounded(rows, is_itself=is_itself)) == sounds
    lost = [{REWARD: value} for value in [0.3] * 10 + [0.9] * 10 + [0.3] * 20]
    text = sounded(lost)[REWARD]
    assert "risen from 0.3 to 0.9 and fallen to 0.3" in text and "training is losing earlier gains" in text


def test_rewards_drawn_at_random_sound_no_alarm() -> None:
    """Through the alarm itself, step by step, with the reward alone: flat and rising."""
    rng = np.random.default_rng(2)
    for gain in (0.0, 0.3):
        for _ in range(20):
            chances = 0.25 + gain * np.arange(100) / 100
            easy = rng.beta(chances[:, None], 1 - chances[:, None], (100, 16))
            assert not sounded([{REWARD: float(step)} for step in (rng.binomial(4, easy) / 4).mean(1)])


def test_alarms_of_recorded_runs() -> None:
    """Runs of the demo; their validation shows which runs have collapsed."""
    expected = {
        "frozen": (set(), set()),
        "frozen, no hint": (set(), set()),
        "frozen, sampled tokens": (set(), set()),
        "average, decay 0.99": (set(), set()),
        "average, decay 0.98": ({REWARD}, {REWARD}),
        "lagged, every 10 steps": (set(), {REWARD}),
        "live": ({AGREEMENT, LENGTH}, {AGREEMENT, LENGTH, REWARD}),
        "live, a hint that is always the same": ({AGREEMENT, LENGTH}, {AGREEMENT, LENGTH, ENTROPY}),
    }
    for record in json.loads(RECORDED.read_text()):
        names = [name for name in FIRST if name in record]
        rows = [dict(zip(names, values, strict=True)) for values in zip(*(record[name] for name in names), strict=True)]
        least, most = expected[record["mode"]]
        assert least <= set(sounded(rows)) <= most, (record["mode"], record["seed"])


def truncated(shares: np.ndarray, lengths: np.ndarray, rewards: np.ndarray, seed: int, samples: int = 64) -> list[dict]:
    rng = np.random.default_rng(seed)
    noise = rng.normal(1, 0.03, len(lengths))
    return [
        {TRUNCATED: rng.binomial(samples, share) / samples, LENGTH: float(length), REWARD: float(reward)}
        for share, length, reward in zip(shares, lengths * noise, rewards, strict=True)
    ]


def test_growing_truncated_answers_sound_the_alarm() -> None:
    """Slowly or suddenly, from any fraction, with any reward."""
    t = np.arange(100) / 100
    rise = np.clip(2 * t - 0.5, 0, 1)
    curves = [0.02 + 0.4 * t, 0.02 + 0.5 * (t > 0.6), 0.3 + 0.5 * rise, np.where(t < 0.1, 0.3, 0.05 + 0.4 * rise)]
    for number, shares in enumerate(curves):
        for reward in (0.5 - 0.3 * t, 0.5 + 0 * t, 0.3 + 0.3 * t):
            for seed in range(2):
                found = sounded(truncated(shares, 300 + 800 * shares, reward, 10 * number + seed), is_itself=False)
                assert TRUNCATED in found
    text = sounded(truncated(curves[1], 300 + 800 * curves[1], 0 * t, 0), is_itself=False)[TRUNCATED]
    for part in ("ended at response_length", "tokens", "raise response_length", "lower learning_rate"):
        assert part in text


def test_longer_answers_within_the_limit_sound_no_alarm() -> None:
    """Growing without being cut off, at a constant or falling share, a rising one of shrinking answers."""
    t = np.arange(150) / 150
    longer = 200 + 600 * t
    runs = [(0.0 * t, longer), (0.01 + 0 * t, longer), (0.3 + 0 * t, longer), (0.5 - 0.4 * t, longer)]
    runs += [(0.05 + 0.3 * t, longer[::-1]), (0.5 + 0 * t, 0 * t + 300)]
    for shares, lengths in runs:
        for seed in range(4):
            assert TRUNCATED not in sounded(truncated(shares, lengths, 0.3 + 0.4 * t, seed), is_itself=False)


def test_advice_names_only_what_it_was_given() -> None:
    rows = run(FIRST, FIRST | {ENTROPY: 0.1}, noise=0.004)
    (plain,) = sounded(rows).values()
    assert plain.endswith("resume from an earlier checkpoint with a lower learning_rate")
    (text,) = sounded(rows, remedies=Remedies(slower=("a teacher that changes less", "another hint"))).values()
    assert text.endswith("with a lower learning_rate, a teacher that changes less or another hint")


def test_without_a_reward_only_a_self_teacher_is_suspected() -> None:
    first = {name: value for name, value in FIRST.items() if name != REWARD}
    rows = run(first, first | {ENTROPY: 0.01, LENGTH: 5.0, AGREEMENT: 0.99}, noise=0.004)
    assert set(sounded(rows)) == {ENTROPY, LENGTH, AGREEMENT}
    assert not sounded(rows, is_itself=False)


def test_an_alarm_sounds_once_and_names_the_numbers() -> None:
    alarm = DivergenceAlarm(is_itself=True)
    early = [text for _ in range(2 * WINDOW) for text in alarm.after(FIRST)]
    later = [text for _ in range(3 * WINDOW) for text in alarm.after(FIRST | {ENTROPY: 0.1})]
    (text,) = later
    assert not early
    for part in ("opd/student_entropy", "from 1 to 0.1", "0.3, now 0.3", "learning_rate"):
        assert part in text


def test_a_step_without_numbers_sounds_no_alarm() -> None:
    for nothing in (None, float("nan")):
        rows = [dict(FIRST), dict.fromkeys(FIRST, nothing)] * (4 * WINDOW)
        assert not sounded(rows)


def test_agreement_estimates_what_two_distributions_share() -> None:
    """Over samples of s, the mean of min(1, t / s) tends to sum of min(s, t) = 1 - total variation."""
    rng = np.random.default_rng(0)
    s, t = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    tokens = rng.choice(6, size=100_000, p=s)
    logprobs = [np.log(p)[tokens].astype(np.float32) for p in (s, t)]
    made = Sample(
        id="0",
        group_id="0",
        tokens=np.concatenate([[0], tokens]),
        prompt_length=1,
        finish_reason="stop",
        columns=as_columns(
            action_mask=np.ones(len(tokens), bool), rollout_logprobs=logprobs[0], **teacher_columns({"t": logprobs[1]})
        ),
    )
    found = opd_metrics([made])
    assert found[AGREEMENT] == pytest.approx(np.minimum(s, t).sum(), abs=5e-3)
    assert found[ENTROPY] == pytest.approx(-(s * np.log(s)).sum(), abs=1e-2)


def test_a_long_run_is_tested_less_often() -> None:
    """A resumed run passes all of its steps to the alarm before it continues."""
    alarm = DivergenceAlarm(is_itself=False)
    rows = [{ENTROPY: 1.0 + step % 3, LENGTH: 9.0, REWARD: 0.5, TRUNCATED: 0.1} for step in range(3000)]
    seconds = []
    for part in (rows[:1000], rows[1000:2000], rows[2000:]):
        began = time.process_time()
        assert [text for row in part for text in alarm.after(row)] == []
        seconds.append(time.process_time() - began)
    assert seconds[2] < seconds[0]  # tests at every step would take twice as long there


def test_a_collapse_after_many_steps_is_found() -> None:
    """Also for metrics that only some steps have."""
    alarm, rng = DivergenceAlarm(is_itself=False), np.random.default_rng(0)
    found = []
    for step in range(1500):
        row = {REWARD: 0.5 + 0.01 * rng.standard_normal()}
        if step % 7 == 0:
            row[ENTROPY] = (1.0 if step < 900 else 0.02) * (1 + 0.05 * rng.standard_normal())
        found += alarm.after(row)
    assert len(found) == 1 and found[0].startswith(ENTROPY)
