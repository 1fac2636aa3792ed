"""Client of the inference engines: asynchronous requests, batched per engine."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import ray

from roll_opd.base.failures import RunError
from roll_opd.cluster.lost_processes import MAX_DEATHS, NotServing, NotSetUp, ProcessDied, Starting
from roll_opd.config.plan import RolloutPlan, SamplingPlan
from roll_opd.inference.plugin import SHARED_MEMORY
from roll_opd.inference.vllm_requests import Completion
from roll_opd.models.device_phases import NOTHING, SERVING, WEIGHTS, Kind, Part, Phase, needs
from roll_opd.samples.transport import Compact
from roll_opd.samples.weight_bucket import Description
from roll_opd.tracking.summary import DRAFT_ACCEPTANCE, DRAFTED_TOKENS
from roll_opd.weight_sync.bucket_writer import BucketHost
from roll_opd.weight_sync.send_weights import WeightSync
from roll_opd.workers.actor_group import ActorGroup, actor
from roll_opd.workers.batched_calls import BatchedCalls, coalesced
from roll_opd.workers.liveness import beat_while, is_loss
from roll_opd.workers.process_replacement import attended

T = TypeVar("T")
RETRY_S = 0.5  # seconds between two rounds of attempts over all engines


@dataclass(frozen=True)
class Request:
    """Request for one response.

    `group` is the number of a group of requests with a common prefix. All requests of a group are sent to the same
    engine, so that the engine can cache the prefix.
    """

    group: int
    prompt_tokens: np.ndarray  # int64 [P]
    seed: int


class RequestLosses:
    """The losses of engines while they ran one request.

    A lost engine may fail the request several times before its new process starts. This is one loss.
    """

    def __init__(self) -> None:
        self.count = 0
        self._down: set[tuple[int, int]] = set()  # lost engines and their lives

    def add(self, engine: int, life: int, error: Exception) -> None:
        """Count an error of an engine, unless it follows from an earlier loss."""
        if isinstance(error, Starting):
            return  # its new process may still be lost, which would be the same loss
        if isinstance(error, NotServing | NotSetUp):  # its new process has started
            self._down.discard((engine, life))
        elif (engine, life) not in self._down:
            self._down.add((engine, life))
            self.count += 1


@dataclass(frozen=True)
class Sampler:
    """A role's inference engines.

    If the engines sample from the student, `sync` transfers the student's weights to them.

    If `survives_losses`, the requests of a lost engine go to the other engines. If there are none, they wait for the
    process that replaces it.
    """

    engines: ActorGroup
    sync: WeightSync | None = None  # transport of the student's weights to these engines
    survives_losses: bool = False
    repeats_batches: bool = False  # send a lost batch again as a whole, so that its answers are the same
    returned: asyncio.Event = field(default_factory=asyncio.Event, compare=False)  # an engine was replaced

    def engine_of(self, group: int) -> int:
        """Return the index of the engine of a group. Groups are distributed round-robin."""
        return group % len(self.engines.actors)

    async def prompt_logprobs(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """Return each engine's log-probs at temperature 1 of all tokens but the first, f32 [T-1].

        Engines that are being replaced are left out.
        """
        return await self._ask("prompt_logprobs", self._up(), list(tokens))

    async def draft_metrics(self) -> dict[str, float]:
        """Return the metrics of speculation for requests that finished since the last call, if there were drafts."""
        drafts = await self._ask("take_drafts", self._up())
        proposed, accepted = (sum(counts) for counts in zip((0, 0), *drafts, strict=True))
        return {DRAFTED_TOKENS: proposed, DRAFT_ACCEPTANCE: accepted / proposed} if proposed else {}

    async def ask_any(self, engine: int, method: str, *args: Any) -> Any:
        """Return the result of a method of `engine`, or of another engine if this one is lost."""
        losses = RequestLosses()
        async with aclosing(self.attempts(engine)) as attempts:
            async for number, life in attempts:
                try:
                    return await self.engines.ask(number, method, *args)
                except Exception as error:
                    self.survive(number, life, error, losses)
        raise AssertionError

    async def attempts(self, engine: int) -> AsyncGenerator[tuple[int, int], None]:
        """Yield engines for a request, each with its number of renewals: first `engine`, then the others.

        This is repeated until the caller leaves the iteration.
        """
        engines, total = self.engines, len(self.engines.actors)
        while True:
            for number in ((engine + place) % total for place in range(total)):
                if engines.is_up(number):
                    yield number, engines.life(number)
            await asyncio.sleep(RETRY_S)

    async def served(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, whose requests must be answered with the weights that the engines have now.

        Raises ProcessDied if all engines were lost, because their replacements will get other weights.
        """

        async def check() -> None:
            if self.sync and len(self.sync.lacking()) == len(self.engines.actors):
                raise ProcessDied("all inference engines were lost, and new ones lack the weights of the step")

        return await attended(work, self.returned, check)

    def survive(self, number: int, life: int, error: Exception, losses: RequestLosses) -> None:
        """Let an engine be replaced after an error of a call.

        Raises the error if it is no loss, if the role cannot replace engines, or if the request has lost
        `MAX_DEATHS` engines.

        Args:
            life: number of renewals of the engine before the call.
            losses: losses of the request.
        """
        losses.add(number, life, error)
        if losses.count == MAX_DEATHS or not (self.survives_losses and is_loss(error)):
            raise error
        if not isinstance(error, NotServing):
            self.engines.replace_actor(number, life, str(error))

    async def _ask(self, method: str, engines: Sequence[int], *args: Any) -> list[Any]:
        """Return the results of engines. One that is lost meanwhile is left out."""

        async def ask(number: int) -> list[Any]:
            life = self.engines.life(number)
            try:
                return [await self.engines.ask(number, method, *args)]
            except Exception as error:
                self.survive(number, life, error, RequestLosses())
                return []

        return [one for found in await asyncio.gather(*map(ask, engines)) for one in found]

    def _up(self) -> list[int]:
        return [number for number in range(len(self.engines.actors)) if self.engines.is_up(number)]

    @asynccontextmanager
    async def session(self, chunk: int | None = None) -> AsyncIterator["SamplingSession"]:
        """Open a session for the `with` block. When the block ends, running requests are aborted."""
        session = SamplingSession(self, chunk)
        try:
            yield session
        finally:
            await session.end()

    async def end(self) -> None:
        """Stop the engines and their processes."""
        up = self._up()
        self.engines.stop_renewals()
        await self._ask("close", up)  # one that starts is killed
        self.engines.end()  # killed: external resources are released, and a regular exit takes seconds


