"""The external part of a step's advantages, computed from rewards and the KL to the reference policy.

    token_level_rewards = external_reward - Σ opd_kl_coef · reverse_kl - kl_coef · KL(student, reference)
    A_t                 = clip(A_external_t - Σ_{k≥0} opd_kl_discount^k · Σ opd_kl_coef · reverse_kl_{t+k})

The sums Σ opd_kl_coef · reverse_kl are sums over the teachers of the sample. `external_advantages` computes A_external
separately for each reward domain, because the rewards of two domains have no common scale. `objective.reverse_kl`
subtracts the teachers' part during an update. Pure distillation has no external part.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from roll_opd.base.failures import RunError
from roll_opd.config.plan import ObjectivePlan
from roll_opd.objective.advantages.reward_normalisation import Normalised, RewardBatch, run_members
from roll_opd.objective.reference_kl import by_domain, kl_coefs, reference_kl
from roll_opd.objective.registry import ADVANTAGES, Advantage, advantage
from roll_opd.objective.returns_and_gae import clipped, last_action, on_last_action, token_advantages
from roll_opd.samples.sample import Sample, changed, end_to_end, picked


def external_advantages(
    samples: Sequence[Sample],
    objective: ObjectivePlan,
    kl_coef: float | None = None,
    *,
    taught: bool = False,
    workflow: str | None = None,
    runs: int = 1,
) -> list[Sample]:
    """Fill the column `advantages` and, with a critic, the column `returns`.

    Excluded samples do not count in any mean, and get an empty `loss_mask`. Some estimators compare the samples of a
    prompt with each other. If exclusions or failed runs leave only one run of a prompt, there is nothing to compare, so
    the reward of this run is set to 0 before the whitening. Samples that the advantage function drops get an empty
    `loss_mask` after the comparison. If the run has teachers (`taught`), their masks stay.

    The following constants are written to the samples' `metrics`: `reward_mean` and `reward_scale` of the
    normalisation; `token_reward_mean`, `token_reward_scale`, `advantage_mean` and `advantage_scale` of the two
    whitenings; and `kl_coef`.

    Raises RunError if neither a reward worker nor the workflow has given a sample a reward.

    Args:
        kl_coef: KL coefficient of the step.
        taught: whether the student is also trained on the log-probs of teachers.
        workflow: name of the workflow, for the error message.
        runs: number of runs per prompt.
    """
    for sample in samples:
        if not sample.excluded:
            reward_of(sample, workflow)
    uncompared = _reduced_to_one(samples, objective, runs)
    coefficients = kl_coefs(samples, objective, kl_coef)
    filled: dict[int, Sample] = {}
    for members, coefficient in zip(by_domain(samples), coefficients, strict=False):
        counted = [number for number in members if not samples[number].excluded]
        of_domain = [samples[number] for number in counted]
        found = _advantages(of_domain, uncompared, objective, coefficient, taught) if counted else []
        filled |= dict(zip(counted, found, strict=True))
        filled |= {n: _without_advantage(samples[n], coefficient) for n in members if samples[n].excluded}
    return [filled[number] for number in range(len(samples))]


def _reduced_to_one(samples: Sequence[Sample], objective: ObjectivePlan, runs: int) -> set[str]:
    """Return the groups in which exclusions or failed runs have left a single run, so that there is nothing to compare.

    A workflow may make several kinds of samples. If only one run has made samples of some kind, these samples keep
    their rewards, because the workflow chose not to compare them.
    """
    compares = ADVANTAGES.facts(objective.adv_estimator).baseline
    if objective.advantage_args.get("mean_cal_level", "group" if compares else None) != "group":
        return set()
    groups, numbers = compared_in(samples, objective), run_numbers(samples)
    every = list(zip(samples, groups, numbers, strict=True))
    counted = Counter(group for group, _ in {(group, run) for s, group, run in every if not s.excluded})
    had_others = {group for s, group, _ in every if s.excluded or (runs > 1 and not s.is_of_a_kind)}
    return {group for group in had_others if counted[group] == 1}


def _without_advantage(sample: Sample, kl_coef: float) -> Sample:
    """Return the sample with advantages of 0 and an empty `loss_mask`."""
    zeros = np.zeros(sample.response_length)
    empty = {"advantages": zeros, "returns": zeros, "loss_mask": zeros.astype(bool)}
    return changed(sample, columns={**sample.columns, **empty}, metrics={**sample.metrics, "kl_coef": kl_coef})


def _advantages(
    samples: Sequence[Sample], uncompared: set[str], objective: ObjectivePlan, kl_coef: float, taught: bool
) -> list[Sample]:
    normalised = _normalised(samples, uncompared, objective)
    dropped = normalised.dropped
    learned = [number for number in range(len(samples)) if taught or dropped is None or not dropped[number]]
    left = [samples[number] for number in learned]
    filled = _filled(left, normalised.at(learned), objective, kl_coef) if learned else []
    by_number = dict(zip(learned, filled, strict=True))
    return [by_number.get(number) or _without_advantage(s, kl_coef) for number, s in enumerate(samples)]


def _normalised(samples: Sequence[Sample], uncompared: set[str], objective: ObjectivePlan) -> Normalised:
    rewards_B = torch.tensor([reward_of(sample) for sample in samples], dtype=torch.float64)
    groups = compared_in(samples, objective)
    function = partial(advantage(objective.adv_estimator, objective.advantage_args), **objective.advantage_args)
    facts = ADVANTAGES.facts(objective.adv_estimator)
    states = _states(samples, objective.adv_estimator) if facts.reads_states else None
    batch = RewardBatch(rewards_B, groups, _action_logprobs(samples), run_numbers(samples), states)
    normalised = function(batch) if facts.reads_runs else by_runs(function, batch)
    if uncompared:
        alone_B = torch.tensor([group in uncompared for group in groups])
        means_B = torch.where(alone_B, rewards_B, normalised.mean)
        one = Normalised.of(rewards_B, means_B, torch.where(alone_B, 1.0, normalised.scale))
        normalised = replace(one, dropped=normalised.dropped)
    return normalised


def compared_in(samples: Sequence[Sample], objective: ObjectivePlan) -> list[str]:
    """Return the name of the group in which each sample's reward is compared.

    The name is the sample's tag if `objective.reward_groups` is "tag", and the id of the prompt's group otherwise.
    """
    return [s.tag if objective.reward_groups == "tag" else s.group_id for s in samples]


def run_numbers(samples: Sequence[Sample]) -> list[int]:
    """Return, for each sample, a number that identifies its run in the batch.

    A sample without a run gets a negative number, which no other sample has.
    """
    numbers: dict[tuple[str, int], int] = {}
    return [
        numbers.setdefault((s.group_id, s.run), len(numbers)) if s.run is not None else -1 - place
        for place, s in enumerate(samples)
    ]


def _states(samples: Sequence[Sample], reader: str) -> list[str]:
    """Return, for each sample, the state before its step. States of different prompts differ."""
    found = []
    for s in samples:
        if s.state is None:
            raise RunError(
                f"sample {s.id}, tagged {s.tag}, has no state, but adv_estimator {reader} compares steps from the same"
                " state; the workflow should set info['state_hash'] of each experience"
            )
        found.append(f"{s.group_id} {s.state}")
    return found


def by_runs(function: Advantage, batch: RewardBatch) -> Normalised:
    """Return step rewards that are normalised by statistics over runs.

    Statistics over steps would give more weight to runs with more steps. The reward of a run is therefore the mean of
    the rewards of its steps. The reward of a step is centred on the baseline of its run. It is then divided by the
    scale over runs or the scale over steps, whichever is larger. The scale over steps is needed because the scale over
    runs may be 0: runs may have equal rewards although their steps have very different rewards.
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
    samples: Sequence[Sample], normalised: Normalised, objective: ObjectivePlan, kl_coef: float
) -> list[Sample]:
    lengths = [sample.response_length for sample in samples]
    acted_M = torch.from_numpy(_joined_masks(samples))
    # tokens outside the loss do not count in the whitening
    mask_M = acted_M & torch.from_numpy(np.concatenate([sample.in_loss for sample in samples]))

    rewards_B = normalised.rewards
    if objective.reward_bounds is not None:
        low, high = objective.reward_bounds
        rewards_B = rewards_B.clamp(low, high).where(rewards_B.isfinite(), rewards_B)
    rewards_M = on_last_action(clipped(rewards_B, objective.reward_clip), acted_M.split(lengths))
    if objective.init_kl_coef:
        rewards_M = rewards_M - kl_coef * torch.cat([reference_kl(s, objective.kl_penalty) for s in samples])
        rewards_M = clipped(rewards_M, objective.reward_clip)  # clipped a second time, as in ROLL
    critic = objective.adv_estimator == "gae"
    tokens = token_advantages(
        rewards_M,
        mask_M,
        lengths,
        gamma=objective.gamma,
        values_M=torch.cat([torch.tensor(s.values) for s in samples]) if critic else None,
        lambd=objective.lambd,
        turns_M=acted_M if ADVANTAGES.facts(objective.adv_estimator).discounts_turns else None,
        whiten_rewards=objective.whiten_rewards,
        whiten_advantages=objective.whiten_advantages,
    )

    return [
        changed(
            sample,
            columns={
                **sample.columns,
                "advantages": advantages.numpy(),
                **({"returns": returns.numpy()} if critic else {}),
            },
            metrics={
                **sample.metrics,
                "reward_mean": mean,
                "reward_scale": scale,
                "token_reward_mean": tokens.reward_mean,
                "token_reward_scale": tokens.reward_scale,
                "advantage_mean": tokens.mean,
                "advantage_scale": tokens.scale,
                "kl_coef": kl_coef,
            },
        )
        for sample, mean, scale, advantages, returns in zip(
            samples,
            normalised.mean.tolist(),
            normalised.scale.tolist(),
            tokens.advantages_M.split(lengths),
            tokens.returns_M.split(lengths),
            strict=True,
        )
    ]


