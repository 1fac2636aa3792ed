"""Functions for the tests of the code sandbox."""

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from roll_opd.base.frozen import FrozenDict
from roll_opd.extras.graders.rewards.code_sandbox import CodeSandbox
from roll_opd.rewards.interface import RewardSample

REPOSITORY = str(Path(__file__).resolve().parents[3])


LIMITS = {"cpu_seconds": 1, "wall_seconds": 5.0, "memory_mb": 256, "processes": 8, "disk_mb": 4, "output_mb": 1}


SQUARE = "def f(x):\n    return x * x\nif __name__ == '__main__':\n    print(f(int(input())))"


WRONG = SQUARE.replace("x * x", "x + x")  # right for 0 and 2


IO = [{"stdin": str(i), "expected_stdout": f"{i * i}\n"} for i in range(4)]


ASSERTS = [{"assert_code": f"assert f({i}) == {i * i}"} for i in range(4)]


TESTS = [{"assert_code": "def test_one():\n    assert f(2) == 4\ndef test_two():\n    assert f(3) > 8 and 16 == f(4)"}]


def bwrap_works() -> bool:
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    return shutil.which("bwrap") is not None and subprocess.run(command, capture_output=True).returncode == 0


WITHOUT_BWRAP = pytest.mark.skipif(
    not bwrap_works(), reason="bubblewrap is not installed, or may not make namespaces here"
)


def needs_bwrap(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that starts sandboxes."""
    return pytest.mark.slow(WITHOUT_BWRAP(test))


def sample(name: str, program: str, **row: object) -> RewardSample:
    return RewardSample(name, f"So:\n```python\n{program}\n```\nThat is it.", None, "code", FrozenDict(row))


def values(reward: CodeSandbox, *samples: RewardSample) -> list[float | None]:
    return [score.value for score in reward.score(samples)]


def processes_of(pid: int) -> set[int]:
    """Return all descendants of process `pid`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def wait_until(holds, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()