class SamplingSession:
    """Sends requests to the engines and receives their completions.

    Consecutive requests to the same engine are sent as one batch. The completions of a batch arrive in the order in
    which they finish. Completions that finish within a short interval arrive together. If `chunk` completions finish
    earlier, they arrive immediately.
    """

    def __init__(self, sampler: Sampler, chunk: int | None = None, *, alone: bool = False) -> None:
        """Create a session of `sampler`.

        If `alone` is true, each request is sent as its own batch, so that other requests cannot change its result.
        """
        self._sampler, self._chunk = sampler, chunk
        self._numbers = itertools.count() if alone else itertools.repeat(0)
        self._calls: BatchedCalls[tuple[int, SamplingPlan, int], Request] = BatchedCalls(self._generate)

    def ask(self, request: Request, sampling: SamplingPlan) -> "asyncio.Future[Completion]":
        """Send a request; return a future of the completion.

        The future raises the errors of the engine. If engines have died, the request is sent again; the third loss is
        raised.
        """
        return self._calls.ask((self._sampler.engine_of(request.group), sampling, next(self._numbers)), request)

    async def end(self) -> None:
        """Abort running requests."""
        await self._calls.end()

    async def _generate(
        self, key: tuple[int, SamplingPlan, int], requests: list[Request]
    ) -> AsyncGenerator[list[tuple[int, Completion]], None]:
        engine, sampling, _ = key
        sampler, left, losses = self._sampler, set(range(len(requests))), RequestLosses()
        async with aclosing(sampler.attempts(engine)) as attempts:
            async for number, life in attempts:
                sent = range(len(requests)) if sampler.repeats_batches else sorted(left)
                batch = Compact([requests[place] for place in sent])
                try:
                    async with aclosing(
                        sampler.engines.stream(number, "generate", batch, sampling, self._chunk)
                    ) as stream:
                        async for finished in stream:
                            new = [(sent[place], answer) for place, answer in finished if sent[place] in left]
                            left.difference_update(place for place, _ in new)
                            yield new
                    break
                except Exception as error:
                    sampler.survive(number, life, error, losses)
                if not left:
                    break
        if left:
            raise RunError(f"an inference engine ended with {len(left)} of {len(requests)} requests unanswered")


