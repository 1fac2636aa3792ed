"""Supervised fine-tuning: the likelihood of given answers goes up."""

from collections.abc import Sequence

import numpy as np

from roll_opd.cluster.placement import Placement
from roll_opd.config.plan import RunPlan
from roll_opd.data.prompts import Prompt
from roll_opd.data.source import PromptSource
from roll_opd.data.training import TrainSample, supervised_samples
from roll_opd.pipelines.checkpoints import Checkpoint, Checkpoints
from roll_opd.pipelines.held_out import loss_of, validation_due
from roll_opd.pipelines.run_logger import RunLogger
from roll_opd.pipelines.start import start_supervised
from roll_opd.workers.supervised import SupervisedStudent


async def run_sft(
    plan: RunPlan,
    source: PromptSource,
    held_out: list[Prompt],
    record: RunLogger,
    checkpoints: Checkpoints,
    resume: Checkpoint | None,
) -> None:
    """Train from the first step, or from the one after `resume`, to `plan.max_steps`."""
    clock, objective = record.clock, plan.objective
    record.note("Starting the student ...")
    student, _ = await start_supervised(plan, Placement(plan.num_nodes, plan.devices_per_node))
    unseen = _samples(held_out)
    if resume:
        await student.load(resume.path)
        clock.lap()  # start-up belongs to no step
    else:
        record.start(await _validate(student, unseen, plan) if unseen else {})

    for step in range(resume.step + 1 if resume else 1, plan.max_steps + 1):
        rows = source.take(plan.rollout_batch_size)
        samples = _samples(rows)
        with clock.phase("train"):
            _, loss, metrics = await student.learn(samples, objective)
        metrics |= {"sft/loss": loss, "sft/tokens": float(sum(len(sample.action_mask) for sample in samples))}
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


def _samples(rows: Sequence[Prompt]) -> list[TrainSample]:
    return supervised_samples((row.tokens, row.answers) for row in rows)


async def _validate(student: SupervisedStudent, samples: Sequence[TrainSample], plan: RunPlan) -> dict[str, float]:
    """The loss on held-out rows, and their perplexity: exp of the mean over all answer tokens."""
    logprobs = await student.score(samples)
    perplexity = float(np.exp(-np.concatenate(logprobs).mean(dtype=np.float64)))
    return {"val/loss": loss_of(samples, logprobs, plan.objective), "val/perplexity": perplexity}
