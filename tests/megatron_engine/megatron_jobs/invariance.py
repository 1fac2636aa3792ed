"""Loss and gradient of every policy loss, and of the critic's, for splits of one batch.

Each loss of a layout is computed by one of two jobs: on every push, or nightly.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_data as data
import megatron_layouts as layouts
import numpy as np
from megatron_data import train_samples
from megatron_jobs import supervised, vocabulary
from megatron_jobs.supervised import supervised_samples
from megatron_jobs.vocabulary import TEACHER_WIDTH
from megatron_layouts import VOCABULARY
from megatron_ranks import STILL, Job, gradient, record, trainer_of, write_results
from megatron_registry import jobs, operation
from megatron_samples import TeacherTargets, TrainSample, ValueSample, updated, value_columns_of

from roll_opd.config.plan import CriticPlan, MicroBatchLimits, ModelPlan, ObjectivePlan
from roll_opd.megatron.critic_engine import MegatronCritic
from roll_opd.megatron.learner_engine import MegatronLearner
from roll_opd.megatron.student_engine import MegatronTrainer
from roll_opd.objective.aggregation import MODES
from roll_opd.objective.registry import POLICY_LOSSES
from roll_opd.samples.micro_batches import TrainResult
from tests.cover import cover

INVARIANT = (*POLICY_LOSSES.builtin, "topk", "full")  # losses of a policy
CRITIC_LOSS = "value"
# name -> (sequences a micro-batch, tokens a micro-batch, the batch from its end)
SPLITS = {
    "whole": (None, None, False, False),
    "tokens": (None, 200, True, False),
    "sequences": (4, None, True, False),
    "shared": (None, 240, False, True),
    "observed": (None, 200, True, False),  # as "tokens", with other values where nothing is learned from
}
# every factorisation of four ranks, and one rank -> its splits
INVARIANCE_LAYOUTS = {
    "tp1": ("whole", "tokens", "sequences", "shared", "observed"),
    "tp4": ("tokens",),
    "pp4": ("sequences",),
    "dp4": ("tokens", "sequences", "shared"),
    "tp2pp2": ("tokens", "shared", "observed"),
    "tp2dp2": ("sequences",),
    "pp2dp2": ("sequences",),
    "cp4": ("tokens", "shared"),
    "tp2spcp2": ("sequences",),
    "pp2cp2": ("tokens", "observed"),
    "pp2vpp2dp2": ("sequences",),
    "cp2dp2": ("sequences",),
    "tp2pp2vpp2": ("tokens",),
    "pp2vpp2cp2": ("tokens",),
}
# the same of a mixture of experts, whose ranks meet in every micro-batch: layout -> its split, and losses
EXPERT_INVARIANCE = {
    "tp1": ("whole", INVARIANT),
    "tp2cp2ep2": ("tokens", INVARIANT[::2]),
    "pp2vpp2ep2": ("sequences", INVARIANT[1::2]),
}
CORE = ("ppo", "topk", "full")  # a ratio of two policies, and what a teacher says of other tokens
PURE_LAYOUTS = ("tp1", "tp4", "pp4", "dp4", "cp4")  # with one dimension, or none
ALONE = "invariance-alone"  # the job of every loss for the unsplit batch on one rank
# the losses of a layout are those of one job on every push, and of another one nightly
INVARIANCE_GRID = [(loss, layout) for loss in (*INVARIANT, CRITIC_LOSS) for layout in INVARIANCE_LAYOUTS]
PUSHED_INVARIANCE = [case for case in INVARIANCE_GRID if case[0] in CORE and case[1] in PURE_LAYOUTS]
PUSHED_INVARIANCE += [(CRITIC_LOSS, "tp1"), *cover(case for case in INVARIANCE_GRID if case[1] != "tp1")]
EXPERT_INVARIANCE_GRID = [(layout, loss) for layout, (_, losses) in EXPERT_INVARIANCE.items() for loss in losses]
PUSHED_EXPERT_INVARIANCE = [case for case in EXPERT_INVARIANCE_GRID if case[1] in CORE]


def invariance_objective(name: str) -> ObjectivePlan:
    """Return the objective of one of `INVARIANT`, with every other part of a loss; the aggregation modes alternate."""
    number = INVARIANT.index(name)
    if name not in POLICY_LOSSES.builtin:
        return ObjectivePlan(
            opd_objective=name,
            opd_vocab_size=VOCABULARY,
            opd_divergence="jsd",
            opd_jsd_beta=0.3,
            adv_estimator="grpo",
            loss_agg_mode=MODES[number % len(MODES)],
        )
    return ObjectivePlan(
        policy_loss=name,
        adv_estimator="grpo",
        opd_kl_discount=0.5,
        kl_loss=("k2", "k3", "corrected_k3")[number % 3],
        kl_loss_coef=0.2,
        entropy_loss_coef=0.02,
        loss_agg_mode=POLICY_LOSSES.facts(name).loss_agg_mode or MODES[number % len(MODES)],
        loss_normaliser=50.0,
        paired=name == "dpo",
    )


def disturbed(sample: TrainSample | ValueSample) -> Any:
    """Return a sample in which every number of an observed token is changed by 100."""
    actions = getattr(sample, "actions", None)
    off = ~(sample.action_mask if actions is None else actions | sample.action_mask)
    rng = np.random.default_rng(int(off.sum()))

    def wild(values: np.ndarray) -> np.ndarray:
        other = values + rng.choice([-100, 100], values.shape).astype(values.dtype)
        return np.where(off if values.ndim == 1 else off[:, None], other, values)

    if isinstance(sample, ValueSample):
        return replace(sample, old_values=wild(sample.old_values), returns=wild(sample.returns))
    names = ("advantages", "opd_teacher", "old_logprobs", "ref_logprobs", "importance_weights")
    there = {name: getattr(sample, name) for name in names}
    teachers = {
        name: replace(t, arrays={key: wild(v) if v.dtype.kind == "f" else v for key, v in t.arrays.items()})
        for name, t in sample.teachers.items()
    }
    columns = {name: wild(values) for name, values in there.items() if values is not None}
    return replace(sample, **columns, teachers=teachers)


def invariance_samples(name: str) -> list[TrainSample]:
    """Return the samples of one of `INVARIANT`: pairs, the student's samples with demonstrations, or the student's
    samples."""
    needs = POLICY_LOSSES.facts(name).needs if name in POLICY_LOSSES.builtin else None
    if needs == "pairs":
        return supervised_samples("dpo")
    if needs == "demonstrations":
        return supervised_samples("mix_chord")
    rng = np.random.default_rng(400)
    if name not in POLICY_LOSSES.builtin:
        return [
            replace(sample, teachers=random_targets(name, len(sample.action_mask)))
            for sample in train_samples(3, "opd")
        ]
    return [
        replace(
            sample,
            reward=float(rng.normal()),
            ref_logprobs=rng.normal(-4.6, 0.5, size=len(sample.action_mask)).astype(np.float32),
        )
        for sample in train_samples(3, "ppo")
    ]


def random_targets(objective: str, tokens: int) -> dict[str, TeacherTargets]:
    """Return random targets of a teacher for this number of tokens; for `full` the head is the one of
    `teacher_inputs`."""
    rng = np.random.default_rng(tokens)
    if objective == "full":
        arrays = {"hidden": rng.normal(size=(tokens, TEACHER_WIDTH)).astype(np.float32)}
    else:
        ids = np.stack([rng.permutation(VOCABULARY)[:5] for _ in range(tokens)]) if tokens else np.zeros((0, 5))
        logprobs = rng.normal(-4, 1, size=(tokens, 5)).astype(np.float32)
        rest = rng.normal(-1, 1, size=tokens).astype(np.float32)
        arrays = {"topk_ids": ids.astype(np.int32), "topk_logprobs": logprobs, "topk_rest": rest}
    return {"random": TeacherTargets(0.7, arrays)}


def invariance_name(loss: str, layout: str) -> str:
    """Return the name of the job that computes a loss in a layout."""
    if loss == CRITIC_LOSS:
        return f"critic_invariance-{layout}"
    return f"invariance-{layout}" + ("" if (loss, layout) in PUSHED_INVARIANCE else "-nightly")


def alone_name(loss: str) -> str:
    """The job that computes a loss for the unsplit batch on one rank."""
    return invariance_name(loss, "tp1") if loss == CRITIC_LOSS else ALONE


def expert_invariance_name(layout: str, loss: str) -> str:
    return f"experts_invariance-{layout}" + ("" if (layout, loss) in PUSHED_EXPERT_INVARIANCE else "-nightly")


@operation
def invariance(job: Job, root: Path) -> None:
    """Compute loss and gradient of every policy loss for several splits of its batch."""
    trainer = trainer_of({**job, "model": "deep"}, root, STILL, MicroBatchLimits())
    trainer.load_teacher_head("random", vocabulary.teacher_inputs(1)[1])
    splits = ("whole",) if job["name"] == ALONE else INVARIANCE_LAYOUTS[job["layout"]]
    write_results(root / f"{job['name']}.npz", over_losses(trainer, splits, job["losses"]))


def over_losses(trainer: MegatronTrainer, splits: tuple[str, ...], losses: list[str]) -> dict[str, np.ndarray]:
    """Compute loss and gradient of some policy losses for some splits of their batches."""
    found: dict[str, np.ndarray] = {}
    for name in losses:
        objective, samples = invariance_objective(name), invariance_samples(name)
        size = 2 if objective.paired else 1
        units = [samples[first : first + size] for first in range(0, len(samples), size)]

        def update(batch: list, objective: ObjectivePlan = objective) -> TrainResult:
            return updated(trainer, batch, objective, data.TEMPERATURE, supervised.SUPERVISED_STEP)

        found |= over_splits(splits, trainer, name, units, update)
    return found


@operation
def experts_invariance(job: Job, root: Path) -> None:
    """Compute the same for a mixture of experts."""
    split, _ = EXPERT_INVARIANCE[job["layout"]]
    trainer = trainer_of({**job, "model": "qwen2_moe"}, root, STILL, MicroBatchLimits())
    trainer.load_teacher_head("random", vocabulary.teacher_inputs(1)[1])
    write_results(root / f"{job['name']}.npz", over_losses(trainer, (split,), job["losses"]))


@operation
def critic_invariance(job: Job, root: Path) -> None:
    """Compute the same for a critic's loss."""
    layout, model = layouts.LAYOUTS[job["layout"]], ModelPlan(layouts.model_path(root, "deep_valued"))
    plan = CriticPlan("critic", model, tuple(range(layout.world_size)), layout, MicroBatchLimits(), optimizer=STILL)
    critic = MegatronCritic(replace(plan, value_clip=data.VALUE_CLIP), seed=0)
    units, splits = [[sample] for sample in data.value_samples(0)], INVARIANCE_LAYOUTS[job["layout"]]

    def update(batch: list) -> TrainResult:
        return critic.update(value_columns_of(batch))

    write_results(root / f"{job['name']}.npz", over_splits(splits, critic, CRITIC_LOSS, units, update))