class SamplerEngines:
    """Client of a sampler's engines for workflow processes.

    It has the interface `workflows.model_wrapper.EngineClient`.
    """

    def __init__(self, sampler: Sampler, chunk: int | None, deterministic: bool) -> None:
        self._sampler, self._session = sampler, SamplingSession(sampler, chunk, alone=deterministic)

    async def generate(
        self, group: int, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: SamplingPlan
    ) -> list[Completion]:
        """Return one completion for each prompt, in order."""
        requests = [Request(group, prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        return await asyncio.gather(*[self._session.ask(request, sampling) for request in requests])

    async def prompt_logprobs(self, group: int, tokens: Sequence[int]) -> np.ndarray:
        """Return the log-probs of all tokens except the first, f32 [T-1]."""
        return await self._sampler.ask_any(self._sampler.engine_of(group), "prompt_logprobs", list(tokens))

    async def weights_version(self) -> int:
        """Return the version of the engines' weights."""
        return await self._sampler.ask_any(0, "weights_version")


@actor(Kind.ENGINES)
class RolloutWorker(BucketHost):
    """Ray actor with one inference engine."""

    _engine: Any
    _serves = False  # whether the engine has the weights with which it may answer requests
    _beats: "asyncio.Task[None]"

    @needs(NOTHING)
    async def setup(
        self,
        plan: RolloutPlan,
        seed: int,
        deterministic: bool,
        weight_transfer: str = SHARED_MEMORY,
        sleeps: bool = False,
        awaits_weights: bool = False,
    ) -> None:
        """Load the model and start the engine.

        Args:
            weight_transfer: backend that transfers updated weights to the engine.
            sleeps: whether the engine must be able to release its device memory (vLLM's sleep mode).
            awaits_weights: whether the engine refuses requests with `NotServing` before its first weight update.
        """
        from roll_opd.inference.vllm_engine import InferenceEngine  # imports vLLM, only in the actor's process

        self._engine = await InferenceEngine.start(
            plan.model,
            max_model_len=plan.max_model_len,
            seed=seed,
            tensor_parallel_size=plan.tp,
            engine_args=plan.engine_args,
            deterministic=deterministic,
            routes=plan.returns_routes,
            weight_transfer=weight_transfer,
            sleeps=sleeps,
            on_update=plan.on_weight_update,
            adapter=plan.adapter,
        )
        self._sleep_level, self._serves = plan.sleep_level, not awaits_weights
        self._beats = asyncio.create_task(beat_while(self._engine.check_alive))

    def _serving(self) -> Any:
        if not self._serves:
            kind = NotServing if "_engine" in vars(self) else Starting
            raise kind("this engine was started again, and has not received the student's weights yet")
        return self._engine

    @needs(NOTHING)
    async def offload(self, parts: Collection[Part], phase: Phase) -> None:
        """Release all device memory of the engine, so that other roles can use it during `phase`.

        `parts` is ignored, because an engine always releases all of its memory.
        """
        await self._engine.sleep(self._sleep_level, phase)

    @needs(NOTHING)
    async def onload(self, parts: Collection[Part]) -> None:
        """Restore `parts` of the engine's device memory."""
        await self._engine.wake_up(parts)

    @needs(SERVING)
    async def generate(
        self, requests: Sequence[Request], sampling: SamplingPlan, chunk: int | None = None
    ) -> AsyncIterator[Compact]:
        """Run all requests in one continuous batch; yield lists of (index, `Completion`).

        The index is the position of the request in `requests`. Completions that arrive within a short interval are
        yielded in one list. If `chunk` completions arrive earlier, they are yielded immediately.
        """
        batch = self._serving().generate_batch(
            [request.prompt_tokens.tolist() for request in requests], sampling, [request.seed for request in requests]
        )
        async with aclosing(coalesced(batch, chunk=chunk)) as answers:  # cancellation aborts running requests
            async for finished in answers:
                yield Compact(finished)

    @needs(SERVING)
    async def prompt_logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the log-probs of all tokens except the first, f32 [T-1].

        The log-probs are at temperature 1.
        """
        return await self._serving().prompt_logprobs(tokens)

    @needs(NOTHING)
    async def take_drafts(self) -> tuple[int, int]:
        """See `InferenceEngine.take_drafts`."""
        return self._engine.take_drafts()

    @needs(NOTHING)
    async def weights_version(self) -> int:
        """Return the version of the engine's weights."""
        return self._serving().updates.version

    @needs(WEIGHTS)
    async def begin_update(self, version: int) -> None:
        """See `WeightUpdates.begin`."""
        await self._engine.updates.begin(version)

    @needs(WEIGHTS)
    async def load_weights(self, info: Mapping[str, Any], *, last: bool = False) -> None:
        """Load a part of the weights.

        `last` marks the last part. After the last part, the engine checks that no weight is missing, and resumes its
        requests.
        """
        await self._engine.updates.load(info)
        if last:
            await self._engine.updates.finish()
            self._serves = True

    @needs(WEIGHTS)
    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Connect to the sender of weights."""
        await self._engine.updates.connect(info)

    @needs(NOTHING)
    async def hold_bucket(self, content: Sequence[ray.ObjectRef], bucket: Description) -> Description:
        """Copy a bucket into this host's shared memory; return the description of the copy."""
        return self.hold(await content[0], bucket)

    @needs(NOTHING)
    async def close(self) -> None:
        """Stop the engine. After this call, the caller kills this process."""
        await self._engine.close(collect=False)
