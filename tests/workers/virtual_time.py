"""An event loop without real waits."""

import asyncio


class VirtualTime(asyncio.SelectorEventLoop):
    """Event loop that skips to its next timer, so that a slow machine changes no order of events."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready:
            self._now = min((timer.when() for timer in self._scheduled if not timer.cancelled()), default=self._now)
        super()._run_once()
