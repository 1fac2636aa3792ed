"""Validation on reserved engines, while training and the generation of training samples continue.

The reserved engines get weights only when a validation starts, so all answers of a validation are from one version. One
validation runs at a time. The rows of metrics from its step on are kept in memory and written when it ends. A later
validation and a checkpoint wait for it. So the logs are complete up to every checkpoint, and a resumed run repeats each
validation that they lack.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from roll_opd.base.failures import RunError
from roll_opd.cluster.waits import WAITS
from roll_opd.pipelines.run_context import Run
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.pipelines.start_roles import start_workflow
from roll_opd.pipelines.validation_runs import context_of, log_answers
from roll_opd.rollout.validation import validate
from roll_opd.samples.sample import Sample
from roll_opd.samples.versions import sampling_versions
from roll_opd.workers.workflow_pool import WorkflowPool

SECONDS = "val/seconds"  # duration of a validation during training

Measured = tuple[dict[str, float], list[Sample], float]  # metrics, answers, seconds


@dataclass(frozen=True)
class _Running:
    """A validation that has started."""

    step: int
    measuring: asyncio.Task[Measured]


class ConcurrentValidation:
    """Validates the weights of steps on the engines that are reserved for validation."""

    def __init__(self, run: Run, workers: RunWorkers) -> None:
        self._run, self._workers = run, workers
        self._workflow: WorkflowPool | None = None
        self._running: _Running | None = None

    async def start(self) -> None:
        """Start the processes of the run's workflow that call the reserved engines."""
        assert self._workers.validation_sampler
        self._workflow = await start_workflow(self._run.plan, self._workers.validation_sampler, self._run.placement)

    async def after(self, step: int) -> dict[str, float]:
        """Start the validation of the weights after `step`, if one is due. This must be called before `step` is logged.

        If a checkpoint is due too, wait for the validation and return its metrics. Otherwise the map is empty. An
        earlier validation that has ended is logged. Raises the errors of validations.
        """
        run, is_due = self._run, self._run.validates(step)
        if self._running and (is_due or run.saves(step) or self._running.measuring.done()):
            await self.end()
        if not is_due:
            return {}
        with run.clock.phase("weight_sync"):
            await self._workers.send_for_validation(step)
        self._running = _Running(step, asyncio.create_task(self._measure()))
        if run.saves(step):
            return await self._result(self._running)
        run.logger.hold()
        return {}

    async def end(self) -> None:
        """Wait for the running validation, and write its metrics and the rows that were kept."""
        if self._running:
            self._run.logger.release(self._running.step, await self._result(self._running))

    async def aclose(self) -> None:
        """Cancel the running validation, write the rows that were kept, and end the processes of the workflow."""
        if self._running:
            self._running.measuring.cancel()
            await asyncio.gather(self._running.measuring, return_exceptions=True)
            self._run.logger.release(self._running.step, {})
        if self._workflow:
            await self._workflow.end()

    async def _measure(self) -> Measured:
        run, workers, began = self._run, self._workers, time.perf_counter()
        assert workers.validation_sampler
        context = context_of(run, workers.reward_pools, workers.validation_sampler, self._workflow, is_concurrent=True)
        metrics, answers = await validate(context, run.held_out)
        return metrics, answers, time.perf_counter() - began

    async def _result(self, running: _Running) -> dict[str, float]:
        """Wait for a validation, log some of its answers, and return its metrics."""
        run, workers, step = self._run, self._workers, running.step
        with run.clock.phase("validate"):
            with WAITS.of("the learner", f"the validation after step {step}"):
                metrics, answers, seconds = await running.measuring
            check_versions(answers, step)
            await log_answers(run, answers, step, readers=workers.scorers, turns=workers.turns)
        self._running = None
        drained = self._workflow.drain_metrics() if self._workflow else {}
        of_runs = {name: value for name, value in drained.items() if name.startswith("val/")}
        return metrics | of_runs | {SECONDS: seconds}


def check_versions(answers: Sequence[Sample], version: int) -> None:
    """Raise RunError if an answer has a token that another version than `version` sampled."""
    for answer in answers:
        if others := sampling_versions(answer.versions) - {version}:
            raise RunError(
                f"validation answer {answer.id} has tokens of weights of version {', '.join(map(str, sorted(others)))},"
                f" but version {version} is validated. This is a bug of roll_opd, or of a workflow that sets versions"
                " itself"
            )
