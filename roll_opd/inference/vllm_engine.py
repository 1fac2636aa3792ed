"""vLLM engine: sampling with log-probs and continuous batching.

The engine core is a separate process; this module is its asynchronous front end. vLLM is imported when the first engine
starts. `InferenceEngine.updates` replaces its weights.

Legend: R response tokens, T tokens of prompt and response.
"""

import asyncio
import gc
import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_opd.config.plan import LoraPlan, ModelPlan, SamplingPlan
from roll_opd.inference.adapter_update import AdapterUpdate
from roll_opd.inference.engine_arguments import UNIPROC, vllm_arguments
from roll_opd.inference.failed_start import PORT_TAKEN, EngineStartError, start_errors, unlink_shared_memory
from roll_opd.inference.plugin import SHARED_MEMORY
from roll_opd.inference.vllm_requests import (
    Completion,
    check_prompts,
    completion_of,
    cut_at_stop,
    sampling_params,
    stop_token_ids,
    token_logprobs,
    token_prompt,
)
from roll_opd.inference.weight_updates import OnUpdate, WeightUpdates

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

CORE_POLL_S = 1.0


class InferenceEngine:
    """vLLM engine on this machine, used from one event loop. Start it with `await InferenceEngine.start(...)`."""

    def __init__(
        self,
        llm: "AsyncLLM",
        *,
        max_model_len: int,
        deterministic: bool,
        is_one_process: bool = False,
        new_adapter: Callable[[], AdapterUpdate] | None = None,
        on_update: OnUpdate = "wait",
    ) -> None:
        self.updates = WeightUpdates(llm, on_update, new_adapter)
        self._llm = llm
        self._max_model_len = max_model_len
        self._deterministic = deterministic
        self._is_one_process = is_one_process  # whether the engine core has no rank processes
        self._request_ids = itertools.count()
        self._drafts = (0, 0)  # proposed and accepted tokens of finished requests

    @classmethod
    async def start(
        cls,
        model: ModelPlan,
        *,
        max_model_len: int,
        seed: int,
        tensor_parallel_size: int = 1,
        engine_args: Mapping[str, Any] | None = None,
        deterministic: bool = False,
        routes: bool = False,
        weight_transfer: str = SHARED_MEMORY,
        sleeps: bool = False,
        on_update: OnUpdate = "wait",
        adapter: LoraPlan | None = None,
    ) -> "InferenceEngine":
        """Load `model` (a Hugging Face directory) into a new engine. Its weights are version 0.

        Args:
            max_model_len: maximum number of prompt and response tokens together.
            engine_args: arguments that are passed to vLLM unchanged. An unknown argument raises ValueError.
            deterministic: whether a batch gives the same bits each time that it runs with the same weights. Batches
                then run one after another, and each batch starts with an empty prefix cache.
            routes: whether responses include the experts of each token.
            weight_transfer: backend of weight updates.
            sleeps: whether `sleep` releases memory.
            on_update: what happens to running requests during a weight update; see `WeightUpdates.begin`.
            adapter: adapter that updates send. The weights of `model` then never change.
        """
        arguments = vllm_arguments(
            model,
            max_model_len=max_model_len,
            seed=seed,
            tensor_parallel_size=tensor_parallel_size,
            engine_args=dict(engine_args or {}),
            routes=routes,
            weight_transfer=weight_transfer,
            sleeps=sleeps,
            adapter=adapter,
        )
        # separate function: exceptions that vLLM's imports store keep its frame and variables alive
        one = arguments.distributed_executor_backend == UNIPROC
        return await cls._launch(
            arguments,
            max_model_len=max_model_len,
            deterministic=deterministic,
            is_one_process=one,
            new_adapter=partial(AdapterUpdate, model.path, adapter) if adapter else None,
            on_update=on_update,
        )

    @classmethod
    async def _launch(cls, arguments: "AsyncEngineArgs", **attributes: Any) -> "InferenceEngine":
        from vllm.v1.engine.async_llm import AsyncLLM

        for is_last in (False, False, True):
            try:
                with start_errors():
                    # in a thread, so that the actor meanwhile refuses requests, which other engines then answer
                    engine = cls(await asyncio.to_thread(AsyncLLM.from_engine_args, arguments), **attributes)
                    # imported modules are permanent; a full garbage collection would stall a batch for 0.3 s
                    gc.collect()
                    gc.freeze()
                    await engine._llm.update_weight_version(str(engine.updates.version))
                    await engine._warm_up()
                    return engine
            except EngineStartError as error:
                # vLLM chooses a free port and opens it later; meanwhile another run may take it
                if is_last or PORT_TAKEN not in str(error):
                    raise
        raise AssertionError

    async def generate(self, prompt_tokens: Sequence[int], sampling: SamplingPlan, seed: int) -> Completion:
        """Sample one response to one prompt; temperature 0 means greedy. `sampling.n` is ignored."""
        completions = [c async for _, c in self.generate_batch([prompt_tokens], sampling, [seed])]
        return completions[0]

    async def generate_batch(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingPlan, seeds: Sequence[int]
    ) -> AsyncGenerator[tuple[int, Completion], None]:
        """Sample one response for each prompt of a batch. Yields (prompt index, response) in the order of completion.

        A response depends on its seed but not on other prompts, except for rounding in batched kernels. If the iterator
        is left early, running requests are aborted (use `contextlib.aclosing`). Raises ValueError if a prompt is empty
        or leaves no room for a response.
        """
        self.updates.check_awake()
        check_prompts(prompts, seeds, self._max_model_len)
        ids = [f"sample-{next(self._request_ids)}" for _ in prompts]
        unfinished = set(range(len(ids)))
        async with AsyncExitStack() as stack:
            if self._deterministic:
                await stack.enter_async_context(self.updates.exclusive)
                self.updates.check_awake()
            try:
                waiting = await self._submit(ids, prompts, sampling, seeds)
                async with aclosing(_completions(waiting)) as completions:
                    async for index, completion in completions:
                        unfinished.discard(index)
                        proposed, accepted = self._drafts
                        self._drafts = (proposed + completion.drafted, accepted + completion.accepted)
                        yield index, self._cut(completion, sampling)
            finally:
                if unfinished:
                    await self._llm.abort([ids[index] for index in sorted(unfinished)])

    def take_drafts(self) -> tuple[int, int]:
        """Return how many tokens speculation proposed for requests that finished since the last call, and how many of
        them are part of responses."""
        taken, self._drafts = self._drafts, (0, 0)
        return taken

    async def _submit(
        self, ids: list[str], prompts: Sequence[Sequence[int]], sampling: SamplingPlan, seeds: Sequence[int]
    ) -> list["RequestOutputCollector"]:
        stop_ids = stop_token_ids(sampling.stop, self._llm.get_tokenizer()) if sampling.stop else ()
        if self._deterministic:
            # The scheduler gets all requests at the start, so that no step depends on when they arrive. Stop strings
            # are left out, because they are found outside of the engine core, with a delay.
            sampling = replace(sampling, stop=())
        try:
            if self._deterministic:
                await self.updates.pause("keep")
            adapter = self.updates.adapter
            return [
                await self._llm.add_request(
                    name, token_prompt(prompt), sampling_params(sampling, seed, stop_ids), lora_request=adapter
                )
                for name, prompt, seed in zip(ids, prompts, seeds, strict=True)
            ]
        finally:
            if self._deterministic:
                await self._llm.resume_generation()

    def _cut(self, completion: Completion, sampling: SamplingPlan) -> Completion:
        if not (self._deterministic and sampling.stop):
            return completion
        return cut_at_stop(completion, sampling.stop, self._llm.get_tokenizer())

    async def sleep(self, level: int, phase: str) -> None:
        """Release all memory for a phase, if vLLM supports this, and refuse requests.

        Running requests finish first. Level 2 discards the weights, so weights must be loaded after `wake_up`.
        """
        async with self.updates.exclusive:
            self.updates.check_usable()
            await self.updates.sleep_state.begin(level, phase)

    async def wake_up(self, tags: Collection[str]) -> None:
        """Restore the memory of `tags`, which has "weights", "kv_cache" or both.

        The engine accepts requests again after both parts are restored.
        """
        async with self.updates.exclusive:
            await self.updates.sleep_state.end(tags)

    async def prompt_logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the log-probs of tokens 1..T-1 at temperature 1, f32 [T-1].

        T must be below `max_model_len`.
        """
        from vllm import SamplingParams

        self.updates.check_awake()
        check_prompts([tokens], [0], self._max_model_len)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        request_id = f"prompt-{next(self._request_ids)}"
        async with AsyncExitStack() as stack:
            if self._deterministic:
                await stack.enter_async_context(self.updates.exclusive)
            async for output in self._llm.generate(
                token_prompt(tokens), params, request_id, lora_request=self.updates.adapter
            ):
                entries = output.prompt_logprobs
        assert entries is not None
        return token_logprobs(tokens[1:], entries[1:])

    async def check_alive(self) -> None:
        """Return after the engine core has answered. Raises RuntimeError if it has ended."""
        if self._llm is None:
            return
        asking = asyncio.ensure_future(self._llm.is_sleeping())
        asking.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        # vLLM leaves this call unanswered if the core ends meanwhile
        while self._llm is not None and not (self._llm.errored or asking.done()):
            await asyncio.wait({asking}, timeout=CORE_POLL_S)
        if self._llm is None or self._llm.errored:
            asking.cancel()
        if self._llm is not None:  # it was not closed meanwhile
            if self._llm.errored:
                raise RuntimeError("its engine core has ended")
            asking.result()

    async def close(self, *, collect: bool = True) -> None:
        """Stop the engine core and wait until it has ended. A second call has no effect.

        Pass `collect=False` only in a process that will be killed next. The call then takes 1.4 s less: garbage
        collection is skipped, and an engine core that runs as one process on a CPU is killed.
        """
        if self._llm is None:
            return
        self.updates.broken = "it is closed"
        llm, self._llm = self._llm, None
        llm.shutdown(0.0 if self._is_one_process and not collect else None)
        del llm
        if not (collect or self._is_one_process):
            unlink_shared_memory()
        if collect:  # otherwise garbage collection at exit prints an error
            gc.unfreeze()
            gc.collect()

    async def _warm_up(self) -> None:
        # lazy imports and kernels of the first request count as start-up
        await self.generate([0], SamplingPlan(max_new_tokens=min(2, self._max_model_len - 1)), seed=0)


async def _completions(waiting: Sequence["RequestOutputCollector"]) -> AsyncGenerator[tuple[int, Completion], None]:
    """Yield (index, response) of submitted requests in the order of completion."""
    finished: asyncio.Queue[tuple[int, Completion | Exception]] = asyncio.Queue()

    async def follow(index: int) -> None:
        try:
            output: Any = await waiting[index].get()
            finished.put_nowait((index, completion_of(output)))
        except Exception as error:  # raised in the caller, not in this task
            # vLLM raises one exception object for all requests, and the object would collect all their tracebacks
            finished.put_nowait((index, error.with_traceback(None)))

    tasks = [asyncio.create_task(follow(index)) for index in range(len(waiting))]
    try:
        for _ in tasks:
            index, result = await finished.get()
            if isinstance(result, Exception):
                raise result
            yield index, result
    finally:
        for task in tasks:
            task.cancel()
