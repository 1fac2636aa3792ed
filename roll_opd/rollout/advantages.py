"""Token rewards and advantages of a step's samples: the external reward's part, the teachers' part, and their sum.

    token_level_rewards = external_reward - Σ opd_kl_coef · reverse_kl - kl_coef · KL(student, reference)
    A_t                 = clip(A_external_t - Σ_{k≥0} opd_kl_discount^k · Σ opd_kl_coef · reverse_kl_{t+k})

The sums over teachers are over those that read the sample. In pure distillation there is no external part. The external
part is made of each reward domain's samples by themselves: rewards of two domains have no common scale.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from roll_opd.algorithms.advantages.batch import Normalised, RewardBatch, run_members
from roll_opd.algorithms.kl import KL_ESTIMATORS, adaptive_kl_coefficient
from roll_opd.algorithms.registry import ADVANTAGES, Advantage, advantage
from roll_opd.algorithms.returns import discounted_to_go
from roll_opd.algorithms.token_advantages import clipped, last_action, on_last_action, token_advantages
from roll_opd.data.experience import Experience, changed
from roll_opd.plan import ObjectivePlan, TeacherPlan
from roll_opd.tracking.metrics import statistics
from roll_opd.workers.errors import RunError


def external_advantages(
    experiences: Sequence[Experience],
    objective: ObjectivePlan,
    kl_coef: float | None = None,
    *,
    taught: bool = False,
    workflow: str | None = None,
    runs: int = 1,
) -> list[Experience]:
    """Fill in `advantages`, with a critic's `values` also `returns`, and in `metrics` what computes them again.

    That is `reward_mean` and `reward_scale` of the normalisation, of the two whitenings `token_reward_mean`,
    `token_reward_scale`, `advantage_mean` and `advantage_scale`, and `kl_coef`, which is `init_kl_coef` where it has
    not adapted. What is excluded counts in no mean, and its `loss_mask` is empty; where a prompt's samples are compared
    and all but one are excluded, or all but one of its `runs` have made nothing, that one's reward is 0 before the
    whitening. What the advantage function drops is left out like that, after it was compared, unless there are teachers
    to learn from it (`taught`). RunError for a sample that neither a reward worker nor the `workflow` that made it has
    scored.
    """
    for experience in experiences:
        if not experience.excluded:
            _reward(experience, workflow)
    uncompared = _reduced_to_one(experiences, objective, runs)
    coefficients = kl_coefs(experiences, objective, kl_coef)
    filled: dict[int, Experience] = {}
    for members, coefficient in zip(_by_domain(experiences), coefficients, strict=False):
        counted = [number for number in members if not experiences[number].excluded]
        of_domain = [experiences[number] for number in counted]
        found = _advantages(of_domain, uncompared, objective, coefficient, taught) if counted else []
        filled |= dict(zip(counted, found, strict=True))
        filled |= {n: _without_advantage(experiences[n], coefficient) for n in members if experiences[n].excluded}
    return [filled[number] for number in range(len(experiences))]


def _by_domain(experiences: Sequence[Experience]) -> list[list[int]]:
    """Return the numbers of each reward domain's samples, in the order in which the domains first appear."""
    members: dict[str, list[int]] = {}
    for number, experience in enumerate(experiences):
        members.setdefault(experience.domain, []).append(number)
    return list(members.values())


def _reduced_to_one(experiences: Sequence[Experience], objective: ObjectivePlan, runs: int) -> set[str]:
    """Return the groups in which exclusions, or runs that failed, have left one run with nothing to compare it with.

    A kind of experiences that a workflow makes besides, and that one run alone has made, is compared with nothing by
    the workflow's own choice: its rewards stay as they are.
    """
    compares = ADVANTAGES.facts(objective.adv_estimator).baseline
    if objective.advantage_args.get("mean_cal_level", "group" if compares else None) != "group":
        return set()
    groups, numbers = compared_in(experiences, objective), run_numbers(experiences)
    every = list(zip(experiences, groups, numbers, strict=True))
    counted = Counter(group for group, _ in {(group, run) for e, group, run in every if not e.excluded})
    had_others = {group for e, group, _ in every if e.excluded or (runs > 1 and not e.is_of_a_kind)}
    return {group for group in had_others if counted[group] == 1}


