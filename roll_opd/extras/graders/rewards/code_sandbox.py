"""`code_sandbox`: reward for a program that passes the test cases of its row in a sandbox.

The tests are in `test_cases` of the row (docs/rewards/code_sandbox.md). `sandbox.response` extracts the program from
the response. The sandbox is a security boundary, see `roll_opd.extras.graders.sandbox`.
"""

import os
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from roll_opd.extras.graders.sandbox.bubblewrap import CaseLimits, SandboxError, files_of_packages
from roll_opd.extras.graders.sandbox.cases import BadCases, called_by, needs_program, read_cases
from roll_opd.extras.graders.sandbox.comparison import TOLERANCE
from roll_opd.extras.graders.sandbox.pool import NO_CODE, NOT_RUN, PASSED, SandboxPool
from roll_opd.extras.graders.sandbox.response import program_of
from roll_opd.rewards.interface import Failure, RewardError, RewardSample, Score, flag, number
from roll_opd.rewards.reward_registry import register

UNSAFE = (
    "code_sandbox: UNSAFE: programs that a model wrote run with your rights, and can read, change and delete your files"
    " and use your network; remove `unsafe: true` unless the machine is disposable"
)
BAD_ROW = "unusable test cases"
MAX_DIGITS = 100_000  # maximum digits of an integer in a row's cases; parsing such an integer takes 0.1 s


@register("code_sandbox", keeps_time=True)
class CodeSandbox:
    """The score is 1.0 if a program passes all cases of its row, else 0.0.

    The score is None if the cases of a row are unusable. Raises `RewardError` if this machine has no sandbox.

    Args:
        partial: whether the score is the fraction of passed cases.
        tolerance: allowed difference of numbers with a fraction.
        unsafe: whether programs run without isolation.
        workers: number of programs that run concurrently, over all calls; None means the number of CPUs of this
            process.
        packages: installed packages that programs may import in addition to the standard library.

    The other arguments are fields of `CaseLimits`.
    """

    def __init__(
        self,
        partial: bool = False,
        tolerance: float = TOLERANCE,
        unsafe: bool = False,
        workers: int | None = None,
        packages: Sequence[str] = (),
        cpu_seconds: int = CaseLimits.cpu_seconds,
        wall_seconds: float = CaseLimits.wall_seconds,
        memory_mb: int = CaseLimits.memory_mb,
        processes: int = CaseLimits.processes,
        open_files: int = CaseLimits.open_files,
        disk_mb: int = CaseLimits.disk_mb,
        files: int = CaseLimits.files,
        output_mb: int = CaseLimits.output_mb,
    ) -> None:
        if workers is not None and (type(workers) is not int or workers < 1):
            raise RewardError(f"code_sandbox: workers is {workers!r}; it must be an integer above 0")
        if isinstance(packages, str) or not all(isinstance(package, str) for package in packages):
            raise RewardError(f"code_sandbox: packages is {packages!r}; write a list of names, such as [numpy]")
        limits = CaseLimits(cpu_seconds, wall_seconds, memory_mb, processes, open_files, disk_mb, files, output_mb)
        if flag("code_sandbox", "unsafe", unsafe):
            print(UNSAFE, file=sys.stderr, flush=True)
        self._tolerance = number("code_sandbox", "tolerance", tolerance, least=0.0)
        workers = workers or len(os.sched_getaffinity(0))
        if 0 < sys.get_int_max_str_digits() < MAX_DIGITS:
            sys.set_int_max_str_digits(MAX_DIGITS)
        self._partial = flag("code_sandbox", "partial", partial)
        self._reported = False
        self._pool = SandboxPool(limits, workers, unsafe, files_of_packages(packages))
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="code_sandbox")
        self.close = weakref.finalize(self, _close, self._threads, self._pool)

    def score(self, samples: Sequence[RewardSample]) -> list[Score | Failure]:
        """Return the score of each sample, in order.

        The reason of a score is the result of the first case that did not pass.
        """
        return list(self._threads.map(self._score, samples))

    def _score(self, sample: RewardSample) -> Score | Failure:
        try:
            cases = read_cases(sample.extra, sample.response)
        except BadCases as error:
            if not self._reported:  # only the first failure is logged; all are counted
                self._reported = True
                print(f"code_sandbox: {sample.id}: {BAD_ROW}: {error}", file=sys.stderr, flush=True)
            return Score(None, reason=BAD_ROW)
        program = program_of(sample.response, called_by(cases))
        if program is None and needs_program(cases):
            return Score(0.0, reason=NO_CODE)
        try:
            reasons = self._pool.run(program or "", cases, all_cases=self._partial, tolerance=self._tolerance)
        except SandboxError as error:
            return Failure("sandbox", str(error))
        worst = next((reason for reason in reasons if reason not in (PASSED, NOT_RUN)), PASSED)
        share = reasons.count(PASSED) / len(cases)
        if self._partial:
            return Score(share, {"all_passed": float(share == 1)}, worst)
        return Score(float(share == 1), reason=worst)


def _close(threads: ThreadPoolExecutor, pool: SandboxPool) -> None:
    threads.shutdown()
    pool.close()
