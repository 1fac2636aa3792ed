"""`Limits` of sandboxed programs, and `SandboxError`."""

from dataclasses import dataclass, fields

from roll_opd.rewards.interface import RewardError

MEBI = 1 << 20


class SandboxError(RewardError):
    """A sandbox cannot be started or broke down; the message says what to do."""


@dataclass(frozen=True)
class Limits:
    """Limits of one test case, enforced inside; `wall_seconds` also from outside."""

    cpu_seconds: int = 5  # of all processes together
    wall_seconds: float = 10.0  # waiting for a CPU does not count
    memory_mb: int = 512  # address space per process, and resident memory of all together
    processes: int = 16  # concurrent processes and threads
    open_files: int = 64
    disk_mb: int = 32  # the work directory, which is memory, and shared memory
    files: int = 4096  # files and directories in either
    output_mb: int = 4  # standard output

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            kinds = (int, float) if item.name == "wall_seconds" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 1_000_000:
                what = "a number" if len(kinds) == 2 else "an integer"
                raise RewardError(f"code_sandbox: {item.name} is {value!r}; it must be {what} above 0 and below 10^6")
