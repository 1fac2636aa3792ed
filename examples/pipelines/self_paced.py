"""Self-paced learning: each step trains on the rows with the highest likelihood under the student."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from roll_opd.config.schema import AboveZero, PromptColumns, Supervised, ours
from roll_opd.objective.demonstrations import supervised_samples
from roll_opd.pipelines.run_context import Run
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.pipelines.sft import supervised_loss


@dataclass(frozen=True, kw_only=True)
class SelfPaced(Supervised, PromptColumns):
    """Keys of the self-paced pipeline outside its role `learner`."""

    pipeline = "self_paced"
    title = "self-paced learning"
    role = "learner"
    algorithm = "sft"
    keep: Annotated[AboveZero, Field(le=1)] = ours(0.5, "share of a step's rows, the likeliest, in the update")


async def train(run: Run, workers: RunWorkers) -> None:
    """Train from the first step, or from the one after a checkpoint, to `plan.max_steps`."""
    plan, source, student = run.plan, run.source, workers.student
    held_out = supervised_samples((row.tokens, row.answers) for row in run.held_out)

    async def validate() -> dict[str, float]:
        return {"val/loss": supervised_loss(held_out, await student.compute_logprobs(held_out), plan.objective)}

    await run.restore(workers.load)
    await run.log_start(validate)
    for step in run.steps:
        rows = source.take(plan.rollout_batch_size)
        samples = supervised_samples((row.tokens, row.answers) for row in rows)
        with run.clock.phase("old_logprobs"):
            likely = [values.mean() for values in await student.compute_logprobs(samples)]
        kept = np.argsort(likely)[-max(1, round(len(rows) * plan.pipeline_args["keep"])) :]
        with run.clock.phase("train"):
            chosen = [samples[number] for number in sorted(kept)]
            _, loss, metrics = await workers.learn_supervised(plan, chosen, step)
        metrics |= {"self_paced/loss": loss, "self_paced/likeliest": float(max(likely))}
        metrics |= await run.validation(step, validate)
        async with run.checkpoint(step, workers.save):
            run.logger.log(step, {"ids": [row.id for row in rows]}, metrics)
