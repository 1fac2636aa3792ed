"""The inference engines as the driver sees them: a request is answered whenever it is asked."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import numpy as np

from roll_opd.base.failures import RunError
from roll_opd.cluster.batched_calls import BatchedCalls
from roll_opd.cluster.group import ActorGroup
from roll_opd.config.plan import SamplingPlan
from roll_opd.inference.completion import Completion
from roll_opd.samples.buffer_pickle import Compact
from roll_opd.weight_sync.transports import WeightSync


@dataclass(frozen=True)
class Request:
    """One response to sample. Requests of one `group` begin alike, and go to one engine, which reads that once."""

    group: int
    prompt_tokens: np.ndarray  # int64 [P]
    seed: int


@dataclass(frozen=True)
class Sampler:
    """Inference engines that sample."""

    engines: ActorGroup
    sync: WeightSync | None = None  # of the student's engines: how its weights get there

    def engine_of(self, group: int) -> int:
        """Return the number of the engine that answers the requests of `group`: groups are spread evenly."""
        return group % len(self.engines.actors)

    @asynccontextmanager
    async def session(self, chunk: int | None = None) -> AsyncIterator["Session"]:
        """Answer requests inside the `with` block; leaving it aborts what is still being written."""
        session = Session(self, chunk)
        try:
            yield session
        finally:
            await session.end()

    async def end(self) -> None:
        """End the engines and their processes."""
        await self.engines.call("close")
        self.engines.end()  # what they had outside their memory is gone; the rest takes seconds to tidy up


class Session:
    """Requests under way. Those that are made one right after another go to their engine as one batch.

    The completions of a batch come in the order in which the engine finished them, soon after they are finished, and at
    once with the last of each `chunk`.
    """

    def __init__(self, sampler: Sampler, chunk: int | None = None, *, alone: bool = False) -> None:
        """With `alone`, each request is a batch: a deterministic engine then answers it alike whenever it comes."""
        self._sampler, self._chunk = sampler, chunk
        self._numbers = itertools.count() if alone else itertools.repeat(0)
        self._calls: BatchedCalls[tuple[int, SamplingPlan, int], Request] = BatchedCalls(self._generate)

    def ask(self, request: Request, sampling: SamplingPlan) -> "asyncio.Future[Completion]":
        """Return the completion to come. It raises what the engine does, and RunError where that is gone."""
        return self._calls.ask((self._sampler.engine_of(request.group), sampling, next(self._numbers)), request)

    async def end(self) -> None:
        """Abort what is still being written."""
        await self._calls.end()

    async def _generate(
        self, key: tuple[int, SamplingPlan, int], requests: list[Request]
    ) -> AsyncGenerator[list[tuple[int, Completion]], None]:
        engine, sampling, _ = key
        stream = self._sampler.engines.stream(engine, "generate", Compact(requests), sampling, self._chunk)
        answered = 0
        async with aclosing(stream):
            async for finished in stream:
                answered += len(finished)
                yield finished
        if answered < len(requests):
            left = len(requests) - answered
            raise RunError(f"an inference engine ended with {left} of {len(requests)} requests unanswered")
