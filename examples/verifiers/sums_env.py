"""Sums as an environment of verifiers: the tasks, what an answer is worth, and how the model is asked."""

import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Ask", "Sums"]


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum]):
    @vf.reward(weight=0.75)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.split()[-1:] == [self.data.answer])

    @vf.reward(weight=0.25)
    async def last_digit(self, trace: vf.Trace) -> float:
        return float(trace.last_reply[-1:] == self.data.answer[-1])


class Sums(vf.Taskset[SumTask]):
    def load(self) -> Iterator[SumTask]:
        numbers = random.Random(0)
        for _ in range(100):
            a, b = numbers.randrange(100, 1000), numbers.randrange(100, 1000)
            yield SumTask(Sum(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)


class Ask(vf.Harness[vf.HarnessConfig]):
    """Asks once, from this process. Harnesses of verifiers (null, bash, ...) start a program for each rollout."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            messages = [{"role": "user", "content": data.prompt}]
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
