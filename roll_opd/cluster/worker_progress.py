"""How far the workers are within their calls, told to the driver through Ray's key-value store.

A worker is in its call and cannot be asked. A call that takes long says now and then how far it is; one that is quick
says nothing, and costs nothing.
"""

import time

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

EVERY_SECONDS = 5.0


class MicroBatches:
    """Tells how many micro-batches of its call one role has begun. Call it with that number, and how many there are."""

    def __init__(self, role: str) -> None:
        self._key = f"{_prefix()}{role}"
        self._told = 0.0
        self._is_on_record = False

    def __call__(self, begun: int, total: int) -> None:
        now = time.monotonic()
        if begun == 0:
            self._told = now
        elif begun < total and now - self._told >= EVERY_SECONDS:
            self._told, self._is_on_record = now, True
            self._put(f"{begun} {total}")
        elif begun == total and self._is_on_record:
            self._is_on_record = False
            self._put(None)

    def _put(self, value: str | None) -> None:
        try:
            if value is None:
                _internal_kv_del(self._key)
            else:
                _internal_kv_put(self._key, value)
        except Exception:  # whatever is wrong with Ray, the run's own calls tell of it
            pass


def calls_under_way() -> dict[str, tuple[int, int]]:
    """Return, by role, the micro-batches begun and their number, of the calls of this run that take long."""
    try:
        keys = [key.decode() for key in _internal_kv_list(_prefix())]
        found = {key.removeprefix(_prefix()): _internal_kv_get(key) for key in keys}
    except Exception:
        return {}
    counts = {role: value.split() for role, value in found.items() if value}
    return {role: (int(begun), int(total)) for role, (begun, total) in sorted(counts.items())}


def _prefix() -> str:
    return f"roll_opd/progress/{ray.get_runtime_context().get_job_id()}/"
