"""The inference engines as the driver sees them: a request is answered whenever it is asked."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import numpy as np

from roll_opd.cluster.group import ActorGroup, Reference
from roll_opd.config.plan import SamplingPlan
from roll_opd.data.compact import Compact
from roll_opd.inference.completion import Completion
from roll_opd.workers.errors import RunError


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

    def engine_of(self, group: int) -> int:
        """Return the number of the engine that answers the requests of `group`: groups are spread evenly."""
        return group % len(self.engines.actors)

    @asynccontextmanager
    async def session(self, sampling: SamplingPlan, chunk: int) -> AsyncIterator["Session"]:
        """Answer requests inside the `with` block; leaving it aborts what is still being written."""
        session = Session(self, sampling, chunk)
        try:
            yield session
        finally:
            await session.end()

    async def update_weights(self, buckets: Sequence[Reference], version: int) -> None:
        """Load new weights into every engine; each checks that they arrived."""
        await self.engines.call("update_weights", buckets, version)

    async def end(self) -> None:
        """End the engines and their processes."""
        await self.engines.call("close")
        self.engines.end()  # what they had outside their memory is gone; the rest takes seconds to tidy up


class Session:
    """Requests under way. Those that are asked one right after another go to their engine as one batch.

    The completions of a batch come in the order in which the engine finished them, soon after they are finished, and at
    once with the last of each `chunk`.
    """

    def __init__(self, sampler: Sampler, sampling: SamplingPlan, chunk: int) -> None:
        self._sampler, self._sampling, self._chunk = sampler, sampling, chunk
        self._asked: dict[int, list[tuple[Request, asyncio.Future[Completion]]]] = {}
        self._followers: set[asyncio.Task[None]] = set()

    def ask(self, request: Request) -> "asyncio.Future[Completion]":
        """Return the completion to come. It raises what the engine does, and RunError where that is gone."""
        loop = asyncio.get_running_loop()
        engine = self._sampler.engine_of(request.group)
        if engine not in self._asked:
            self._asked[engine] = []
            loop.call_soon(self._send, engine)  # when all that can go on now have asked
        completion: asyncio.Future[Completion] = loop.create_future()
        self._asked[engine].append((request, completion))
        return completion

    async def end(self) -> None:
        """Abort what is still being written."""
        for follower in self._followers:
            follower.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)

    def _send(self, engine: int) -> None:
        follower = asyncio.create_task(self._follow(engine, self._asked.pop(engine)))
        self._followers.add(follower)
        follower.add_done_callback(self._followers.discard)

    async def _follow(self, engine: int, batch: list[tuple[Request, "asyncio.Future[Completion]"]]) -> None:
        requests = Compact([request for request, _ in batch])
        left = len(batch)
        try:
            stream = self._sampler.engines.stream(engine, "generate", requests, self._sampling, self._chunk)
            async with aclosing(stream):
                async for finished in stream:
                    left -= len(finished)
                    for position, completion in finished:
                        if not batch[position][1].done():  # cancelled: it is not awaited any more
                            batch[position][1].set_result(completion)
            if left:
                raise RunError(f"an inference engine ended with {left} of {len(batch)} requests unanswered")
        except Exception as error:  # raised where each completion is awaited
            for unanswered in (completion for _, completion in batch if not completion.done()):
                unanswered.set_exception(error)
