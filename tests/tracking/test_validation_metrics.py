"""avg@k and pass@k against an enumeration of all sets of k answers."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from roll_opd.samples.sample import Sample, as_columns
from roll_opd.tracking.validation_metrics import pass_at, validation_metrics


def answer(group: str, tag: str, reward: float | None, length: int = 2) -> Sample:
    return Sample(
        id=f"{group}/{reward}",
        group_id=group,
        tag=tag,
        domain="d",
        tokens=np.arange(1 + length),
        prompt_length=1,
        finish_reason="stop",
        reward=reward,
        columns=as_columns(
            action_mask=np.ones(length, dtype=bool), rollout_logprobs=np.zeros(length, dtype=np.float32)
        ),
    )


def drawn(draws: int, rewards: list[float]) -> float:
    """pass@k by drawing every set of `draws` answers."""
    sets = list(combinations(rewards, draws))
    return sum(any(reward >= 1 for reward in chosen) for chosen in sets) / len(sets)


@pytest.mark.parametrize("samples", range(1, 9))
def test_pass_at_k_equals_drawing_every_set(samples: int) -> None:
    for right in range(samples + 1):
        rewards = [1.0] * right + [0.0] * (samples - right)
        for draws in range(1, samples + 1):
            assert pass_at(draws, samples, right) == pytest.approx(drawn(draws, rewards), abs=1e-12)


def test_pass_at_k_of_many_samples_is_exact_and_finite() -> None:
    assert pass_at(1, 1000, 250) == 0.25
    assert pass_at(512, 1024, 0) == 0.0
    assert pass_at(1024, 1024, 1) == 1.0
    for wrong in ((0, 4, 1), (5, 4, 1), (1, 4, 5), (1, 4, -1)):
        with pytest.raises(ValueError, match="is not defined"):
            pass_at(*wrong)


@pytest.mark.parametrize(("samples", "kinds"), [(2, (1, 2)), (4, (1, 2, 4)), (6, (1, 2, 4, 6))])
def test_validation_by_tag_equals_a_loop_over_prompts(samples: int, kinds: tuple[int, ...]) -> None:
    rng = np.random.default_rng(samples)
    # 0.5 is a reward that is not right
    prompts = {f"p{n}": ("math" if n % 3 else "code", rng.choice([0.0, 0.5, 1.0], samples).tolist()) for n in range(9)}
    batch = [answer(group, tag, reward) for group, (tag, rewards) in prompts.items() for reward in rewards]
    metrics = validation_metrics([batch[i] for i in rng.permutation(len(batch))], samples)
    # graded: the mean reward is logged beside the accuracy
    expected = {"val/response_length/mean": 2.0, "val/reward/max": 1.0, "val/reward/min": 0.0}
    for tag in ("all", "math", "code"):
        own = [rewards for of, rewards in prompts.values() if tag in ("all", of)]
        right = [[float(reward >= 1) for reward in rewards] for rewards in own]
        for name, values in ((f"val_correct/{tag}", right), (f"val/reward/{tag}", own)):
            expected[f"{name}/mean"] = np.mean(values)
            means = [np.mean(of_prompt) for of_prompt in values]  # of as many samples each
            expected[f"{name}/stderr"] = np.std(means, ddof=1) / np.sqrt(len(means))
        expected[f"val_correct/{tag}/avg@{samples}"] = np.mean([[reward >= 1 for reward in rewards] for rewards in own])
        for draws in kinds:
            expected[f"val_correct/{tag}/pass@{draws}"] = np.mean([drawn(draws, rewards) for rewards in own])
    assert metrics == pytest.approx(expected, abs=1e-12)
    assert metrics["val_correct/all/pass@1"] == pytest.approx(metrics[f"val_correct/all/avg@{samples}"])


def test_one_sample_a_prompt_has_a_mean_only() -> None:
    metrics = validation_metrics([answer("a", "x", 1.0), answer("b", "x", 0.0), answer("c", "y", None)], 1)
    means = {"val_correct/all/mean": 0.5, "val_correct/x/mean": 0.5, "val/response_length/mean": 2.0}
    assert metrics == means | {"val_correct/all/stderr": 0.5, "val_correct/x/stderr": 0.5}
    assert validation_metrics([], 4) == {}


def test_a_prompt_that_lacks_a_reward_is_left_out_of_pass_at_k() -> None:
    whole = [answer("a", "x", 1.0), answer("a", "x", 0.0)]
    part = [answer("b", "x", 1.0), replace(answer("b", "x", 1.0), reward=None)]
    metrics = validation_metrics(whole + part, 2)
    assert (metrics["val_correct/x/pass@1"], metrics["val_correct/x/pass@2"]) == (0.5, 1.0)
    assert metrics["val_correct/x/mean"] == pytest.approx(2 / 3)


def test_a_run_of_steps_is_worth_their_sum_where_each_has_its_own_reward() -> None:
    def steps(run: int, state: str | None, *rewards: float) -> list[Sample]:
        made = [replace(answer("a", "x", reward), run=run, step=step) for step, reward in enumerate(rewards)]
        return [replace(one, state=state and f"{state}{one.step}") for one in made]

    games = steps(0, "s", 0.0, 0.0, 1.0) + steps(1, "s", -0.25, 0.0)
    metrics = validation_metrics(games, 2)
    assert (metrics["val/reward/x/mean"], metrics["val_correct/x/pass@2"]) == (0.375, 1.0)
    assert metrics["val_correct/x/mean"] == 0.5
    assert (metrics["val_correct/x/avg@2"], metrics["val/reward/min"]) == (0.5, -0.25)
    said_of_each = steps(0, None, 1.0, 1.0) + steps(1, None, 0.0, 0.0, 0.0)
    metrics = validation_metrics(said_of_each, 2)
    assert (metrics["val_correct/x/mean"], metrics["val_correct/x/avg@2"]) == (0.5, 0.5)


def test_a_tag_named_all_counts_each_answer_once() -> None:
    metrics = validation_metrics([answer("a", "all", 1.0), answer("a", "all", 0.0)], 2)
    assert (metrics["val_correct/all/mean"], metrics["val_correct/all/pass@2"]) == (0.5, 1.0)
