"""Direct preference optimization (arXiv 2305.18290): of two given answers the chosen one becomes likelier.

How much likelier, each against the frozen reference policy, is the implicit reward: β · Σ(logprobs - ref_logprobs).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from roll_opd.algorithms.registry import policy_loss_defaults
from roll_opd.cluster.placement import Placement
from roll_opd.config.plan import RunPlan
from roll_opd.data.prompts import Prompt
from roll_opd.data.source import PromptSource
from roll_opd.data.training import TrainSample, supervised_samples
from roll_opd.pipelines.checkpoints import Checkpoint, Checkpoints
from roll_opd.pipelines.held_out import loss_of, validation_due
from roll_opd.pipelines.run_logger import RunLogger
from roll_opd.pipelines.start import start_supervised
from roll_opd.workers.roles import FrozenModel
from roll_opd.workers.supervised import SupervisedStudent

OF_TRAINING = ("dpo/accuracy", "dpo/margin", "dpo/chosen_reward", "dpo/rejected_reward")
OF_VALIDATION = ("val/dpo/accuracy", "val/dpo/margin", "val/dpo/chosen_reward", "val/dpo/rejected_reward")


async def run_dpo(
    plan: RunPlan,
    source: PromptSource,
    held_out: list[Prompt],
    record: RunLogger,
    checkpoints: Checkpoints,
    resume: Checkpoint | None,
) -> None:
    """Train from the first step, or from the one after `resume`, to `plan.max_steps`."""
    clock, objective = record.clock, plan.objective
    record.note("Starting student and reference policy ...")
    student, reference = await start_supervised(plan, Placement(plan.num_nodes, plan.devices_per_node))
    unseen = await _referred(held_out, reference)
    if resume:
        await student.load(resume.path)
        clock.lap()  # start-up belongs to no step
    else:
        record.start(await _validate(student, unseen, plan) if unseen else {})

    for step in range(resume.step + 1 if resume else 1, plan.max_steps + 1):
        rows = source.take(plan.rollout_batch_size)
        with clock.phase("teacher"):
            samples = await _referred(rows, reference)
        with clock.phase("train"):
            logprobs, loss, metrics = await student.learn(samples, objective)
        metrics |= {"dpo/loss": loss, **_preferences(samples, logprobs, plan, OF_TRAINING)}
        if unseen and validation_due(plan, step):
            with clock.phase("validate"):
                metrics |= await _validate(student, unseen, plan)
        if checkpoints.due(step):
            with clock.phase("checkpoint"):
                await checkpoints.write(step, student.save, source.state_dict())
        record.log(step, {"ids": [row.id for row in rows]}, metrics)
        if checkpoints.due(step):
            checkpoints.commit(step)  # after the record: a checkpoint's run has all its steps on record
    student.group.end()
    reference.group.end()


async def _referred(rows: Sequence[Prompt], reference: FrozenModel) -> list[TrainSample]:
    """Two samples a row, chosen and rejected, with the reference policy's log-probs."""
    samples = supervised_samples((row.tokens, row.answers) for row in rows)
    scored = await reference.score(samples, temperature=1.0)
    return [replace(sample, ref_logprobs=logprobs) for sample, logprobs in zip(samples, scored, strict=True)]


async def _validate(student: SupervisedStudent, samples: Sequence[TrainSample], plan: RunPlan) -> dict[str, float]:
    logprobs = await student.score(samples)
    loss = loss_of(samples, logprobs, plan.objective)
    return {"val/loss": loss, **_preferences(samples, logprobs, plan, OF_VALIDATION)}


def _preferences(
    samples: Sequence[TrainSample], logprobs: Sequence[np.ndarray], plan: RunPlan, names: Sequence[str]
) -> dict[str, float]:
    """Means over pairs, under `names`: how often the chosen answer has the larger reward, by how much, and both."""
    beta = float({**policy_loss_defaults("dpo"), **plan.objective.policy_loss_args}["beta"])
    gaps = [(own - sample.ref_logprobs).sum(dtype=np.float64) for sample, own in zip(samples, logprobs, strict=True)]
    chosen, rejected = (beta * np.array(gaps).reshape(-1, 2)).T
    values = (chosen > rejected, chosen - rejected, chosen, rejected)
    return {name: float(value.mean()) for name, value in zip(names, values, strict=True)}
