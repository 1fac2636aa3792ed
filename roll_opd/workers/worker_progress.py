"""Publish the progress of workers, and wait for files that ranks write.

A worker cannot answer during a call. Therefore a long call publishes its progress at intervals in Ray's key-value
store, where the driver reads it. A short call publishes nothing.

`Writing` waits for files that ranks write in the background.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

from roll_opd.workers.actor_group import ActorGroup

INTERVAL_S = 5.0


class MicroBatches:
    """Callback that publishes the progress of a role's call.

    It is called with (number of micro-batches started so far, total number of micro-batches).
    """

    def __init__(self, role: str) -> None:
        self._key = f"{_prefix()}{role}"
        self._last_put = 0.0
        self._is_published = False

    def __call__(self, begun: int, total: int) -> None:
        now = time.monotonic()
        if begun == 0:
            self._last_put = now
        elif begun < total and now - self._last_put >= INTERVAL_S:
            self._last_put, self._is_published = now, True
            self._put(f"{begun} {total}")
        elif begun == total and self._is_published:
            self._is_published = False
            self._put(None)

    def _put(self, value: str | None) -> None:
        try:
            if value is None:
                _internal_kv_del(self._key)
            else:
                _internal_kv_put(self._key, value)
        except Exception:  # the run's calls report failures of Ray
            pass


def running_calls() -> dict[str, tuple[int, int]]:
    """Return a map: role with a long call -> (micro-batches started so far, total number of micro-batches)."""
    try:
        keys = [key.decode() for key in _internal_kv_list(_prefix())]
        found = {key.removeprefix(_prefix()): _internal_kv_get(key) for key in keys}
    except Exception:
        return {}
    counts = {role: value.split() for role, value in found.items() if value}
    return {role: (int(begun), int(total)) for role, (begun, total) in sorted(counts.items())}


def _prefix() -> str:
    return f"roll_opd/progress/{ray.get_runtime_context().get_job_id()}/"


class Writing:
    """The files that some groups of ranks write in the background after a call of `save`."""

    def __init__(self, groups: Sequence[ActorGroup]) -> None:
        self.groups = tuple(groups)

    async def files(self, *, wait: bool) -> list[Path] | None:
        """Return the paths of all files after they have been written.

        If files are still being written, wait for them if `wait` is true; otherwise return None. If a rank has failed,
        its exception is raised.
        """
        found: set[Path] = set()
        for group in self.groups:
            for files in await group.call("written", wait=wait):
                if files is None:
                    return None
                found |= set(files)
        return sorted(found)