def over_splits(
    splits: tuple[str, ...],
    learner: MegatronLearner,
    name: str,
    units: list[list],
    update: Callable[[list], TrainResult],
) -> dict[str, np.ndarray]:
    """Compute loss and gradient of one batch for these splits; a unit is never split."""
    found = {}
    for split in splits:
        sequences, tokens, backwards, learner.share_prefixes = SPLITS[split]
        learner.plan = replace(learner.plan, train_limits=MicroBatchLimits(sequences=sequences, tokens=tokens))
        batch = [sample for unit in (reversed(units) if backwards else units) for sample in unit]
        result = record(update([disturbed(sample) for sample in batch] if split == "observed" else batch))
        found[f"{name}-{split}-loss"] = np.array(result["weighted_loss"])
        found[f"{name}-{split}-gradient"] = gradient(learner)
    return found


@jobs
def invariance_jobs() -> Iterator[Job]:
    losses: dict[tuple[str, str], list[str]] = {}
    for loss, layout in INVARIANCE_GRID:
        losses.setdefault((invariance_name(loss, layout), layout), []).append(loss)
    for layout, loss in EXPERT_INVARIANCE_GRID:
        losses.setdefault((expert_invariance_name(layout, loss), layout), []).append(loss)
    losses[ALONE, "tp1"] = list(INVARIANT)
    for (name, layout), some in losses.items():
        yield {"op": name.partition("-")[0], "name": name, "layout": layout, "losses": some}
