"""Direct preference optimization (arXiv 2305.18290): prefer the better of two given answers.

The implicit reward of an answer is its log-ratio to the frozen reference policy: β · Σ(logprobs - ref_logprobs).
"""

from collections.abc import Sequence

import numpy as np

from roll_opd.config.plan import RunPlan
from roll_opd.data.dataset import Prompt
from roll_opd.models.device_phases import Phase
from roll_opd.objective.demonstrations import supervised_samples
from roll_opd.objective.registry import POLICY_LOSSES
from roll_opd.pipelines.run_context import Run
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.pipelines.sft import supervised_loss
from roll_opd.samples.sample import Sample, present, with_columns
from roll_opd.teachers.teacher_interface import TeacherScorer
from roll_opd.tracking.summary import LEARNED_TOKENS, STEP_TOKENS
from roll_opd.workers.student import Student

TRAINING_METRICS = ("dpo/accuracy", "dpo/margin", "dpo/chosen_reward", "dpo/rejected_reward")
VALIDATION_METRICS = ("val/dpo/accuracy", "val/dpo/margin", "val/dpo/chosen_reward", "val/dpo/rejected_reward")


async def train(run: Run, workers: RunWorkers) -> None:
    """Train from the first step, or from the step after the resumed checkpoint, to `plan.max_steps`."""
    plan, source = run.plan, run.source
    student, reference, turns = workers.student, workers.scorers.reference, workers.turns
    assert reference is not None
    await turns.enter(Phase.READ)
    held_out = await _with_reference(run.held_out, reference)

    async def validate() -> dict[str, float]:
        await turns.enter(Phase.READ)
        return await _validate(student, held_out, plan)

    await run.restore(workers.load)
    await run.log_start(validate)

    for step in run.steps:
        rows = source.take(plan.rollout_batch_size)
        await turns.enter(Phase.READ)
        with run.clock.phase("teacher"):
            samples = await _with_reference(rows, reference)
        with run.clock.phase("train"), run.progress.showing(student.updates):
            logprobs, loss, metrics = await workers.learn_supervised(plan, samples, step)
        metrics |= {"dpo/loss": loss, **_preferences(samples, logprobs, plan, TRAINING_METRICS)}
        metrics[STEP_TOKENS] = float(sum(len(sample.tokens) for sample in samples))
        metrics[LEARNED_TOKENS] = float(sum(sample.action_mask.sum() for sample in samples))
        metrics |= await run.validation(step, validate)
        async with run.checkpoint(step, workers.save):
            run.logger.log(step, {"ids": [row.id for row in rows]}, metrics)


async def _with_reference(rows: Sequence[Prompt], reference: TeacherScorer) -> list[Sample]:
    """Return two samples for each row: the chosen answer, then the rejected answer.

    The samples have the log-probs of the reference policy.
    """
    samples = supervised_samples((row.tokens, row.answers) for row in rows)
    answers = await reference.score([(sample.tokens, sample.prompt_length) for sample in samples], temperature=1.0)
    return with_columns(samples, ref_logprobs=[answer.logprobs for answer in answers])


async def _validate(student: Student, samples: Sequence[Sample], plan: RunPlan) -> dict[str, float]:
    logprobs = await student.compute_logprobs(samples)
    loss = supervised_loss(samples, logprobs, plan.objective)
    return {"val/loss": loss, **_preferences(samples, logprobs, plan, VALIDATION_METRICS)}


def _preferences(
    samples: Sequence[Sample], logprobs: Sequence[np.ndarray], plan: RunPlan, names: Sequence[str]
) -> dict[str, float]:
    """Return the metrics of pairs of answers, each as a mean over the pairs.

    `names` are the names of four metrics: accuracy, margin, reward of the chosen answer, and reward of the rejected
    answer.
    """
    beta = float({**POLICY_LOSSES.defaults("dpo"), **plan.objective.policy_loss_args}["beta"])
    gaps = [
        (student - present(sample.ref_logprobs)).sum(dtype=np.float64)
        for sample, student in zip(samples, logprobs, strict=True)
    ]
    chosen, rejected = (beta * np.array(gaps).reshape(-1, 2)).T
    values = (chosen > rejected, chosen - rejected, chosen, rejected)
    return {name: float(value.mean()) for name, value in zip(names, values, strict=True)}
