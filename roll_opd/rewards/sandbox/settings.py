"""What a program in the sandbox may use, and the errors of the room."""

from dataclasses import dataclass, fields

from roll_opd.rewards.interface import RewardError

MEBI = 1 << 20


class SandboxError(RewardError):
    """No sandbox can be had on this machine, or one broke down; the message says what to do."""


@dataclass(frozen=True)
class Limits:
    """Of one test case. All are enforced inside; `wall_seconds` is watched from outside as well."""

    cpu_seconds: int = 5  # of all processes together
    wall_seconds: float = 10.0  # waiting for a CPU does not count
    memory_mb: int = 512  # address space of a process, and resident memory of all together
    processes: int = 16  # processes and threads at once
    open_files: int = 64
    disk_mb: int = 32  # the work directory, which is memory, and shared memory
    files: int = 4096  # files and directories in either
    output_mb: int = 4  # standard output

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            kinds = (int, float) if item.name == "wall_seconds" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 1_000_000:
                what = "a number" if len(kinds) == 2 else "a whole number"
                raise RewardError(f"code_sandbox: {item.name} is {value!r}; it must be {what} above 0 and below 10^6")