def _without_advantage(experience: Experience, kl_coef: float) -> Experience:
    """Mark a sample as one that is not learned from."""
    zeros = np.zeros(experience.response_length)
    return changed(
        experience,
        advantages=zeros,
        returns=zeros,
        loss_mask=zeros.astype(bool),
        metrics={**experience.metrics, "kl_coef": kl_coef},
    )


def _advantages(
    experiences: Sequence[Experience], uncompared: set[str], objective: ObjectivePlan, kl_coef: float, taught: bool
) -> list[Experience]:
    normalised = _normalised(experiences, uncompared, objective)
    dropped = normalised.dropped
    learned = [number for number in range(len(experiences)) if taught or dropped is None or not dropped[number]]
    left = [experiences[number] for number in learned]
    filled = _filled(left, normalised.at(learned), objective, kl_coef) if learned else []
    by_number = dict(zip(learned, filled, strict=True))
    return [by_number.get(number) or _without_advantage(e, kl_coef) for number, e in enumerate(experiences)]


def _normalised(experiences: Sequence[Experience], uncompared: set[str], objective: ObjectivePlan) -> Normalised:
    rewards_B = torch.tensor([_reward(experience) for experience in experiences], dtype=torch.float64)
    groups = compared_in(experiences, objective)
    function = partial(advantage(objective.adv_estimator, objective.advantage_args), **objective.advantage_args)
    facts = ADVANTAGES.facts(objective.adv_estimator)
    states = _states(experiences, objective.adv_estimator) if facts.reads_states else None
    batch = RewardBatch(rewards_B, groups, _action_logprobs(experiences), run_numbers(experiences), states)
    normalised = function(batch) if facts.reads_runs else by_runs(function, batch)
    if uncompared:
        alone_B = torch.tensor([group in uncompared for group in groups])
        means_B = torch.where(alone_B, rewards_B, normalised.mean)
        one = Normalised.of(rewards_B, means_B, torch.where(alone_B, 1.0, normalised.scale))
        normalised = replace(one, dropped=normalised.dropped)
    return normalised


def compared_in(experiences: Sequence[Experience], objective: ObjectivePlan) -> list[str]:
    """Return for each one what its reward's `group` is: its prompt's, or its tag's."""
    return [e.tag if objective.reward_groups == "tag" else e.group_id for e in experiences]


def run_numbers(experiences: Sequence[Experience]) -> list[int]:
    """Return a number for each one's run, another for each run of the batch; negative where it is a run of its own."""
    numbers: dict[tuple[str, int], int] = {}
    return [
        numbers.setdefault((e.group_id, e.run), len(numbers)) if e.run is not None else -1 - place
        for place, e in enumerate(experiences)
    ]


def _states(experiences: Sequence[Experience], reader: str) -> list[str]:
    """Return the state that each one began from, told apart by prompt: other games' states are other states."""
    found = []
    for e in experiences:
        if e.state is None:
            raise RunError(
                f"sample {e.id}, tagged {e.tag}, has no state, and adv_estimator {reader} compares steps from one;"
                " its workflow should say it in info['state_hash'] of each experience"
            )
        found.append(f"{e.group_id} {e.state}")
    return found


