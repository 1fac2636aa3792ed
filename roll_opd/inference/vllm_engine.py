"""vLLM engine: sampling with log-probs, continuous batching, and versioned weight updates.

The engine core is a separate process; this module is its asynchronous front end. vLLM is imported when the first engine
starts. `SleepState` tracks which memory an engine has released, and checks this before requests and weight updates.
vLLM has no sleep mode on CPUs: a sleeping CPU engine stops scheduling and refuses requests, but keeps its memory.

Legend: R response tokens, T tokens of prompt and response.
"""

import asyncio
import gc
import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from roll_opd.config.plan import LoraPlan, ModelPlan, SamplingPlan
from roll_opd.inference.adapter_update import AdapterUpdate
from roll_opd.inference.engine_arguments import UNIPROC, vllm_arguments
from roll_opd.inference.failure import PORT_TAKEN, EngineStartError, start_errors, unlink_shared_memory
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
from roll_opd.models.engine_options import DTYPE_NAMES
from roll_opd.samples.weight_bucket import DTYPES, BucketMemory

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

OnUpdate = Literal["wait", "continue"]
PauseMode = Literal["wait", "keep"]
PAUSES: dict[OnUpdate, PauseMode] = {"wait": "wait", "continue": "keep"}


class WeightUpdateError(RuntimeError):
    """Raised if a weight update fails.

    The engine may then hold a mix of old and new weights, and must be restarted.
    """


