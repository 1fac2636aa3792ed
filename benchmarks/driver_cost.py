"""CPU time by part, and memory, of the current process. Linux only.

A thread samples the main thread's stack and adds the CPU time since the last sample to the part whose code is
innermost.
"""

import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

LOOK_SECONDS = 0.002
REST = "Ray, event loop"
OTHER_THREADS = "other threads (Ray)"
PARTS = {  # file of roll_opd, or file and function -> part
    "workers/sampler.py": "requests and completions",
    "workers/batched_calls.py": "requests and completions",
    "rollout/workflow_protocol.py": "requests and completions",
    "workers/reward_pool.py": "rewards",
    "workers/job_pool.py": "rewards",
    "rollout/workflow_runs.py:added_to": "teacher chunks",
    "rollout/workflow_runs.py": "requests and completions",
    "teachers/scoring.py": "teacher chunks",
    "teachers/megatron_teacher.py": "teacher chunks",
    "workers/student.py:compute_old_logprobs": "old log-probs",
    "workers/student.py:learn": "updates",
    "objective/columns.py": "updates",
    "workers/student.py:_actor_metrics": "updates",
    "workers/model_worker.py": "updates",
    "rollout/workflow_runs.py:add": "selection, advantages, metrics",
    "rollout/producer.py": "selection, advantages, metrics",
    "rollout/staleness.py": "selection, advantages, metrics",
    "objective/audit.py": "selection, advantages, metrics",
    "samples/sample.py": "selection, advantages, metrics",
    "objective/reference_kl.py": "selection, advantages, metrics",
    "objective/external_advantages.py": "selection, advantages, metrics",
    "objective/corrections.py": "selection, advantages, metrics",
    "objective/filters.py": "selection, advantages, metrics",
    "tracking/reward_metrics.py": "selection, advantages, metrics",
    "pipelines/run_logger.py": "records",
}
PACKAGE = "/roll_opd/"


class DriverCost:
    """Counts CPU time and memory between `begin` and `end`, step by step."""

    def __init__(self) -> None:
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._cpu = self._main = 0.0
        self._steps = 0
        self._peak = {"RssAnon": 0, "RssShmem": 0}
        self._before = 0
        self.is_counted = False
        self.tokens = self.sent = self.received = 0
        self._last, self._began = 0.0, (0.0, 0.0)
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)

    def begin(self) -> None:
        """Start to count. Call it in the main thread."""
        if not self.is_counted:
            self.is_counted = True
            self._before = memory()["RssAnon"]
            self._last = time.clock_gettime(self._clock)
            self._began = time.process_time(), self._last
            threading.Thread(target=self._look, daemon=True).start()

    def step_ended(self, tokens: int) -> None:
        """Count a step with this number of response tokens."""
        self._steps, self.tokens = self._steps + 1, self.tokens + tokens
        self._cpu = time.process_time() - self._began[0]
        self._main = time.clock_gettime(self._clock) - self._began[1]

    def count(self, sent: int = 0, received: int = 0) -> None:
        """Count bytes."""
        if self.is_counted:
            self.sent, self.received = self.sent + sent, self.received + received

    def figures(self) -> dict[str, Any]:
        """Return the means over the steps, and the peaks of memory in bytes."""
        steps = self._steps
        parts = {name: self._parts[name] / steps for name in dict.fromkeys([*PARTS.values(), REST])}
        return {
            "tokens": self.tokens / steps,
            "parts": {**parts, OTHER_THREADS: (self._cpu - self._main) / steps},
            "cpu": self._cpu / steps,
            "sent": self.sent / steps,
            "received": self.received / steps,
            "private_before": self._before,
            "private_peak": self._peak["RssAnon"],
            "shared_peak": self._peak["RssShmem"],
        }

    def _look(self) -> None:
        looks = 0
        while True:
            time.sleep(LOOK_SECONDS)
            now = time.clock_gettime(self._clock)
            passed, self._last = now - self._last, now
            if passed:
                self._parts[part_of(sys._current_frames()[self._thread])] += passed
            looks += 1
            if looks % 10 == 0:
                self._peak = {name: max(value, self._peak[name]) for name, value in memory().items()}


def part_of(frame: Any) -> str:
    """Return the part of the innermost frame that belongs to a part."""
    while frame is not None:
        _, inside, name = frame.f_code.co_filename.rpartition(PACKAGE)
        if inside and (part := PARTS.get(f"{name}:{frame.f_code.co_name}") or PARTS.get(name)):
            return part
        frame = frame.f_back
    return REST


def memory() -> dict[str, int]:
    """Return the resident bytes of this process: private, and shared with the object store."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("RssAnon", "RssShmem"))}
    return {name: int(value) * 1024 for name, value in fields.items()}