def by_runs(function: Advantage, batch: RewardBatch) -> Normalised:
    """Have `function` compare runs instead of their steps, of which some runs may have more than others.

    A run's reward is the mean of its steps'. Each step's own reward is then measured against its run's mean, and its
    run's scale or that of the steps by themselves, whichever is larger: runs may be equal while their steps are far
    apart, and a step divided by the deviation of equal runs is a number without bound.
    """
    assert batch.runs is not None
    steps = run_members(batch)
    if len(steps) == len(batch.groups):
        return function(replace(batch, runs=None))
    members = list(steps.values())
    rewards_R = torch.stack([batch.rewards_B[numbers].mean() for numbers in members])
    logprobs = batch.logprobs and [torch.cat([batch.logprobs[n] for n in numbers]) for numbers in members]
    found = function(RewardBatch(rewards_R, [group for group, _ in steps], logprobs))
    run_of_B = torch.empty(len(batch.groups), dtype=torch.int64)
    for place, numbers in enumerate(members):
        run_of_B[numbers] = place
    scale_B = torch.maximum(found.scale[run_of_B], function(replace(batch, runs=None)).scale)
    of_steps = Normalised.of(batch.rewards_B.double(), found.mean[run_of_B], scale_B)
    return of_steps if found.dropped is None else replace(of_steps, dropped=found.dropped[run_of_B])


def _filled(
    experiences: Sequence[Experience], normalised: Normalised, objective: ObjectivePlan, kl_coef: float
) -> list[Experience]:
    lengths = [experience.response_length for experience in experiences]
    acted_M = torch.from_numpy(_joined_masks(experiences))
    mask_M = acted_M & torch.from_numpy(np.concatenate([_in_loss(experience) for experience in experiences]))

    rewards_B = normalised.rewards
    if objective.reward_bounds is not None:
        low, high = objective.reward_bounds
        rewards_B = rewards_B.clamp(low, high).where(rewards_B.isfinite(), rewards_B)
    rewards_M = on_last_action(clipped(rewards_B, objective.reward_clip), acted_M.split(lengths))
    if objective.init_kl_coef:
        rewards_M = rewards_M - kl_coef * torch.cat([_reference_kl(e, objective.kl_penalty) for e in experiences])
        rewards_M = clipped(rewards_M, objective.reward_clip)  # once more, as in ROLL
    critic = objective.adv_estimator == "gae"
    tokens = token_advantages(
        rewards_M,
        mask_M,
        lengths,
        gamma=objective.gamma,
        values_M=torch.cat([torch.tensor(e.values) for e in experiences]) if critic else None,
        lambd=objective.lambd,
        turns_M=acted_M if ADVANTAGES.facts(objective.adv_estimator).discounts_turns else None,
        whiten_rewards=objective.whiten_rewards,
        whiten_advantages=objective.whiten_advantages,
    )

    return [
        changed(
            experience,
            advantages=advantages.numpy(),
            returns=returns.numpy() if critic else None,
            metrics={
                **experience.metrics,
                "reward_mean": mean,
                "reward_scale": scale,
                "token_reward_mean": tokens.reward_mean,
                "token_reward_scale": tokens.reward_scale,
                "advantage_mean": tokens.mean,
                "advantage_scale": tokens.scale,
                "kl_coef": kl_coef,
            },
        )
        for experience, mean, scale, advantages, returns in zip(
            experiences,
            normalised.mean.tolist(),
            normalised.scale.tolist(),
            tokens.advantages_M.split(lengths),
            tokens.returns_M.split(lengths),
            strict=True,
        )
    ]


def first_kl_coef(objective: ObjectivePlan, saved: float | None) -> float:
    """Return the token-level KL's coefficient in the first step of a run; `saved` is the one of its checkpoint."""
    return saved if saved and objective.target_kl else objective.init_kl_coef


