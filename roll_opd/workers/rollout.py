"""Ray actor around one vLLM engine."""

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import ray

from roll_opd.config.plan import RolloutPlan, SamplingPlan
from roll_opd.data.compact import Compact
from roll_opd.phases import Part, Phase
from roll_opd.workers.coalesce import coalesced
from roll_opd.workers.sampler import Request


@ray.remote
class RolloutWorker:
    """One inference engine with the student's weights."""

    _engine: Any

    async def setup(self, plan: RolloutPlan, seed: int, deterministic: bool, sleeps: bool = False) -> None:
        """Start the engine; with `sleeps`, one that can give its memory back."""
        from roll_opd.inference.engine import InferenceEngine  # in the actor's process alone: it starts vLLM

        self._engine = await InferenceEngine.start(
            plan.model,
            max_model_len=plan.max_model_len,
            seed=seed,
            tensor_parallel_size=plan.tp,
            engine_args=plan.engine_args,
            deterministic=deterministic,
            routes=plan.returns_routes,
            sleeps=sleeps,
        )
        self._sleep_level = plan.sleep_level

    async def give_back(self, parts: Collection[Part], phase: Phase) -> None:
        """Leave the device to other roles in a phase. An engine gives back everything."""
        await self._engine.sleep(self._sleep_level, phase)

    async def take_back(self, parts: Collection[Part]) -> None:
        """Have parts of the memory on the device again."""
        await self._engine.wake_up(parts)

    async def generate(
        self, requests: Sequence[Request], sampling: SamplingPlan, chunk: int | None = None
    ) -> AsyncIterator[Compact]:
        """Run all requests in one continuous batch; yield lists of (index, `Completion`) soon after they end, and at
        once with the last of each `chunk`.
        """
        batch = self._engine.generate_batch(
            [request.prompt_tokens.tolist() for request in requests], sampling, [request.seed for request in requests]
        )
        async with aclosing(coalesced(batch, chunk=chunk)) as answers:  # cancelled: what is unfinished is aborted
            async for finished in answers:
                yield Compact(finished)

    async def prompt_logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Return log-probs of tokens 1 to T-1 at temperature 1, f32 [T-1]."""
        return await self._engine.prompt_logprobs(tokens)

    async def weights_version(self) -> int:
        """Return which weights the engine has."""
        return self._engine.weights_version

    async def update_weights(self, buckets: Sequence[ray.ObjectRef], version: int) -> None:
        """Load new weights and check that they arrived; `buckets` refer to `WeightBucket`s."""
        await self._engine.update_weights([(await bucket).tensors() for bucket in buckets], version)

    async def close(self) -> None:
        """End the engine; this process is to be killed next."""
        await self._engine.close(collect=False)
