"""Distillation from teacher files, which contain answers and the teacher's scores of these answers.

The student's log-probs of the answers are computed during training. There are two objectives:

    topk      loss = Σ weight · (opd_kl_coef · divergence over the teacher's top-k + sft_loss_coef · -log p(token))
    sampled   reverse KL on answers that the student sampled before (Lightning-OPD, arXiv 2604.13010): the teacher's
              log-probs are fixed, the student's log-probs come from its current weights
"""

from collections.abc import Sequence

import numpy as np

from roll_opd.base.failures import RunError
from roll_opd.config.plan import FilePlan
from roll_opd.data.dataset import Prompt
from roll_opd.pipelines.run_context import Run
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.samples.sample import Sample
from roll_opd.teachers.file_teacher import file_checks, scored_samples, with_topk
from roll_opd.tracking.sample_metrics import distillation_metrics, log_ratio_metrics
from roll_opd.tracking.summary import LEARNED_TOKENS, STEP_TOKENS
from roll_opd.workers.student import Student
from roll_opd.workers.target_refs import release

CHECKED_ROWS = 64  # rows that the preflight checks


async def train(run: Run, workers: RunWorkers) -> None:
    """Train from the first step, or from the step after the resumed checkpoint, to `plan.max_steps`."""
    plan, source, student = run.plan, run.source, workers.student
    (teacher,) = plan.teachers
    held_out = scored_samples(run.held_out, teacher.name)

    async def validate() -> dict[str, float]:
        return await _validate(student, held_out, teacher.name)

    await run.restore(workers.load)
    await run.log_start(validate)
    if plan.teacher_preflight is not False and not run.resumed:
        await _check(run, student)

    for step in run.steps:
        rows = source.take(plan.rollout_batch_size)
        samples = scored_samples(rows, teacher.name)
        with run.clock.phase("train"), run.progress.showing(student.updates):
            samples = with_topk(samples, rows, teacher.name, plan.objective)
            samples, metrics = await workers.learn(plan, samples, step)
            release(samples)
        own = plan.objective.opd_objective == "sampled"  # the student has sampled the answers before
        metrics |= distillation_metrics(samples) if own else log_ratio_metrics(samples)
        metrics[LEARNED_TOKENS] = float(sum(sample.action_mask.sum() for sample in samples))
        metrics[STEP_TOKENS] = float(sum(len(sample.tokens) for sample in samples))
        metrics |= await run.validation(step, validate)
        async with run.checkpoint(step, workers.save):
            run.logger.log(step, {"ids": [row.id for row in rows]}, metrics)


async def _validate(student: Student, samples: Sequence[Sample], teacher: str) -> dict[str, float]:
    """Return the mean -log p of held-out answers and their perplexity.

    If the answers have the teacher's log-probs, also return the mean log-ratio of student and teacher.
    """
    logprobs = await student.compute_logprobs(samples)
    own = np.concatenate([sample.acted(values) for sample, values in zip(samples, logprobs, strict=True)])
    loss = -float(own.mean(dtype=np.float64))
    metrics = {"val/loss": loss, "val/perplexity": float(np.exp(loss))}
    if all(teacher in sample.teacher_logprobs for sample in samples):
        theirs = np.concatenate([sample.acted(sample.teacher_logprobs[teacher]) for sample in samples])
        metrics["val/opd/log_ratio"] = float((own - theirs).mean(dtype=np.float64))
    return metrics


async def _check(run: Run, student: Student) -> None:
    """Check the first rows of the teacher files, and report the results.

    Raises RunError if a check fails, unless `teacher_preflight` is `warn`.
    """
    plan = run.plan
    (teacher,) = plan.teachers
    assert isinstance(teacher.source, FilePlan)
    rows: list[Prompt] = run.source.peek(CHECKED_ROWS)
    logprobs = await student.compute_logprobs(scored_samples(rows, teacher.name))
    checks = file_checks(rows, logprobs, teacher.source, plan.objective)
    run.logger.preflight(teacher.name, checks)
    failed = next((check for check in checks if check.verdict == "failed"), None)
    if failed and plan.teacher_preflight != "warn":
        raise RunError(
            f"the preflight of {teacher.source.location} failed: {failed.check}: {failed.value}; {failed.meaning}. Set"
            " teacher_preflight: warn to continue nevertheless"
        )
