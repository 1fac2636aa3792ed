"""Supervised fine-tuning: raise the likelihood of given answers. Validation computes the loss on held-out answers."""

from collections.abc import Sequence

import numpy as np
import torch

from roll_opd.config.plan import ObjectivePlan, RunPlan
from roll_opd.data.dataset import Prompt
from roll_opd.objective.aggregation import token_weights
from roll_opd.objective.demonstrations import supervised_samples
from roll_opd.objective.losses.batch import LossBatch
from roll_opd.objective.registry import policy_loss
from roll_opd.pipelines.run_context import Run
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.samples.sample import Sample
from roll_opd.tracking.summary import LEARNED_TOKENS, STEP_TOKENS
from roll_opd.workers.student import Student


async def train(run: Run, workers: RunWorkers) -> None:
    """Train from the first step, or from the step after the resumed checkpoint, to `plan.max_steps`."""
    plan, source, student = run.plan, run.source, workers.student
    held_out = _samples(run.held_out)

    async def validate() -> dict[str, float]:
        return await _validate(student, held_out, plan)

    await run.restore(workers.load)
    await run.log_start(validate)

    for step in run.steps:
        rows = source.take(plan.rollout_batch_size)
        samples = _samples(rows)
        with run.clock.phase("train"), run.progress.showing(student.updates):
            _, loss, metrics = await workers.learn_supervised(plan, samples, step)
        learned = float(sum(sample.action_mask.sum() for sample in samples))
        metrics |= {"sft/loss": loss, "sft/tokens": learned, LEARNED_TOKENS: learned}
        metrics[STEP_TOKENS] = float(sum(len(sample.tokens) for sample in samples))
        metrics |= await run.validation(step, validate)
        async with run.checkpoint(step, workers.save):
            run.logger.log(step, {"ids": [row.id for row in rows]}, metrics)


def _samples(rows: Sequence[Prompt]) -> list[Sample]:
    return supervised_samples((row.tokens, row.answers) for row in rows)


async def _validate(student: Student, samples: Sequence[Sample], plan: RunPlan) -> dict[str, float]:
    """Return the loss and the perplexity of held-out rows.

    The perplexity is exp of the mean -log p over all answer tokens.
    """
    logprobs = await student.compute_logprobs(samples)
    perplexity = float(np.exp(-np.concatenate(logprobs).mean(dtype=np.float64)))
    return {"val/loss": supervised_loss(samples, logprobs, plan.objective), "val/perplexity": perplexity}


def supervised_loss(samples: Sequence[Sample], logprobs: Sequence[np.ndarray], objective: ObjectivePlan) -> float:
    """Return the loss of `samples`. `logprobs` has the log-probs of each answer, f32 [T-P]."""
    masks = [torch.from_numpy(sample.action_mask) for sample in samples]
    weights = token_weights(masks, objective.loss_agg_mode, objective.loss_normaliser)
    logprobs_M = torch.from_numpy(np.concatenate(logprobs)).double()
    ref = [sample.ref_logprobs for sample in samples if sample.ref_logprobs is not None]
    batch = LossBatch(
        logprobs_M,
        logprobs_M,
        torch.zeros_like(logprobs_M),
        torch.cat(masks),
        tuple(len(mask) for mask in masks),
        ref_logprobs_M=torch.from_numpy(np.concatenate(ref)).double() if ref else None,
    )
    arguments = objective.policy_loss_args
    loss_M = policy_loss(objective.policy_loss, arguments)(batch, **arguments)
    return float((loss_M * torch.cat(weights)).sum())
