"""Token rewards and advantages of a step's samples: the external reward's part, the teachers' part, and their sum.

    token_level_rewards = external_reward - Σ opd_kl_coef · reverse_kl - kl_coef · KL(student, reference)
    A_t                 = clip(A_external_t - Σ_{k≥0} opd_kl_discount^k · Σ opd_kl_coef · reverse_kl_{t+k})

The sums over teachers are over those that read the sample. In pure distillation there is no external part. The external
part is made of each reward domain's samples by themselves: rewards of two domains have no common scale.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from roll_opd.algorithms.advantages.batch import Normalised, RewardBatch, run_members
from roll_opd.algorithms.registry import ADVANTAGES, Advantage, advantage
from roll_opd.algorithms.token_advantages import clipped, on_last_action, token_advantages
from roll_opd.base.failures import RunError
from roll_opd.config.plan import ObjectivePlan
from roll_opd.objective.reference_kl import by_domain, kl_coefs, reference_kl
from roll_opd.samples.experience import Experience, changed
from roll_opd.samples.flatten import joined_masks, picked


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
            reward_of(experience, workflow)
    uncompared = _reduced_to_one(experiences, objective, runs)
    coefficients = kl_coefs(experiences, objective, kl_coef)
    filled: dict[int, Experience] = {}
    for members, coefficient in zip(by_domain(experiences), coefficients, strict=False):
        counted = [number for number in members if not experiences[number].excluded]
        of_domain = [experiences[number] for number in counted]
        found = _advantages(of_domain, uncompared, objective, coefficient, taught) if counted else []
        filled |= dict(zip(counted, found, strict=True))
        filled |= {n: _without_advantage(experiences[n], coefficient) for n in members if experiences[n].excluded}
    return [filled[number] for number in range(len(experiences))]


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
    rewards_B = torch.tensor([reward_of(experience) for experience in experiences], dtype=torch.float64)
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
    acted_M = torch.from_numpy(joined_masks(experiences))
    mask_M = acted_M & torch.from_numpy(np.concatenate([_in_loss(experience) for experience in experiences]))

    rewards_B = normalised.rewards
    if objective.reward_bounds is not None:
        low, high = objective.reward_bounds
        rewards_B = rewards_B.clamp(low, high).where(rewards_B.isfinite(), rewards_B)
    rewards_M = on_last_action(clipped(rewards_B, objective.reward_clip), acted_M.split(lengths))
    if objective.init_kl_coef:
        rewards_M = rewards_M - kl_coef * torch.cat([reference_kl(e, objective.kl_penalty) for e in experiences])
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


def reward_of(experience: Experience, workflow: str | None = None) -> float:
    if experience.reward is None:
        by_rows = "its row needs a ground_truth, and its tag a place in the tag_included of a reward worker"
        by_workflow = f"workflow {workflow} should return experiences with a reward, or " if workflow else ""
        by_worker = f"rewards.{experience.domain} returned None for it; on_error: drop leaves such samples out"
        why = experience.reward_reason or (by_worker if experience.domain and not workflow else by_workflow + by_rows)
        raise RunError(f"sample {experience.id}, tagged {experience.tag}, has no reward: {why}")
    return experience.reward


def _in_loss(experience: Experience) -> np.ndarray:
    """Return what is learned from: what a mask leaves out counts in no whitening."""
    return experience.action_mask if experience.loss_mask is None else experience.loss_mask


def _action_logprobs(experiences: Sequence[Experience]) -> Sequence[Tensor]:
    """Return the student's log-probs of each sample's action tokens."""
    logprobs_M = np.concatenate([e.student_logprobs for e in experiences])
    counts = [e.action_tokens for e in experiences]
    return torch.from_numpy(picked(logprobs_M, joined_masks(experiences))).split(counts)
