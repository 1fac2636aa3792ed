"""An engine's sleep: its memory goes to others and comes back part by part, as vLLM's sleep mode has it.

vLLM for CPUs has no sleep mode. There an engine stops scheduling and refuses requests as one that sleeps does, and
keeps its memory.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

PARTS = frozenset({"weights", "kv_cache"})  # vLLM's tags
GIVES_UP = 2  # the level at which vLLM keeps no copy of the weights


class SleepState:
    """What an engine has given back."""

    def __init__(self, llm: "AsyncLLM") -> None:
        self._llm = llm
        self.away: frozenset[str] = frozenset()
        self.lacks_weights = False  # those that it has are not any model's
        self._phase = ""

    def check_awake(self) -> None:
        """RuntimeError unless there is all that generation needs: there would be answers, and they would be noise."""
        if self.away:
            raise RuntimeError(
                f"an inference engine was asked for responses while its {', '.join(sorted(self.away))} were away: it"
                f" gave its memory back in the phase {self._phase}, and has not taken it back"
            )
        if self.lacks_weights:
            raise RuntimeError(
                "an inference engine was asked for responses before it had weights: it gave them up in the phase"
                f" {self._phase}, and was sent no new ones"
            )

    def check_update(self) -> None:
        """RuntimeError where new weights have no place."""
        if "weights" in self.away:
            raise RuntimeError(
                "an inference engine was sent weights while the memory for them was away: it gave it back in the phase"
                f" {self._phase}, and has not taken it back"
            )

    async def begin(self, level: int, phase: str) -> None:
        """Give back what is there, once no request is under way."""
        if self.away == PARTS:
            return
        if "weights" in self.away:  # vLLM takes it for asleep, and would leave the cache where it is
            raise RuntimeError("an inference engine without its weights cannot sleep; wake them first")
        await self._llm.sleep(level if self._has_sleep_mode else 0, mode="wait")
        self.away, self._phase = PARTS, phase
        self.lacks_weights = self.lacks_weights or level >= GIVES_UP

    async def end(self, tags: Collection[str]) -> None:
        """Take parts back; with the last of them requests are scheduled again."""
        coming = self.away & frozenset(tags)
        if not coming:
            return
        if self._has_sleep_mode:
            await self._llm.wake_up(sorted(coming))
        elif coming == self.away:
            await self._llm.wake_up(["scheduling"])
        self.away -= coming

    @property
    def _has_sleep_mode(self) -> bool:
        return self._llm.vllm_config.model_config.enable_sleep_mode
