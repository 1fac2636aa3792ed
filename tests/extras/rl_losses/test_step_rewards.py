"""Rewards of steps, from experiences to advantages: against loops over trajectories."""

from collections.abc import Callable
from dataclasses import replace
from statistics import mean, stdev

import numpy as np
import pytest

from roll_opd.base.failures import RunError
from roll_opd.config.plan import Layout, MegatronPlan, MicroBatchLimits, ModelPlan, ObjectivePlan, TeacherPlan
from roll_opd.objective.columns import with_total_advantages
from roll_opd.objective.external_advantages import external_advantages
from roll_opd.samples.sample import Sample, as_columns, teacher_columns
from tests.each import each

Trajectory = list[Sample]  # its steps, in order
LEVELS: dict[str, dict[str, str | None]] = {
    "nothing": {"mean_cal_level": None, "std_cal_level": None},
    "mean": {"mean_cal_level": "group", "std_cal_level": None},
    "mean and std": {"mean_cal_level": "group", "std_cal_level": "group"},
    "batch": {"mean_cal_level": "batch", "std_cal_level": "batch"},
}


def step(group: str, run: int, number: int, reward: float | None, state: str | None, tag: str = "lake") -> Sample:
    tokens = 1 + (run + number) % 3
    return Sample(
        id=f"{group}/{run}.{number}",
        group_id=group,
        run=run,
        step=number,
        state=state,
        tag=tag,
        tokens=np.arange(tokens + 1),
        prompt_length=1,
        finish_reason="stop",
        reward=reward,
        columns=as_columns(action_mask=np.ones(tokens, bool), rollout_logprobs=np.full(tokens, -0.1, np.float32)),
    )


def games(seed: int) -> list[Trajectory]:
    """Two tags, groups of one and more, lengths 1 to 6, few states, so that they recur within and across."""
    rng = np.random.default_rng(seed)
    made = []
    for group, tag, runs in (("a", "lake", 4), ("b", "lake", 1), ("c", "boxes", 3), ("d", "boxes", 2)):
        for run in range(runs):
            length = int(rng.integers(1, 7))
            rewards, states = rng.normal(size=length), rng.integers(0, 3, length)
            made.append(
                [
                    step(group, run, n, float(r), f"s{s}", tag)
                    for n, (r, s) in enumerate(zip(rewards, states, strict=True))
                ]
            )
    return made


def found(
    trajectories: list[Trajectory], name: str, plan: ObjectivePlan | None = None, runs: int = 1, **arguments
) -> dict[str, float]:
    """The advantage of each step by its id; all its tokens have the same."""
    plan = replace(plan or ObjectivePlan(), adv_estimator=name, advantage_args=arguments)
    made = external_advantages([e for steps in trajectories for e in steps], plan, runs=runs)
    assert all(np.ptp(e.advantages) < 1e-12 for e in made)
    return {e.id: float(e.advantages[0]) for e in made}


def returns(steps: Trajectory, gamma: float) -> list[float]:
    return [sum(gamma**k * later.reward for k, later in enumerate(steps[n:])) for n in range(len(steps))]


def normalised(value: float, peers: list[float], levels: dict[str, str | None]) -> float:
    """Normalise a reward among its peers, itself included; a single reward is unchanged."""
    if len(peers) > 1:
        value -= mean(peers) if levels["mean_cal_level"] else 0.0
        value /= stdev(peers) + 1e-6 if levels["std_cal_level"] else 1.0
    return value


def together(one: Sample, levels: dict[str, str | None], by_tag: bool) -> Callable[[Sample], bool]:
    def is_peer(other: Sample) -> bool:
        if "batch" in levels.values():
            return True
        return other.tag == one.tag if by_tag else other.group_id == one.group_id

    return is_peer


@each("by_tag", [False, True])
@each("levels", LEVELS.values())
@each("seed", range(8))
def test_gigpo_is_two_comparisons(seed: int, levels: dict[str, str | None], by_tag: bool) -> None:
    """Of a trajectory's sum with those of its peers, and of a step's return with those from its state of its game."""
    made, gamma = games(seed), 0.8
    expected = {}
    for steps in made:
        for place, one in enumerate(steps):
            is_peer = together(one, levels, by_tag)
            sums = [sum(e.reward for e in other) for other in made if is_peer(other[0])]
            episode = normalised(sum(e.reward for e in steps), sums, levels)
            beside = [
                worth
                for other in made
                for e, worth in zip(other, returns(other, gamma), strict=True)
                if (e.group_id, e.state) == (one.group_id, one.state)
            ]
            of_step = normalised(returns(steps, gamma)[place], beside, levels)
            if len(beside) == 1 and any(levels.values()):
                of_step = 0.0
            expected[one.id] = 0.7 * episode + 1.3 * of_step
    plan = ObjectivePlan(reward_groups="tag" if by_tag else "prompt")
    weights = {"step_reward_gamma": gamma, "episode_reward_weight": 0.7, "step_reward_weight": 1.3}
    assert found(made, "gigpo", plan, **levels, **weights) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@each("by_tag", [False, True])
