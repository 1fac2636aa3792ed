"""Client of the inference engines: asynchronous requests, batched per engine."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from roll_opd.base.failures import RunError
from roll_opd.config.plan import RolloutPlan, SamplingPlan
from roll_opd.inference.plugin import SHARED_MEMORY
from roll_opd.inference.vllm_requests import Completion
from roll_opd.models.device_phases import NOTHING, SERVING, WEIGHTS, Kind, Part, Phase, needs
from roll_opd.samples.transport import Compact
from roll_opd.samples.weight_bucket import Description
from roll_opd.tracking.summary import DRAFT_ACCEPTANCE, DRAFTED_TOKENS
from roll_opd.weight_sync.bucket_writer import BucketHost
from roll_opd.weight_sync.send_weights import WeightSync
from roll_opd.workers.batched_calls import BatchedCalls, coalesced
from roll_opd.workers.group import ActorGroup, actor


@dataclass(frozen=True)
class Request:
    """Request for one response.

    `group` is the number of a group of requests with a common prefix. All requests of a group are sent to the same
    engine, so that the engine can cache the prefix.
    """

    group: int
    prompt_tokens: np.ndarray  # int64 [P]
    seed: int


@dataclass(frozen=True)
class Sampler:
    """A role's inference engines.

    If the engines sample from the student, `sync` transfers the student's weights to them.
    """

    engines: ActorGroup
    sync: WeightSync | None = None  # transport of the student's weights to these engines

    def engine_of(self, group: int) -> int:
        """Return the index of the engine of a group. Groups are distributed round-robin."""
        return group % len(self.engines.actors)

    async def prompt_logprobs(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """Return, for each engine, its log-probs at temperature 1 of all tokens but the first, f32 [T-1]."""
        return await self.engines.call("prompt_logprobs", list(tokens))

    async def draft_metrics(self) -> dict[str, float]:
        """Return the metrics of speculation for requests that finished since the last call, if there were drafts."""
        proposed, accepted = map(sum, zip(*await self.engines.call("take_drafts"), strict=True))
        return {DRAFTED_TOKENS: proposed, DRAFT_ACCEPTANCE: accepted / proposed} if proposed else {}

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
        await self.engines.call("close")
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

        The future raises the errors of the engine. If the engine has died, the future raises RunError.
        """
        return self._calls.ask((self._sampler.engine_of(request.group), sampling, next(self._numbers)), request)

    async def end(self) -> None:
        """Abort running requests."""
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
        return await self._engine(group).prompt_logprobs.remote(list(tokens))

    async def weights_version(self) -> int:
        """Return the version of the engines' weights."""
        return await self._engine(0).weights_version.remote()

    def _engine(self, group: int) -> Any:
        return self._sampler.engines.actors[self._sampler.engine_of(group)]


@actor(Kind.ENGINES)
class RolloutWorker(BucketHost):
    """Ray actor with one inference engine."""

    _engine: Any

    @needs(NOTHING)
    async def setup(
        self,
        plan: RolloutPlan,
        seed: int,
        deterministic: bool,
        weight_transfer: str = SHARED_MEMORY,
        sleeps: bool = False,
    ) -> None:
        """Load the model and start the engine.

        Args:
            weight_transfer: backend that transfers updated weights to the engine.
            sleeps: whether the engine must be able to release its device memory (vLLM's sleep mode).
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
        self._sleep_level = plan.sleep_level

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
        batch = self._engine.generate_batch(
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
        return await self._engine.prompt_logprobs(tokens)

    @needs(NOTHING)
    async def take_drafts(self) -> tuple[int, int]:
        """See `InferenceEngine.take_drafts`."""
        return self._engine.take_drafts()

    @needs(NOTHING)
    async def weights_version(self) -> int:
        """Return the version of the engine's weights."""
        return self._engine.weights_version

    @needs(WEIGHTS)
    async def begin_update(self, version: int) -> None:
        """See `InferenceEngine.begin_update`."""
        await self._engine.begin_update(version)

    @needs(WEIGHTS)
    async def load_weights(self, info: Mapping[str, Any], *, last: bool = False) -> None:
        """Load a part of the weights.

        `last` marks the last part. After the last part, the engine checks that no weight is missing, and resumes its
        requests.
        """
        await self._engine.load_weights(info)
        if last:
            await self._engine.finish_update()

    @needs(WEIGHTS)
    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Connect to the sender of weights."""
        await self._engine.init_weight_transfer(info)

    @needs(NOTHING)
    async def hold_bucket(self, content: Sequence[ray.ObjectRef], bucket: Description) -> Description:
        """Copy a bucket into this host's shared memory; return the description of the copy."""
        return self.hold(await content[0], bucket)

    @needs(NOTHING)
    async def close(self) -> None:
        """Stop the engine. After this call, the caller kills this process."""
        await self._engine.close(collect=False)
