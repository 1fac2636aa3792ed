"""Every advantage function against a loop written from its formula, and properties of all advantage functions."""

import math
import statistics

import pytest
import torch

from roll_opd.objective.advantages.advantage_functions import grpo
from roll_opd.objective.advantages.reward_normalisation import RewardBatch
from roll_opd.objective.registry import ADVANTAGES as REGISTRY
from roll_opd.objective.returns_and_gae import token_advantages
from tests.each import each

ADVANTAGES = {name: REGISTRY.find(name) for name in REGISTRY.builtin}

GROUPS = ["a", "a", "b", "c", "c", "a", "c", "c", "d", "d", "c"]  # b stands alone; c is the largest
RUNS = ["1", "1", "1", "1", "2", "2", "2", "2", "1", "1", "2"]  # in a: two steps and one; in d: one run of two steps
STATES = [
    "a s",
    "a t",
    "b s",
    "c s",
    "c s",
    "a s",
    "c t",
    "c s",
    "d s",
    "d s",
    "c u",
]  # repeated within runs and across


def batch(seed: int, *, equal: bool = False) -> RewardBatch:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(len(GROUPS), generator=generator, dtype=torch.float64)
    rewards = torch.where(torch.tensor([g == "d" for g in GROUPS]), 0.5, rewards)
    logprobs = [-torch.rand(n, generator=generator) for n in (3, 1, 2, 0, 5, 4, 1, 2, 3, 3, 1)]
    return RewardBatch(torch.ones_like(rewards) if equal else rewards, GROUPS, logprobs, RUNS, STATES)


def families(made: RewardBatch, level: str | None) -> list[list[int]]:
    """Return, for each sample, the samples with which it is compared."""
    every = range(len(made.groups))
    return [[n for n in every if level == "batch" or made.groups[n] == made.groups[i]] for i in every]


def mean_and_std(values: list[float]) -> tuple[float, float]:
    """Return mean and std as in GRPO: 0 and 1 for a group of one sample."""
    return (statistics.mean(values), statistics.stdev(values) + 1e-6) if len(values) > 1 else (0.0, 1.0)


def naive_reinforce(made, mean_cal_level=None, std_cal_level=None, effective=None):
    rewards = made.rewards_B.tolist() if effective is None else effective
    found = []
    for i, reward in enumerate(rewards):
        mean = mean_and_std([rewards[n] for n in families(made, mean_cal_level)[i]])[0] if mean_cal_level else 0.0
        compared = [rewards[n] for n in families(made, std_cal_level)[i]] if std_cal_level else []
        std = mean_and_std(compared)[1] if std_cal_level else 1.0
        alike = len(compared) > 1 and len(set(compared)) == 1
        found.append(0.0 if alike else (reward - mean) / std)
    return found


def naive_grpo(made, mean_cal_level="group", std_cal_level="group", std_threshold=None, rank_penalty=None):
    rewards = made.rewards_B.tolist()
    groups = families(made, "group")
    if rank_penalty is not None:
        likely = [float(v.double().mean()) if len(v) else 0.0 for v in made.logprobs]
        ranks = [sum((likely[n], n) < (likely[i], i) for n in groups[i]) / len(groups[i]) for i in range(len(rewards))]
        rewards = [r * (1 - rank_penalty * rank) for r, rank in zip(rewards, ranks, strict=True)]
    found = naive_reinforce(made, mean_cal_level, std_cal_level, rewards)
    if std_threshold is not None:
        for i, members in enumerate(groups):
            if len(members) == 1 or statistics.stdev([rewards[n] for n in members]) <= std_threshold:
                found[i] = 0.0
    return found


def naive_step_wise_grpo(made, std_cal_level="group", std_threshold=None, enable_step_norm=False):
    runs = list(zip(made.groups, made.runs, strict=True))
    last = {run: made.rewards_B[i].item() for i, run in enumerate(runs)}  # the last one written stays
    scores = {}
    for run in last:
        peers = [reward for (group, _), reward in last.items() if group == run[0]]
        mean, std = mean_and_std(peers)
        if std_cal_level == "batch":
            std = mean_and_std(list(last.values()))[1]
        flat = std_threshold is not None and (len(peers) == 1 or statistics.stdev(peers) <= std_threshold)
        scores[run] = 0.0 if flat else (last[run] - mean) / std
    return [scores[run] / (runs.count(run) if enable_step_norm else 1) for run in runs]


def naive_returns(made, gamma):
    """Return, for each step, the sum over k of gamma^k times the reward of the k-th step after it."""
    runs, rewards = list(zip(made.groups, made.runs, strict=True)), made.rewards_B.tolist()
    found = []
    for i, run in enumerate(runs):
        later = [n for n in range(i, len(runs)) if runs[n] == run]
        found.append(sum(gamma**k * rewards[n] for k, n in enumerate(later)))
    return found