def token_level_rewards(sample: Sample, objective: ObjectivePlan) -> np.ndarray:
    """Return the reward of each token, f64 [T-P], for metrics and records. The sample has the column `reverse_kl`."""
    rewards = -sample.reverse_kl.astype(np.float64)
    if objective.init_kl_coef and not sample.demonstration:
        rewards -= sample.metrics["kl_coef"] * reference_kl(sample, objective.kl_penalty).numpy()
    place = last_action(sample.action_mask)
    if place is not None and sample.advantages is not None and not sample.excluded:
        rewards[place] += reward_of(sample)
    return rewards


def reward_of(sample: Sample, workflow: str | None = None) -> float:
    if sample.reward is None:
        by_rows = "its row needs a ground_truth, and its tag must be in the tag_included of a reward worker"
        by_workflow = f"workflow {workflow} should return experiences with a reward, or " if workflow else ""
        by_worker = f"rewards.{sample.domain} returned None for this sample; set on_error: drop to exclude such samples"
        why = sample.reward_reason or (by_worker if sample.domain and not workflow else by_workflow + by_rows)
        raise RunError(f"sample {sample.id}, tagged {sample.tag}, has no reward: {why}")
    return sample.reward


def _action_logprobs(samples: Sequence[Sample]) -> Sequence[Tensor]:
    """Return the student's log-probs of each sample's action tokens."""
    logprobs_M = np.concatenate([s.student_logprobs for s in samples])
    counts = [s.action_tokens for s in samples]
    return torch.from_numpy(picked(logprobs_M, _joined_masks(samples))).split(counts)


def _joined_masks(samples: Sequence[Sample]) -> np.ndarray:
    """Return the action masks of all samples, concatenated, bool [M]."""
    return end_to_end([sample.action_mask for sample in samples], np.bool_)
