"""Ray actor that runs one vLLM engine."""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import ray

from roll_opd.config.plan import RolloutPlan, SamplingPlan
from roll_opd.inference.plugin import SHARED_MEMORY
from roll_opd.models.device_phases import NOTHING, SERVING, WEIGHTS, Part, Phase, needs
from roll_opd.samples.transport import Compact
from roll_opd.samples.weight_bucket import Description
from roll_opd.weight_sync.bucket_writer import BucketHost
from roll_opd.workers.batched_calls import coalesced
from roll_opd.workers.sampler import Request


@ray.remote
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
