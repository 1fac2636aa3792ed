"""Sleep state of an engine: tracks which memory is released, and checks this before requests and weight updates.

vLLM has no sleep mode on CPUs. A sleeping CPU engine stops scheduling and refuses requests, but keeps its memory.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

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