@each("levels", LEVELS.values())
@each("seed", range(8))
def test_step_reinforce_compares_returns_of_steps(seed: int, levels: dict[str, str | None], by_tag: bool) -> None:
    made, gamma = games(seed), 0.9
    worths = {e.id: worth for t in made for e, worth in zip(t, returns(t, gamma), strict=True)}
    every = [e for t in made for e in t]
    expected = {
        one.id: normalised(worths[one.id], [worths[e.id] for e in filter(together(one, levels, by_tag), every)], levels)
        for one in every
    }
    plan = ObjectivePlan(reward_groups="tag" if by_tag else "prompt")
    assert found(made, "step_reinforce", plan, step_reward_gamma=gamma, **levels) == pytest.approx(expected, abs=1e-9)


@each("name", ["gigpo", "step_reinforce", "grpo", "step_wise_grpo"])
@each("seed", range(5))
def test_the_order_of_trajectories_does_not_matter(name: str, seed: int) -> None:
    """The trajectories of a group need not be adjacent; also by tag."""
    rng, made = np.random.default_rng(seed), games(seed)
    for plan in (ObjectivePlan(), ObjectivePlan(reward_groups="tag")):
        moved = [made[place] for place in rng.permutation(len(made))]
        assert found(moved, name, plan) == pytest.approx(found(made, name, plan), rel=1e-9, abs=1e-9)


@each("name", ["gigpo", "step_reinforce"])
def test_what_all_returns_of_a_group_have_in_common_changes_nothing(name: str) -> None:
    """Without a discount, an additional reward at the end of each trajectory adds the same amount to every return."""
    made = [steps for steps in games(2) if steps[0].group_id != "b"]  # which has nothing to be compared with
    more = [[*steps[:-1], replace(steps[-1], reward=steps[-1].reward + 5)] for steps in made]
    arguments = {**LEVELS["mean"], "step_reward_gamma": 1.0}
    assert found(more, name, **arguments) == pytest.approx(found(made, name, **arguments), abs=1e-9)
    scaled = [[replace(e, reward=3 * e.reward) for e in steps] for steps in made]
    by_deviation = {**LEVELS["mean and std"], "step_reward_gamma": 1.0}
    assert found(scaled, name, **by_deviation) == pytest.approx(found(made, name, **by_deviation), rel=1e-3, abs=1e-3)


def test_states_of_other_games_are_other_states() -> None:
    """A map may look the same in two groups and continue differently by chance; ROLL compares the two."""
    made = games(4)
    apart = [[replace(e, state=f"{e.group_id} {e.state}") for e in steps] for steps in made]
    assert found(made, "gigpo") == found(apart, "gigpo")
    alone = [steps for steps in made if steps[0].group_id == "a"]
    assert found(alone, "gigpo").items() <= found(made, "gigpo").items()


def test_a_trajectory_counts_once_however_long_it_is() -> None:
    """The mean of the sums 1 (one step) and 0 (four steps) is 0.5."""
    short, long = [step("a", 0, 0, 1.0, "x")], [step("a", 1, n, 0.0, f"y{n}") for n in range(4)]
    assert set(found([short, long], "gigpo").values()) == {0.5, -0.5}


@each("mean_over", [None, "group"])
def test_equal_returns_of_a_state_are_not_divided_by_nothing(mean_over: str | None) -> None:
    made = [[step("a", run, 0, 1.0, "x")] for run in range(3)] + [[step("a", 3, 0, 4.0, "y")]]
    worth = found(made, "gigpo", mean_cal_level=mean_over, std_cal_level="group", episode_reward_weight=0.0)
    assert set(worth.values()) == {0.0}


def test_what_is_missing_is_said() -> None:
    with pytest.raises(RunError, match=r"sample a/0\.0, tagged lake, has no state, but adv_estimator gigpo"):
        found([[step("a", 0, 0, 1.0, None)]], "gigpo")
    for name in ("gigpo", "step_reinforce"):
        with pytest.raises(RunError, match=r"sample a/0\.1, tagged lake, has no reward"):
            found([[step("a", 0, 0, 1.0, "x"), step("a", 0, 1, None, "x")]], name)


def test_a_group_that_exclusions_leave_alone_teaches_nothing() -> None:
    one, other = [step("a", 0, 0, 1.0, "x"), step("a", 0, 1, 2.0, "x")], [step("a", 1, 0, 5.0, "x")]
    gone = [replace(other[0], excluded=True, reward=None)]
    assert set(found([one, gone], "gigpo").values()) == {0.0}