def naive_step_reinforce(made, mean_cal_level=None, std_cal_level=None, step_reward_gamma=0.95):
    return naive_reinforce(made, mean_cal_level, std_cal_level, naive_returns(made, step_reward_gamma))


def naive_gigpo(
    made,
    mean_cal_level="group",
    std_cal_level=None,
    step_reward_gamma=0.95,
    episode_reward_weight=1.0,
    step_reward_weight=1.0,
):
    runs, returns = list(zip(made.groups, made.runs, strict=True)), naive_returns(made, step_reward_gamma)
    sums = {run: sum(r for r, of in zip(made.rewards_B.tolist(), runs, strict=True) if of == run) for run in runs}
    found = []
    for i, run in enumerate(runs):
        beside = {
            level: mean_and_std([sums[r] for r in sums if level == "batch" or r[0] == run[0]])
            for level in ("group", "batch")
        }
        episode = sums[run] - (beside[mean_cal_level][0] if mean_cal_level else 0.0)
        episode /= beside[std_cal_level][1] if std_cal_level else 1.0
        peers = [returns[n] for n in range(len(runs)) if made.states[n] == made.states[i]]
        if not (mean_cal_level or std_cal_level):
            step = returns[i]
        elif len(peers) == 1:
            step = 0.0
        else:
            mean, std = mean_and_std(peers)
            step = (returns[i] - (mean if mean_cal_level else 0.0)) / (std if std_cal_level else 1.0)
        found.append(episode_reward_weight * episode + step_reward_weight * step)
    return found


def naive_rloo(made):
    found = []
    for i, members in enumerate(families(made, "group")):
        g, rewards = len(members), made.rewards_B[members].tolist()
        mean = sum(rewards) / g
        found.append((made.rewards_B[i].item() - mean) * g / (g - 1) if g > 1 else made.rewards_B[i].item())
    return found


def naive_opmd(made, opmd_baseline="mean", tau=1.0):
    found = []
    for i, members in enumerate(families(made, "group")):
        rewards = made.rewards_B[members].tolist()
        baseline = statistics.mean(rewards)
        if opmd_baseline == "logavgexp":
            baseline = tau * math.log(sum(math.exp(r / tau) for r in rewards) / len(rewards))
        found.append(made.rewards_B[i].item() - (baseline if len(members) > 1 else 0.0))
    return found


def naive_asymre(made, baseline_shift=-0.1):
    return [
        made.rewards_B[i].item() - ((made.rewards_B[members].mean().item() + baseline_shift) if len(members) > 1 else 0)
        for i, members in enumerate(families(made, "group"))
    ]


def naive_rec(made, std_normalize=False, drop=None):
    found = []
    for i, members in enumerate(families(made, "group")):
        rewards = {n: made.rewards_B[n].item() for n in members}
        mean = statistics.mean(rewards.values())
        below = [n for n in members if rewards[n] < mean]
        if drop == "balance":
            for n in reversed(below):
                if sum(m in below for m in rewards) > len(members) - len(below):
                    del rewards[n]
        if i not in rewards:
            found.append(0.0)
            continue
        kept = list(rewards.values())
        mean, std = (statistics.mean(kept), statistics.pstdev(kept)) if len(kept) > 1 else (0.0, 1.0 - 1e-6)
        found.append((rewards[i] - mean) / (std + 1e-6 if std_normalize else 1.0))
    return found


def naive_nothing(made):
    return [0.0] * len(made.groups)


REFERENCES = {
    "on_policy_distill": naive_nothing,
    "reinforce": naive_reinforce,
    "reinforceplusplus": naive_reinforce,
    "gae": naive_reinforce,
    "agentic_reinforce": naive_reinforce,
    "step_reinforce": naive_step_reinforce,
    "gigpo": naive_gigpo,
    "grpo": naive_grpo,
    "step_wise_grpo": naive_step_wise_grpo,
    "rloo": naive_rloo,
    "opmd": naive_opmd,
    "asymre": naive_asymre,
    "rec": naive_rec,
}
LEVELS = [
    {"mean_cal_level": mean, "std_cal_level": std}
    for mean in (None, "group", "batch")
    for std in (None, "group", "batch")
]
ARGUMENTS: dict[str, list[dict]] = {
    "reinforce": LEVELS,
    "step_reinforce": [*LEVELS, {"step_reward_gamma": 1.0}, {"step_reward_gamma": 0.0}],
    "gigpo": [
        *LEVELS,
        {"step_reward_gamma": 1.0, "step_reward_weight": 0.0},
        {"step_reward_gamma": 0.5, "episode_reward_weight": 0.0, "step_reward_weight": 2.0},
    ],
    "grpo": [
        {"std_cal_level": "batch"},
        {"std_cal_level": None},
        {"std_threshold": 0.0},
        {"std_threshold": 0.9, "std_cal_level": "batch"},
        {"rank_penalty": 0.25},
        {"rank_penalty": 1.0, "std_threshold": 0.1},
    ],
    "step_wise_grpo": [{"std_cal_level": "batch"}, {"enable_step_norm": True}, {"std_threshold": 0.5}],
    "opmd": [{"opmd_baseline": "logavgexp"}, {"opmd_baseline": "logavgexp", "tau": 0.1}],
    "asymre": [{"baseline_shift": 0.3}],
    "rec": [{"std_normalize": True}, {"drop": "balance"}, {"drop": "balance", "std_normalize": True}],
}
CASES = [(name, arguments) for name in ADVANTAGES for arguments in ({}, *ARGUMENTS.get(name, []))]
case = each(("name", "arguments"), CASES)