class InferenceEngine:
    """vLLM engine on this machine, used from one event loop. Start it with `await InferenceEngine.start(...)`."""

    def __init__(
        self,
        llm: "AsyncLLM",
        *,
        max_model_len: int,
        dtype: torch.dtype,
        deterministic: bool,
        is_one_process: bool = False,
        new_update: Callable[[], AdapterUpdate] | None = None,
        on_update: OnUpdate = "wait",
    ) -> None:
        self.weights_version = 0
        self._llm = llm
        self._max_model_len = max_model_len
        self._dtype = dtype
        self._deterministic = deterministic
        self._on_update = on_update
        self._is_one_process = is_one_process  # whether the engine core has no rank processes
        self._new_update = new_update  # if updates send the student's adapter in place of all weights
        self._update: AdapterUpdate | None = None  # the running update of the adapter
        self._adapter: LoRARequest | None = None  # adapter of the requests, from the first update on
        self._request_ids = itertools.count()
        self._exclusive = asyncio.Lock()  # held by weight updates and, with `deterministic`, by batches
        self._broken: str | None = None
        self._incoming = 0  # version of the running update
        self._is_updating = False  # between `begin_update` and `finish_update`
        self._sleep_state = SleepState(llm)
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
            on_update: what happens to running requests during a weight update; see `begin_update`.
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
        dtype = DTYPES[DTYPE_NAMES[model.dtype]]
        # separate function: exceptions that vLLM's imports store keep its frame and variables alive
        one = arguments.distributed_executor_backend == UNIPROC
        return await cls._launch(
            arguments,
            max_model_len=max_model_len,
            dtype=dtype,
            deterministic=deterministic,
            is_one_process=one,
            new_update=partial(AdapterUpdate, model.path, adapter) if adapter else None,
            on_update=on_update,
        )

    @classmethod
    async def _launch(cls, arguments: "AsyncEngineArgs", **attributes: Any) -> "InferenceEngine":
        from vllm.v1.engine.async_llm import AsyncLLM

        for is_last in (False, False, True):
            try:
                with start_errors():
                    engine = cls(AsyncLLM.from_engine_args(arguments), **attributes)
                    await engine._llm.update_weight_version(str(engine.weights_version))
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
        self._check_awake()
        check_prompts(prompts, seeds, self._max_model_len)
        ids = [f"sample-{next(self._request_ids)}" for _ in prompts]
        unfinished = set(range(len(ids)))
        async with AsyncExitStack() as stack:
            if self._deterministic:
                await stack.enter_async_context(self._exclusive)
                self._check_awake()
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
            await self._pause("keep")
        try:
            return [
                await self._llm.add_request(
                    name, token_prompt(prompt), sampling_params(sampling, seed, stop_ids), lora_request=self._adapter
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

    async def update_weights(self, buckets: Iterable[Mapping[str, torch.Tensor]], version: int) -> None:
        """Replace all weights of the engine.

        - `buckets`: each bucket maps Hugging Face names to full tensors. Every weight must be in exactly one bucket.
          The buckets are consumed one at a time.
        - `version`: version of the new weights.

        `begin_update` describes what happens to running requests.
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
        """Start a weight update.

        After this call, `load_weights` loads the weights or the adapter in parts, and `finish_update` ends the update.
        `on_update` determines what happens to running requests:

        - wait: they finish with the old weights before the update starts.
        - continue: they keep their tokens, their KV cache is recomputed with the new weights, and generation continues.
          `Completion.versions` records which version of the weights sampled which tokens.

        Waiting requests run with the new weights. The prefix cache is emptied, so requests that are made after the
        update read no prefix of older weights. If the update fails, all three methods raise WeightUpdateError, and the
        engine is then unusable. An update whose sender was lost is replaced by the next one.
        """
        if not self._is_updating:
            await self._exclusive.acquire()
        try:
            self._check_usable()
            self._sleep_state.check_update()
        except Exception:
            self._exclusive.release()
            raise
        self._incoming, self._is_updating = version, True
        with self._breaking():
            await self._pause(PAUSES[self._on_update])
            if self._new_update:
                self._update = self._new_update()
            else:
                await self._llm.start_weight_update()

    async def load_weights(self, info: Mapping[str, Any]) -> None:
        """Load a part of the weights. `info` describes the part in the format of this engine's backend."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._check_usable()
        with self._breaking():
            if self._update:
                self._update.receive(info)
                return
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=dict(info)))

    async def finish_update(self) -> None:
        """Verify that all weights arrived, and resume requests. The engine core makes this check."""
        self._check_usable()
        with self._breaking():
            version = str(self._incoming)
            if self._update:
                self._adapter, self._update = await self._update.install(self._llm), None
                await self._llm.update_weight_version(version)
            else:
                await self._llm.finish_weight_update(weight_version=version)
            self.weights_version = self._incoming
            self._sleep_state.lacks_weights = False
            if not self._sleep_state.released:  # else the last `wake_up` resumes
                await self._llm.resume_generation()
        self._is_updating = False
        self._exclusive.release()

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Connect to the sender of weights, if the backend needs a connection."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(info)))

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Mark the engine as broken if the block fails, because its weights may be a mix of two versions.

        EngineDeadError is raised unchanged, as in other calls, and so is a cancellation. Other exceptions are raised as
        WeightUpdateError.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except BaseException as error:  # includes cancellation
            if isinstance(error, WeightUpdateError) or self._broken:  # already handled in this update
                raise
            self._is_updating = False
            self._exclusive.release()
            self._broken = f"update to weights version {self._incoming} failed: {error or type(error).__name__}"
            if isinstance(error, EngineDeadError) or not isinstance(error, Exception):
                raise
            raise WeightUpdateError(f"{self._broken}. Restart the engine") from error

    async def sleep(self, level: int, phase: str) -> None:
        """Release all memory for a phase, if vLLM supports this, and refuse requests.

        Running requests finish first. Level 2 discards the weights, so weights must be loaded after `wake_up`.
        """
        async with self._exclusive:
            self._check_usable()
            await self._sleep_state.begin(level, phase)

    async def wake_up(self, tags: Collection[str]) -> None:
        """Restore the memory of `tags`, which has "weights", "kv_cache" or both.

        The engine accepts requests again after both parts are restored.
        """
        async with self._exclusive:
            await self._sleep_state.end(tags)

    async def _pause(self, mode: PauseMode) -> None:
        # like `pause_generation`, but without its 20 ms sleep
        await self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=True)

    async def prompt_logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the log-probs of tokens 1..T-1 at temperature 1, f32 [T-1].

        T must be below `max_model_len`.
        """
        from vllm import SamplingParams

        self._check_awake()
        check_prompts([tokens], [0], self._max_model_len)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        request_id = f"prompt-{next(self._request_ids)}"
        async with AsyncExitStack() as stack:
            if self._deterministic:
                await stack.enter_async_context(self._exclusive)
            async for output in self._llm.generate(
                token_prompt(tokens), params, request_id, lora_request=self._adapter
            ):
                entries = output.prompt_logprobs
        assert entries is not None
        return token_logprobs(tokens[1:], entries[1:])

    async def check_alive(self) -> None:
        """Return after the engine core has answered. Raises RuntimeError if it has ended."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._llm is None:
            return
        try:
            await self._llm.is_sleeping()
        except EngineDeadError as error:
            if self._llm is None:  # it was closed meanwhile
                return
            raise RuntimeError("its engine core has ended") from error

    async def close(self, *, collect: bool = True) -> None:
        """Stop the engine core and wait until it has ended. A second call has no effect.

        Pass `collect=False` only in a process that will be killed next. The call then takes 1.4 s less: garbage
        collection is skipped, and an engine core that runs as one process on a CPU is killed.
        """
        if self._llm is None:
            return
        self._broken = "it is closed"
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

    def _check_usable(self) -> None:
        if self._broken:
            raise RuntimeError(f"this engine cannot be used: {self._broken}")

    def _check_awake(self) -> None:
        self._check_usable()
        self._sleep_state.check_awake()


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