@each("by_tag", [False, True])
@each("name", ["grpo", "gigpo", "step_reinforce", "step_wise_grpo", "rloo", "reinforce"])
def test_the_only_trajectory_that_did_not_fail_teaches_nothing(name: str, by_tag: bool) -> None:
    """One of three runs of prompt a remains, and two of prompt b, which are compared as usual."""
    left = [step("a", 2, 0, 1.0, "x", "boxes"), step("a", 2, 1, 2.0, "x", "boxes")]
    others = [[step("b", run, 0, float(run), "x")] for run in range(2)]
    levels = {"mean_cal_level": "group"} if name in ("gigpo", "step_reinforce", "reinforce") else {}
    plan = ObjectivePlan(reward_groups="tag" if by_tag else "prompt")
    worth = found([left, *others], name, plan, runs=3, **levels)
    assert worth == {**found(others, name, plan, **levels), "a/2.0": 0.0, "a/2.1": 0.0}
    assert worth["b/1.0"] > 0


def test_a_kind_that_one_run_alone_made_keeps_its_reward() -> None:
    answers = [replace(step("a", run, 0, float(run), None), group_id="a#7") for run in range(2)]
    judged = replace(step("a", 1, 1, 5.0, None), group_id="a#7:judge")
    assert found([[*answers, judged]], "grpo", runs=2)["a/1.1"] == 5.0


def test_bounds_hold_the_normalised_reward() -> None:
    """The bounds of asym_clip; reward_clip is applied after them."""
    made = [[step("a", run, 0, reward, "x")] for run, reward in enumerate([0.0] * 19 + [-9.0, 9.0])]
    plan = ObjectivePlan(reward_bounds=(-1.0, 3.0))
    plain, held = found(made, "grpo"), found(made, "grpo", plan)
    assert min(plain.values()) < -3 and max(plain.values()) > 3
    assert held == pytest.approx({name: min(max(value, -1.0), 3.0) for name, value in plain.items()})
    clipped = found(made, "grpo", replace(plan, reward_clip=2.0))
    assert (min(clipped.values()), max(clipped.values())) == (-1.0, 2.0)


@each("name", ["gigpo", "step_reinforce"])
def test_teachers_are_added_to_it(name: str) -> None:
    """A = A_external - opd_kl_coef · (student - teacher), token by token."""
    rng = np.random.default_rng(1)
    made = [
        e.with_columns(**teacher_columns({"big": -rng.exponential(size=e.response_length).astype(np.float32)}))
        for steps in games(1)
        for e in steps
    ]
    worker = MegatronPlan("big", ModelPlan("model"), (0,), Layout(), MicroBatchLimits())
    alone = found([made], name)
    plan = ObjectivePlan(adv_estimator=name)
    for e in with_total_advantages(external_advantages(made, plan), [TeacherPlan("big", worker, 0.5)], plan):
        total = e.total_advantages
        kl = e.rollout_logprobs.astype(np.float64) - e.teacher_logprobs["big"]
        assert total == pytest.approx(alone[e.id] - 0.5 * kl, rel=1e-5)  # formed in f32, as on the ranks


@each("gamma", [0.0, 0.5, 1.0])
def test_agentic_reinforce_discounts_turns(gamma: float) -> None:
    """Three turns, a tool's words between and behind them: the last one has the reward, each before it gamma more."""
    mask = np.array([1, 1, 0, 0, 1, 0, 1, 1, 1, 0], bool)
    whole = replace(step("a", 0, 0, 2.0, None), tokens=np.arange(11)).with_columns(
        action_mask=mask, rollout_logprobs=np.zeros(10, np.float32)
    )
    (made,) = external_advantages([whole], ObjectivePlan(adv_estimator="agentic_reinforce", gamma=gamma))
    first, second, last = 2.0 * gamma**2, 2.0 * gamma, 2.0
    assert made.advantages == pytest.approx([first, first, 0, 0, second, 0, last, last, last, 0])


def test_a_token_penalty_is_one_of_its_turn() -> None:
    """With agentic_reinforce, a turn is one action with the sum of its tokens' penalties; ROLL reads only the last."""
    mask = np.array([1, 1, 0, 1], bool)
    old, ref = np.array([-1.0, -2.0, 0.0, -3.0], np.float32), np.array([-1.5, -2.0, 0.0, -3.25], np.float32)
    whole = replace(step("a", 0, 0, 1.0, None), tokens=np.arange(5)).with_columns(
        action_mask=mask, old_logprobs=old, ref_logprobs=ref
    )
    plan = ObjectivePlan(adv_estimator="agentic_reinforce", gamma=0.5, init_kl_coef=0.1, kl_penalty="kl")
    (made,) = external_advantages([whole], plan)
    last = 1.0 - 0.1 * 0.25
    first = -0.1 * 0.5 + 0.5 * last
    assert made.advantages == pytest.approx([first, first, 0, last])