def kl_coefs(experiences: Sequence[Experience], objective: ObjectivePlan, kl_coef: float | None = None) -> list[float]:
    """Return the token-level KL's coefficient for each reward domain's samples in turn, and last the next step's.

    Where there is a `target_kl`, the coefficient moves after each domain by the KL of its samples, as in ROLL.
    """
    found = [objective.init_kl_coef if kl_coef is None else kl_coef]
    for members in _by_domain(experiences):
        of_domain = [experiences[number] for number in members]
        if objective.target_kl is None:
            found.append(found[-1])
            continue
        kl = _reference_kl_mean([e for e in of_domain if not e.excluded], objective)
        found.append(
            adaptive_kl_coefficient(
                found[-1], kl, target=objective.target_kl, horizon=objective.kl_horizon, samples=len(of_domain)
            )
        )
    return found


def token_level_rewards(
    experiences: Sequence[Experience], teachers: Sequence[TeacherPlan], objective: ObjectivePlan
) -> list[np.ndarray]:
    """Return token rewards, f64 [T-P] a sample, 0 off the action mask."""
    return _token_level_rewards(experiences, _penalties(experiences, teachers), objective)


def _token_level_rewards(
    experiences: Sequence[Experience], penalty_M: np.ndarray, objective: ObjectivePlan
) -> list[np.ndarray]:
    rewards = _split(-penalty_M, experiences)
    for experience, reward in zip(experiences, rewards, strict=True):
        if objective.init_kl_coef and not experience.demonstration:
            reward -= experience.metrics["kl_coef"] * _reference_kl(experience, objective.kl_penalty).numpy()
        if experience.advantages is not None and not experience.excluded:
            place = last_action(experience.action_mask)
            if place is not None:
                reward[place] += _reward(experience)
    return rewards


def advantages(
    experiences: Sequence[Experience],
    teachers: Sequence[TeacherPlan],
    opd_kl_discount: float,
    advantage_clip: float | None = None,
) -> list[np.ndarray]:
    """Return what a sample's update was weighted with, f64 [T-P], 0 off the action mask and of demonstrations.

    The audit of an update, in f64 and for metrics and records; the update itself computes it in f32, in
    `megatron.trainer`.
    """
    weights_M = _weights(experiences, _penalties(experiences, teachers), opd_kl_discount, advantage_clip)
    return _split(weights_M, experiences)


def _weights(
    experiences: Sequence[Experience], penalty_M: np.ndarray, opd_kl_discount: float, advantage_clip: float | None
) -> np.ndarray:
    lengths = [e.response_length for e in experiences]
    mask_M = torch.from_numpy(_joined_masks(experiences))
    weights_M = discounted_to_go(torch.from_numpy(penalty_M), mask_M, lengths, opd_kl_discount)
    for own, part in zip([e.advantages for e in experiences], weights_M.split(lengths), strict=True):
        torch.sub(torch.zeros(()) if own is None else torch.from_numpy(own), part, out=part)
    return torch.where(mask_M, clipped(weights_M, advantage_clip), 0.0).numpy()


def advantage_metrics(
    experiences: Sequence[Experience], teachers: Sequence[TeacherPlan], objective: ObjectivePlan
) -> dict[str, float]:
    """Return `critic/rewards` (Σ of a sample's token rewards), `critic/advantages` (of action tokens): mean, max, min.

    Of samples that are learned from. With a token-level KL also `critic/kl_coef` and `critic/reference_kl`, its mean
    over samples of token means.
    """
    experiences = [experience for experience in experiences if not experience.excluded]
    penalty_M = _penalties(experiences, teachers)
    rewards = [tokens.sum() for tokens in _token_level_rewards(experiences, penalty_M, objective)]
    weights_M = _weights(experiences, penalty_M, objective.opd_kl_discount, objective.advantage_clip)
    kinds = ("mean", "max", "min")
    return {
        **statistics("critic/rewards", rewards, kinds),
        **statistics("critic/advantages", _picked(weights_M, _joined_masks(experiences)), kinds),
        **(_reference_metrics(experiences, objective) if objective.init_kl_coef else {}),
    }


