"""A rollout that is left early, or whose run fails, ends without waiting for other answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from roll_opd.base.failures import RunError
from roll_opd.config.plan import SamplingPlan, WorkflowPlan
from roll_opd.data.dataset import Prompt
from roll_opd.rollout.workflow_runs import PendingRewards, RolloutContext, roll_out
from roll_opd.samples.sample import Sample, as_columns
from roll_opd.tracking.phase_clock import PhaseClock
from roll_opd.workers.outage import Problem
from roll_opd.workers.workflow_actor import Job, JobOutcome
from roll_opd.workers.workflow_pool import WorkflowPool

BAD = JobOutcome(failure=Problem("raised", "no idea"))
MADE = Sample(
    id="1",
    group_id="1",
    tag="t",
    tokens=np.arange(2),
    prompt_length=1,
    finish_reason="stop",
    reward=1.0,
    columns=as_columns(action_mask=np.ones(1, bool), rollout_logprobs=np.zeros(1, np.float32)),
)
GOOD = JobOutcome(made={run: [MADE] for run in range(4)})


class Engines:
    def engine_of(self, group: int) -> int:
        return 0

    @asynccontextmanager
    async def session(self, chunk: int) -> AsyncIterator[None]:
        yield None


@pytest.mark.parametrize("gap", range(16))
def test_a_failure_that_ends_the_run_is_not_lost(monkeypatch: pytest.MonkeyPatch, gap: int) -> None:
    async def main() -> None:
        asked: list[asyncio.Future[JobOutcome]] = []
        plan = WorkflowPlan(workflow="any", on_workflow_error="stop")
        pool = WorkflowPool(plan, lambda: None, SimpleNamespace(), (), 0, repeats=False)

        def submit(job: Job) -> asyncio.Future[JobOutcome]:
            asked.append(asyncio.get_running_loop().create_future())
            return asked[-1]

        monkeypatch.setattr(pool._pool, "submit", submit)
        context = RolloutContext(Engines(), SamplingPlan(n=4), (), 0, 1000, PhaseClock(), workflow=pool)

        async def consumed() -> None:
            prompts = [Prompt(str(number), number, "t", []) for number in range(2)]
            async with aclosing(roll_out(context, prompts, PendingRewards(context), 0)) as samples:
                async for _ in samples:
                    pass

        consuming = asyncio.create_task(consumed())
        while len(asked) < 8:
            assert not consuming.done(), consuming.result()
            await asyncio.sleep(0)
        for number, answer in enumerate(asked[:4]):
            answer.set_result(BAD if number == 0 else GOOD)
        for _ in range(gap):
            await asyncio.sleep(0)
        for answer in asked[4:]:
            if not answer.done():
                answer.set_result(GOOD)
        done, _ = await asyncio.wait([consuming], timeout=5)
        assert done and isinstance(consuming.exception(), RunError)

    asyncio.run(main())