def test_every_advantage_has_a_reference() -> None:
    assert REFERENCES.keys() >= ADVANTAGES.keys()


@case
def test_equals_its_formula(name: str, arguments: dict) -> None:
    for seed in range(6):
        made = batch(seed)
        found = ADVANTAGES[name](made, **arguments)
        assert found.rewards.dtype == torch.float64
        assert found.rewards.tolist() == pytest.approx(REFERENCES[name](made, **arguments), rel=1e-9, abs=1e-9)
        again = (made.rewards_B - found.mean) / found.scale
        torch.testing.assert_close(again, found.rewards, rtol=0, atol=1e-12)


@each("name", sorted({"grpo", "step_wise_grpo"} & ADVANTAGES.keys()))
def test_flat_groups_and_groups_of_one_are_dropped(name: str) -> None:
    """As in Trinity-RFT: d is flat, b has one sample. As steps, d has one run."""
    found = ADVANTAGES[name](batch(1), std_threshold=0.0)
    assert found.dropped.tolist() == [group in "bd" for group in GROUPS]
    assert not found.rewards[found.dropped].any()
    without = ADVANTAGES[name](batch(1))
    assert without.dropped is None or not without.dropped.any()


@case
def test_order_of_groups_does_not_matter(name: str, arguments: dict) -> None:
    """Order within a group matters only for a choice between equal samples: last step of a run, surplus sample."""
    made = batch(3)
    order = [n for group in "dbca" for n in range(len(GROUPS)) if GROUPS[n] == group]
    moved = RewardBatch(
        made.rewards_B[order],
        [made.groups[n] for n in order],
        [made.logprobs[n] for n in order],
        [made.runs[n] for n in order],
        [made.states[n] for n in order],
    )
    wanted = ADVANTAGES[name](made, **arguments).rewards[order]
    torch.testing.assert_close(ADVANTAGES[name](moved, **arguments).rewards, wanted)


@each("name", sorted({"grpo", "rloo", "opmd", "rec"} & ADVANTAGES.keys()))
def test_equal_rewards_teach_nothing(name: str) -> None:
    found = ADVANTAGES[name](batch(0, equal=True)).rewards
    assert [n for n in range(len(GROUPS)) if abs(found[n]) > 1e-9] == [2]  # the group of one


@each("name", ADVANTAGES)
def test_advantages_of_one_sample_and_of_no_sample(name: str) -> None:
    wanted = [0.0 if name == "on_policy_distill" else 2.0]
    assert ADVANTAGES[name](RewardBatch(torch.tensor([2.0]), ["a"], states=["s"])).rewards.tolist() == wanted
    assert ADVANTAGES[name](RewardBatch(torch.zeros(0), [], states=[])).rewards.shape == (0,)


def test_what_cannot_be_computed_is_refused() -> None:
    alone = RewardBatch(torch.zeros(2), ["a", "a"])
    with pytest.raises(ValueError, match="rank_penalty of advantage grpo needs the log-probs"):
        grpo(alone, rank_penalty=0.1)


@each("gamma", [0.0, 0.9, 1.0])
def test_reinforceplusplus_to_the_token(gamma: float) -> None:
    """Discounted returns-to-go, whitened over the batch."""
    generator = torch.Generator().manual_seed(4)
    lengths = [4, 0, 7, 1]
    mask = torch.rand(12, generator=generator) > 0.3
    rewards = torch.randn(12, generator=generator, dtype=torch.float64) * mask
    returns, start = [], 0
    for length in lengths:
        row = rewards[start : start + length].tolist()
        returns += [sum(gamma ** (k - t) * row[k] for k in range(t, length)) for t in range(length)]
        start += length
    kept = [value for value, taken in zip(returns, mask.tolist(), strict=True) if taken]
    mean, scale = statistics.mean(kept), math.sqrt(statistics.variance(kept) + 1e-8)
    wanted = [(value - mean) / scale if taken else 0.0 for value, taken in zip(returns, mask.tolist(), strict=True)]
    found = token_advantages(rewards, mask, lengths, gamma=gamma, whiten_advantages=True)
    assert found.advantages_M.tolist() == pytest.approx(wanted, abs=1e-9)
    assert (found.mean, found.scale) == pytest.approx((mean, scale))
