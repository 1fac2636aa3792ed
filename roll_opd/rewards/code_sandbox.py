"""The reward of a program that passes its row's test cases, run where it can do no harm.

The row's `test_cases` say what is run (docs/rewards/code_sandbox.md); the program is the last fenced Python block of
the response. The sandbox is a security boundary: see `roll_opd.rewards.sandbox`.
"""

import os
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from roll_opd.rewards.interface import RewardError, RewardSample
from roll_opd.rewards.registry import register
from roll_opd.rewards.sandbox.cases import BadCases, program_of, read_cases
from roll_opd.rewards.sandbox.judge import NO_CODE, NOT_RUN, PASSED
from roll_opd.rewards.sandbox.pool import Pool
from roll_opd.rewards.sandbox.settings import Limits

UNSAFE = (
    "code_sandbox: UNSAFE: programs that a model wrote run with your rights, and can read, change and delete your files"
    " and use your network; remove `unsafe: true` unless the machine is thrown away afterwards"
)
BAD_ROW = "unusable test cases"


@dataclass(frozen=True)
class Verdict:
    """What became of one response."""

    reward: float | None
    reason: str  # of the first case that did not pass, or "passed"
    reasons: tuple[str, ...] = ()  # of every case


@register("code_sandbox")
class CodeSandbox:
    """1.0 for a program that passes all of its row's cases, else 0.0; with `partial`, the share that it passes.

    None for a row whose cases cannot be used. `workers` programs run at once (default: the CPUs this process may use);
    the other arguments are those of `Limits`. Raises `RewardError` where this machine offers no sandbox.
    """

    def __init__(
        self,
        partial: bool = False,
        unsafe: bool = False,
        workers: int | None = None,
        cpu_seconds: int = Limits.cpu_seconds,
        wall_seconds: float = Limits.wall_seconds,
        memory_mb: int = Limits.memory_mb,
        processes: int = Limits.processes,
        open_files: int = Limits.open_files,
        disk_mb: int = Limits.disk_mb,
        output_mb: int = Limits.output_mb,
    ) -> None:
        for name, value in (("partial", partial), ("unsafe", unsafe)):
            if not isinstance(value, bool):
                raise RewardError(f"code_sandbox: {name} is {value!r}; write true or false")
        if workers is not None and (type(workers) is not int or workers < 1):
            raise RewardError(f"code_sandbox: workers is {workers!r}; it must be a whole number above 0")
        limits = Limits(cpu_seconds, wall_seconds, memory_mb, processes, open_files, disk_mb, output_mb)
        if unsafe:
            print(UNSAFE, file=sys.stderr, flush=True)
        workers = workers or len(os.sched_getaffinity(0))
        self._partial = partial
        self._pool = Pool(limits, workers, unsafe)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="code_sandbox")
        self.counts: Counter[str] = Counter()  # verdicts so far, by reason
        self.close = weakref.finalize(self, _close, self._threads, self._pool)

    def __call__(self, samples: Sequence[RewardSample]) -> list[float | None]:
        return [verdict.reward for verdict in self.verdicts(samples)]

    def verdicts(self, samples: Sequence[RewardSample]) -> list[Verdict]:
        """Each sample's verdict, in order; they are counted, and a line tells of each that is not a plain pass."""
        found = list(self._threads.map(self._verdict, samples))
        for sample, verdict in zip(samples, found, strict=True):
            self.counts[verdict.reason] += 1
            if verdict.reason != PASSED:
                print(f"code_sandbox: {sample.id}: {verdict.reason}", file=sys.stderr)
        return found

    def _verdict(self, sample: RewardSample) -> Verdict:
        try:
            cases = read_cases(sample.extra)
        except BadCases as error:
            return Verdict(None, f"{BAD_ROW}: {error}")
        program = program_of(sample.response)
        if program is None:
            return Verdict(0.0, NO_CODE)
        reasons = self._pool.run(program, cases, all_cases=self._partial)
        passed = reasons.count(PASSED)
        worst = next((reason for reason in reasons if reason not in (PASSED, NOT_RUN)), PASSED)
        share = passed / len(cases)
        return Verdict(share if self._partial else float(share == 1), worst, tuple(reasons))


def _close(threads: ThreadPoolExecutor, pool: Pool) -> None:
    threads.shutdown()
    pool.close()
