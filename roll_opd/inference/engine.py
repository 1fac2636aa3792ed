"""One vLLM engine: samples with log-probs, continuous batching, and weights that are replaced by version.

The engine core is a process of its own; this is the asynchronous front end to it. vLLM is imported when the first
engine starts, not before. Legend: R response tokens, T tokens in all.
"""

import asyncio
import gc
import itertools
import os
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from roll_opd.config.plan import ModelPlan, SamplingPlan
from roll_opd.inference.completion import (
    Completion,
    completion_of,
    cut_at_stop,
    sampling_params,
    stop_token_ids,
    token_logprobs,
    token_prompt,
)
from roll_opd.inference.failure import PORT_TAKEN, EngineStartError, awaited
from roll_opd.inference.plugin import SHARED_MEMORY
from roll_opd.inference.routes import RECORDS_ROUTES
from roll_opd.inference.settings import (
    DTYPE_NAMES,
    UNIPROC,
    check_engine_args,
    check_plugin_is_installed,
    prepare_environment,
    resolve_engine_args,
)
from roll_opd.inference.shm_cleanup import unlink_left_memory
from roll_opd.inference.sleep_mode import SleepState
from roll_opd.samples.weight_bucket import DTYPES, BucketMemory

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector


class WeightUpdateError(RuntimeError):
    """The engine may hold half an update; it refuses further requests and has to be started again."""


