"""Updates of an engine's weights or adapter, and the sleep during which an engine has no weights.

`WeightUpdates` loads new weights in parts, verifies them and changes the version. `SleepState` tracks which memory an
engine has released, and checks this before requests and updates. vLLM has no sleep mode on CPUs: a sleeping CPU engine
stops scheduling and refuses requests, but keeps its memory.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from roll_opd.inference.adapter_update import AdapterUpdate

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

OnUpdate = Literal["wait", "continue"]
PauseMode = Literal["wait", "keep"]
PAUSES: dict[OnUpdate, PauseMode] = {"wait": "wait", "continue": "keep"}


class WeightUpdateError(RuntimeError):
    """Raised if a weight update fails.

    The engine may then hold a mix of old and new weights, and must be restarted.
    """


class WeightUpdates:
    """The weight updates of one engine. At most one runs at a time."""

    def __init__(
        self, llm: "AsyncLLM", on_update: OnUpdate = "wait", new_adapter: Callable[[], AdapterUpdate] | None = None
    ) -> None:
        """Start with version 0.

        Args:
            on_update: what happens to running requests; see `begin`.
            new_adapter: function that starts an update of the student's adapter, if updates send only the adapter.
        """
        self.version = 0
        self.adapter: LoRARequest | None = None  # adapter of the requests, from the first update on
        self.sleep_state = SleepState(llm)
        self.exclusive = asyncio.Lock()  # held by updates, by `sleep`, and by the batches of deterministic engines
        self.broken: str | None = None  # why the engine cannot be used
        self._llm, self._on_update, self._new_adapter = llm, on_update, new_adapter
        self._adapter_update: AdapterUpdate | None = None  # the running update of the adapter
        self._incoming = 0  # version of the running update

    async def begin(self, version: int) -> None:
        """Start a weight update.

        After this call, `load` loads the weights or the adapter in parts, and `finish` ends the update. `on_update`
        determines what happens to running requests:

        - wait: they finish with the old weights before the update starts.
        - continue: they keep their tokens, their KV cache is recomputed with the new weights, and generation continues.
          `Completion.versions` records which version of the weights sampled which tokens.

        Waiting requests run with the new weights. The prefix cache is emptied, so requests that are made after the
        update read no prefix of older weights. If the update fails, all three methods raise WeightUpdateError, and the
        engine is then unusable. An engine whose sender was lost must be restarted, too.
        """
        await self.exclusive.acquire()
        try:
            self.check_usable()
            self.sleep_state.check_update()
        except Exception:
            self.exclusive.release()
            raise
        self._incoming = version
        with self._breaking():
            await self.pause(PAUSES[self._on_update])
            if self._new_adapter:
                self._adapter_update = self._new_adapter()
            else:
                await self._llm.start_weight_update()

    async def load(self, info: Mapping[str, Any]) -> None:
        """Load a part of the weights. `info` describes the part in the format of this engine's backend."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self.check_usable()
        with self._breaking():
            if self._adapter_update:
                self._adapter_update.receive(info)
                return
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=dict(info)))

    async def finish(self) -> None:
        """Verify that all weights arrived, and resume requests. The engine core makes this check."""
        self.check_usable()
        with self._breaking():
            version = str(self._incoming)
            if self._adapter_update:
                self.adapter, self._adapter_update = await self._adapter_update.install(self._llm), None
                await self._llm.update_weight_version(version)
            else:
                await self._llm.finish_weight_update(weight_version=version)
            self.version = self._incoming
            self.sleep_state.lacks_weights = False
            if not self.sleep_state.released:  # else the last `wake_up` resumes
                await self._llm.resume_generation()
        self.exclusive.release()

    async def connect(self, info: Mapping[str, Any]) -> None:
        """Connect to the sender of weights, if the backend needs a connection."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(info)))

    async def pause(self, mode: PauseMode) -> None:
        """Stop scheduling, and empty the prefix cache."""
        # like `pause_generation`, but without its 20 ms sleep
        await self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=True)

    def check_usable(self) -> None:
        """Raise RuntimeError after a failed update or after the end of the engine."""
        if self.broken:
            raise RuntimeError(f"this engine cannot be used: {self.broken}")

    def check_awake(self) -> None:
        """Raise RuntimeError if the engine cannot answer requests."""
        self.check_usable()
        self.sleep_state.check_awake()

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
            if isinstance(error, WeightUpdateError) or self.broken:  # already handled in this update
                raise
            self.exclusive.release()
            self.broken = f"update to weights version {self._incoming} failed: {error or type(error).__name__}"
            if isinstance(error, EngineDeadError) or not isinstance(error, Exception):
                raise
            raise WeightUpdateError(f"{self.broken}. Restart the engine") from error


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
