"""Programs per second of the code sandbox, each with its test cases, and the number of wrong verdicts.

python benchmarks/sandbox_speed.py [--programs 1000] [--cases 5] [--workers N] [--at-least 20] [--json OUT]
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

from roll_opd.base.frozen import FrozenDict
from roll_opd.extras.graders.rewards.code_sandbox import CodeSandbox
from roll_opd.rewards.interface import RewardSample, Score

# pairs of programs that read a number; the second program is wrong for some numbers below 5
PROGRAMS = (
    ("print(int(input()) ** 2)", "n = int(input())\nprint(n * 2)", lambda n: n * n),
    ("import math\nprint(math.factorial(int(input())))", "print(1 + int(input()))", lambda n: (1, 1, 2, 6, 24)[n]),
    (
        "from collections import Counter\nn = int(input())\nprint(sum(Counter(range(n)).values()))",
        "print(len(range(1, int(input()))))",
        lambda n: n,
    ),
)


def sample(number: int, cases: int) -> tuple[RewardSample, float]:
    """Return a sample; every third program is wrong, and every second program is tested by assertions."""
    right, wrong, answer = PROGRAMS[number % len(PROGRAMS)]
    is_right = number // len(PROGRAMS) % 3 != 2
    program = right if is_right else wrong
    if number % 2:
        body = program.replace("int(input())", "n").replace("n = n\n", "").replace("print(", "return (")
        program = "def f(n):\n" + "\n".join("    " + line for line in body.split("\n"))
        rows = [{"assert_code": f"assert f({n % 5}) == {answer(n % 5)}"} for n in range(cases)]
    else:
        rows = [{"stdin": f"{n % 5}\n", "expected_stdout": f"{answer(n % 5)}\n"} for n in range(cases)]
    response = f"```python\n{program}\n```"
    return RewardSample(str(number), response, None, "code", FrozenDict({"test_cases": rows})), float(is_right)


def measure(programs: int, cases: int, workers: int | None) -> tuple[float, int]:
    """Return programs per second, and the number of wrong verdicts."""
    samples, rewards = zip(*(sample(number, cases) for number in range(programs)), strict=True)
    reward = CodeSandbox(workers=workers)
    started = time.monotonic()
    found = [score.value if isinstance(score, Score) else None for score in reward.score(samples)]
    seconds = time.monotonic() - started
    reward.close()
    return programs / seconds, sum(one != other for one, other in zip(found, rewards, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; return 1 if a verdict was wrong or the rate is below `--at-least`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1000, metavar="N")
    parser.add_argument("--cases", type=int, default=5, metavar="N")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="programs that run at the same time (default: number of CPUs)"
    )
    parser.add_argument(
        "--at-least", type=float, default=0.0, metavar="SPEED", help="exit with 1 if fewer programs per second ran"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    speed, wrong = measure(options.programs, options.cases, options.workers)
    print(f"{speed:.1f} programs/s with {options.cases} cases each, {wrong} of {options.programs} verdicts wrong")
    if options.json:
        machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        settings = {"programs": options.programs, "cases": options.cases, "workers": options.workers}
        result = {"programs_per_second": speed, "wrong_verdicts": wrong, "settings": settings, "machine": machine}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(wrong > 0 or speed < options.at_least)


if __name__ == "__main__":
    raise SystemExit(main())