class InferenceEngine:
    """One vLLM engine on this machine, for one event loop. Start it with `await InferenceEngine.start(...)`."""

    def __init__(
        self,
        llm: "AsyncLLM",
        *,
        max_model_len: int,
        dtype: torch.dtype,
        deterministic: bool,
        is_one_process: bool = False,
    ) -> None:
        self.weights_version = 0
        self._llm = llm
        self._max_model_len = max_model_len
        self._dtype = dtype
        self._deterministic = deterministic
        self._is_one_process = is_one_process  # its core has no ranks
        self._request_ids = itertools.count()
        self._turn = asyncio.Lock()  # weight updates, and whole batches when deterministic, exclude each other
        self._broken: str | None = None
        self._incoming = 0  # version of the weights that are on their way
        self._sleep = SleepState(llm)

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
    ) -> "InferenceEngine":
        """Load `model` (a Hugging Face directory) into a new engine; its weights are version 0.

        `max_model_len` counts prompt and response tokens. `engine_args` are vLLM's own and go through
        untouched; ValueError for unknown ones. With `deterministic`, a batch gives the same bits whenever it
        is run from the same weights: batches then run one after another, each from an empty prefix cache. With
        `routes`, responses say to which experts each token was sent. `weight_transfer` is the backend through which
        weights arrive. With `sleeps`, it can give its memory back.
        """
        arguments = _vllm_arguments(
            model,
            max_model_len=max_model_len,
            seed=seed,
            tensor_parallel_size=tensor_parallel_size,
            engine_args=dict(engine_args or {}),
            routes=routes,
            weight_transfer=weight_transfer,
            sleeps=sleeps,
        )
        dtype = DTYPES[DTYPE_NAMES[model.dtype]]
        # in a frame of its own: exceptions that vLLM's imports keep also keep this frame, and so its variables
        one = arguments.distributed_executor_backend == UNIPROC
        return await cls._launch(
            arguments, max_model_len=max_model_len, dtype=dtype, deterministic=deterministic, is_one_process=one
        )

    @classmethod
    async def _launch(cls, arguments: "AsyncEngineArgs", **attributes: Any) -> "InferenceEngine":
        from vllm.v1.engine.async_llm import AsyncLLM

        for is_last in (False, False, True):
            try:
                with awaited():
                    engine = cls(AsyncLLM.from_engine_args(arguments), **attributes)
                    await engine._warm_up()
                    return engine
            except EngineStartError as error:
                # vLLM looks for a free port and opens it later; by then another run may have it
                if is_last or PORT_TAKEN not in str(error):
                    raise
        raise AssertionError

    async def generate(self, prompt_tokens: Sequence[int], sampling: SamplingPlan, seed: int) -> Completion:
        """Return one response to one prompt; temperature 0 is greedy. `sampling.n` is not read."""
        completions = [c async for _, c in self.generate_batch([prompt_tokens], sampling, [seed])]
        return completions[0]

    async def generate_batch(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingPlan, seeds: Sequence[int]
    ) -> AsyncGenerator[tuple[int, Completion], None]:
        """Sample one response for each prompt in one batch; yield (index of the prompt, response) as each ends.

        A response depends on its own seed, not on the other prompts (up to rounding in batched kernels). Leaving
        the iterator early aborts what is still running (use `contextlib.aclosing`). ValueError for a prompt
        that is empty or leaves no room for a response.
        """
        self._check_awake()
        self._check_prompts(prompts, seeds)
        ids = [f"sample-{next(self._request_ids)}" for _ in prompts]
        unfinished = set(range(len(ids)))
        async with AsyncExitStack() as stack:
            if self._deterministic:
                await stack.enter_async_context(self._turn)
                self._check_awake()
            try:
                waiting = await self._submit(ids, prompts, sampling, seeds)
                async with aclosing(self._gather(waiting)) as completions:
                    async for index, completion in completions:
                        unfinished.discard(index)
                        yield index, self._cut(completion, sampling)
            finally:
                if unfinished:
                    await self._llm.abort([ids[index] for index in sorted(unfinished)])

    async def _submit(
        self, ids: list[str], prompts: Sequence[Sequence[int]], sampling: SamplingPlan, seeds: Sequence[int]
    ) -> list["RequestOutputCollector"]:
        stop_ids = stop_token_ids(sampling.stop, self._llm.get_tokenizer()) if sampling.stop else ()
        if self._deterministic:
            # the scheduler starts when it has all requests, so no step depends on when one came in; and no stop
            # strings, which are found outside the engine core, after a delay
            sampling = replace(sampling, stop=())
            await self._pause("keep")
        try:
            return [
                await self._llm.add_request(name, token_prompt(prompt), sampling_params(sampling, seed, stop_ids))
                for name, prompt, seed in zip(ids, prompts, seeds, strict=True)
            ]
        finally:
            if self._deterministic:
                await self._llm.resume_generation()

    async def _gather(self, waiting: list["RequestOutputCollector"]) -> AsyncGenerator[tuple[int, Completion], None]:
        finished: asyncio.Queue[tuple[int, Completion | Exception]] = asyncio.Queue()

        async def follow(index: int) -> None:
            try:
                output: Any = await waiting[index].get()
                finished.put_nowait((index, completion_of(output, self.weights_version)))
            except Exception as error:  # raised again where the caller waits, not in this task
                # vLLM raises one and the same exception for all requests: it would collect every traceback
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

    def _cut(self, completion: Completion, sampling: SamplingPlan) -> Completion:
        if not (self._deterministic and sampling.stop):
            return completion
        return cut_at_stop(completion, sampling.stop, self._llm.get_tokenizer())

    async def update_weights(self, buckets: Iterable[Mapping[str, torch.Tensor]], version: int) -> None:
        """Replace all weights by `buckets` of Hugging Face names -> full tensors, as `version`.

        Buckets are consumed one at a time, and all of them must hold every weight once. For the rest see
        `begin_update`.
        """
        await self.begin_update(version)
        memory = BucketMemory()
        try:
            with self._breaking():
                for bucket in buckets:
                    memory.clear()
                    for name, tensor in bucket.items():
                        memory.add(name, tensor, self._dtype)
                    await self.load_weights({**memory.describe(), "version": version})
            await self.finish_update()
        finally:
            memory.close()

    async def begin_update(self, version: int) -> None:
        """Begin to replace all weights: `load_weights` brings them, `finish_update` ends it.

        Running requests finish on the old weights first; waiting requests run on the new ones. WeightUpdateError, also
        of what follows, when weights did not arrive; the engine is then unusable.
        """
        await self._turn.acquire()
        try:
            self._check_usable()
            self._sleep.check_update()
        except Exception:
            self._turn.release()
            raise
        self._incoming = version
        with self._breaking():
            await self._pause("wait")
            await self._llm.start_weight_update()

    async def load_weights(self, info: Mapping[str, Any]) -> None:
        """Load a part of them; `info` is what the backend of this engine takes."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._check_usable()
        with self._breaking():
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=dict(info)))

    async def finish_update(self) -> None:
        """Check, in the engine core, that all weights arrived, and go on with requests."""
        self._check_usable()
        with self._breaking():
            await self._llm.finish_weight_update()
            await self._llm.reset_prefix_cache()
            self.weights_version = self._incoming
            self._sleep.lacks_weights = False
            if not self._sleep.away:  # else as the last of its memory comes back
                await self._llm.resume_generation()
        self._turn.release()

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Meet the sender of weights, of a backend that has one to meet."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(info)))

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Have the engine refuse to work after an error inside: the weights may be half old, half new.

        That the core is dead is told as it is outside of an update: EngineDeadError.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except BaseException as error:  # also when cancelled
            if isinstance(error, WeightUpdateError) or self._broken:  # of a part of this update
                raise
            self._turn.release()
            self._broken = f"update to weights version {self._incoming} failed: {error or type(error).__name__}"
            if isinstance(error, EngineDeadError) or not isinstance(error, Exception):
                raise
            raise WeightUpdateError(f"{self._broken}. Start the engine again") from error

    async def sleep(self, level: int, phase: str) -> None:
        """Give all memory back to others in a phase, where vLLM can; requests are refused from here on.

        Requests under way end first. At level 2 the weights are given up: after `wake_up`, new ones have to come.
        """
        async with self._turn:
            self._check_usable()
            await self._sleep.begin(level, phase)

    async def wake_up(self, tags: Collection[str]) -> None:
        """Take memory back: "weights", "kv_cache" or both. With the last of it, generation goes on."""
        async with self._turn:
            await self._sleep.end(tags)

    async def _pause(self, mode: Literal["keep", "wait"]) -> None:
        # as `pause_generation` does, which sleeps for 20 ms afterwards
        await self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=True)

    async def prompt_logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Return log-probs of tokens 1..T-1 at temperature 1, f32 [T-1]; T must leave room for one more token."""
        from vllm import SamplingParams

        self._check_awake()
        self._check_prompts([tokens], [0])
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        request_id = f"prompt-{next(self._request_ids)}"
        async with AsyncExitStack() as stack:
            if self._deterministic:
                await stack.enter_async_context(self._turn)
            async for output in self._llm.generate(token_prompt(tokens), params, request_id):
                entries = output.prompt_logprobs
        assert entries is not None
        return token_logprobs(tokens[1:], entries[1:])

    async def close(self, *, collect: bool = True) -> None:
        """End the engine core and wait until it has ended. Calling it twice is harmless.

        Without `collect`, which is for a process that is about to be killed, garbage is left, and a core on a CPU that
        has no ranks, and so nothing outside its memory, is killed: 1.4 s less.
        """
        if self._llm is None:
            return
        self._broken = "it is closed"
        self._llm.shutdown(0.0 if self._is_one_process and not collect else None)
        self._llm = None
        if not (collect or self._is_one_process):
            unlink_left_memory()
        if collect:  # or it would be collected, with a complaint, at exit
            gc.unfreeze()
            gc.collect()

    async def _warm_up(self) -> None:
        # the first request pays for lazy imports and kernels: count these seconds as start-up
        await self.generate([0], SamplingPlan(max_new_tokens=min(2, self._max_model_len - 1)), seed=0)

    def _check_usable(self) -> None:
        if self._broken:
            raise RuntimeError(f"this engine cannot be used: {self._broken}")

    def _check_awake(self) -> None:
        self._check_usable()
        self._sleep.check_awake()

    def _check_prompts(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
        if len(prompts) != len(seeds):
            raise ValueError(f"{len(prompts)} prompts but {len(seeds)} seeds: give one seed a prompt")
        for index, prompt in enumerate(prompts):
            if not 0 < len(prompt) < self._max_model_len:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens; expected 1 to {self._max_model_len - 1}, "
                    f"so that the response fits into max_model_len {self._max_model_len}"
                )