def _reference_metrics(experiences: Sequence[Experience], objective: ObjectivePlan) -> dict[str, float]:
    acted = [e for e in experiences if e.action_mask.any()]
    if not acted:
        return {}
    return {
        "critic/kl_coef": acted[0].metrics["kl_coef"],
        "critic/reference_kl": _reference_kl_mean(experiences, objective),
    }


def _reference_kl_mean(experiences: Sequence[Experience], objective: ObjectivePlan) -> float:
    """Return the mean over samples of token means; NaN where no sample has an action token."""
    acted = [e for e in experiences if e.action_mask.any()]
    means = [_reference_kl(e, objective.kl_penalty).sum() / e.action_mask.sum() for e in acted]
    return float(np.mean(means)) if means else math.nan


def _penalties(experiences: Sequence[Experience], teachers: Sequence[TeacherPlan]) -> np.ndarray:
    """Return Σ opd_kl_coef · reverse_kl, f64 [M], the samples' tokens end to end, 0 off the action mask."""
    mask_M = _joined_masks(experiences)
    penalty_M = np.zeros(len(mask_M))
    if not experiences:
        return penalty_M
    student = [e.student_logprobs for e in experiences]
    student_M = np.concatenate(student).astype(np.float64)
    for teacher in teachers:
        # a sample that the teacher has not read contributes no penalty
        read = [e.teacher_logprobs.get(teacher.name, own) for e, own in zip(experiences, student, strict=True)]
        gap_M = np.subtract(student_M, np.concatenate(read))
        penalty_M += np.multiply(gap_M, teacher.opd_kl_coef, out=gap_M)
    penalty_M[~mask_M] = 0.0
    return penalty_M


def _joined_masks(experiences: Sequence[Experience]) -> np.ndarray:
    """Return the action masks end to end, bool [M]."""
    return np.concatenate([np.zeros(0, bool), *[e.action_mask for e in experiences]])


def _split(values_M: np.ndarray, experiences: Sequence[Experience]) -> list[np.ndarray]:
    """Return each sample's part, a view [T-P]."""
    ends = list(itertools.accumulate(e.response_length for e in experiences))
    return [values_M[end - e.response_length : end] for e, end in zip(experiences, ends, strict=True)]


def _picked(values_M: np.ndarray, mask_M: np.ndarray) -> np.ndarray:
    """Return what is under the mask; what is masked nowhere, as mostly, is not copied."""
    return values_M if mask_M.all() else values_M[mask_M]


def _reward(experience: Experience, workflow: str | None = None) -> float:
    if experience.reward is None:
        by_rows = "its row needs a ground_truth, and its tag a place in the tag_included of a reward worker"
        by_workflow = f"workflow {workflow} should return experiences with a reward, or " if workflow else ""
        why = experience.reward_reason or by_workflow + by_rows
        raise RunError(f"sample {experience.id}, tagged {experience.tag}, has no reward: {why}")
    return experience.reward


def _reference_kl(experience: Experience, kl_penalty: str) -> Tensor:
    """Return estimates of KL(student || reference), f64 [T-P], 0 off the action mask."""
    student, reference = (
        torch.tensor(x, dtype=torch.float64) for x in (experience.old_logprobs, experience.ref_logprobs)
    )
    return torch.where(torch.tensor(experience.action_mask), KL_ESTIMATORS[kl_penalty](student, reference), 0.0)


def _in_loss(experience: Experience) -> np.ndarray:
    """Return what is learned from: what a mask leaves out counts in no whitening."""
    return experience.action_mask if experience.loss_mask is None else experience.loss_mask


def _action_logprobs(experiences: Sequence[Experience]) -> Sequence[Tensor]:
    """Return the student's log-probs of each sample's action tokens."""
    logprobs_M = np.concatenate([e.student_logprobs for e in experiences])
    counts = [int(np.count_nonzero(e.action_mask)) for e in experiences]
    return torch.from_numpy(_picked(logprobs_M, _joined_masks(experiences))).split(counts)