PARTS = frozenset({"weights", "kv_cache"})  # vLLM's tags
DISCARDS_WEIGHTS = 2  # sleep level at which vLLM keeps no copy of the weights


class SleepState:
    """Sleep state of one engine."""

    def __init__(self, llm: "AsyncLLM") -> None:
        self._llm = llm
        self.released: frozenset[str] = frozenset()
        self.lacks_weights = False  # the weights were discarded and not replaced yet
        self._phase = ""

    def check_awake(self) -> None:
        """Raise `RuntimeError` if memory or weights are missing, because responses would then be noise."""
        if self.released:
            raise RuntimeError(
                f"an inference engine cannot generate: it is asleep ({' and '.join(sorted(self.released))} released in"
                f" the phase {self._phase})"
            )
        if self.lacks_weights:
            raise RuntimeError(
                f"an inference engine cannot generate: its weights were discarded in the phase {self._phase}, and no"
                " new weights were loaded"
            )

    def check_update(self) -> None:
        """Raise `RuntimeError` if the memory for new weights is released."""
        if "weights" in self.released:
            raise RuntimeError(
                "an inference engine cannot load weights: it is asleep (memory for weights released in the phase"
                f" {self._phase})"
            )

    async def begin(self, level: int, phase: str) -> None:
        """Wait until running requests have finished, then release all memory."""
        if self.released == PARTS:
            return
        if "weights" in self.released:  # vLLM would regard the engine as asleep and keep the cache
            raise RuntimeError("an inference engine without its weights cannot sleep; restore the weights first")
        await self._llm.sleep(level if self._has_sleep_mode else 0, mode="wait")
        self.released, self._phase = PARTS, phase
        self.lacks_weights = self.lacks_weights or level >= DISCARDS_WEIGHTS

    async def end(self, tags: Collection[str]) -> None:
        """Restore the parts of the memory in `tags`. After all parts are restored, requests are scheduled again."""
        restored = self.released & frozenset(tags)
        if not restored:
            return
        if self._has_sleep_mode:
            await self._llm.wake_up(sorted(restored))
        elif restored == self.released:
            await self._llm.wake_up(["scheduling"])
        self.released -= restored

    @property
    def _has_sleep_mode(self) -> bool:
        return self._llm.vllm_config.model_config.enable_sleep_mode