def _vllm_arguments(
    model: ModelPlan,
    *,
    engine_args: Mapping[str, Any],
    routes: bool,
    weight_transfer: str,
    sleeps: bool,
    **plan: int,
) -> "AsyncEngineArgs":
    # not is_available(), which would start CUDA in this process, and vLLM may fork it
    on_cpu = torch.cuda.device_count() == 0
    prepare_environment(eager_on_cpu=on_cpu and engine_args.get("enforce_eager", True))
    os.environ[RECORDS_ROUTES] = str(int(routes and on_cpu))  # of the engine that is started next
    check_plugin_is_installed()
    import vllm.v1.engine.async_llm  # noqa: F401
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform

    check_engine_args(engine_args, {field.name for field in fields(AsyncEngineArgs)})
    on_cpu = current_platform.is_cpu()
    arguments = resolve_engine_args(model, on_cpu=on_cpu, engine_args=engine_args, routes=routes, **plan)
    arguments["weight_transfer_config"] = {"backend": weight_transfer}
    # what is imported by now stays; a full garbage collection over it would stall some batch for 0.3 s
    gc.collect()
    gc.freeze()
    if sleeps and current_platform.is_sleep_mode_available():
        arguments["enable_sleep_mode"] = True
    return AsyncEngineArgs(**arguments)
