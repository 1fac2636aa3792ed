"""Keep the output of `pytest -n 2 -v` in its log and show what matters of it: a whole log hides the one line.

Shown are each tenth of the session, what failed and why, what was skipped, and how it ended.
"""

import re
import sys
from pathlib import Path

PROGRESS = re.compile(r"^\[gw\d+\] \[ *(\d+)%\]")
BAD = re.compile(r"^\[gw\d+\] \[ *\d+%\] (FAILED|ERROR)")
TOLD = re.compile(r"^(E  |FAILED|ERROR|SKIPPED|INTERNALERROR)")
ENDED = re.compile(r"=+ .*(passed|failed|error|no tests ran)")
WIDTH = 400
MOST = 100  # lines of what failed: one lost fixture fails a whole session's tests


def main(log: Path) -> None:
    """Copy standard input into the file `log` and the lines that matter, with its name, to standard output."""
    shown, told = -1, 0
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        for line in map(str.rstrip, sys.stdin):
            print(line, file=file, flush=True)
            progress = PROGRESS.search(line)
            if progress and int(progress[1]) // 10 > shown:
                shown = int(progress[1]) // 10
                print(f"{log.stem}: {shown * 10} %", flush=True)
            if ENDED.match(line) or (told < MOST and (BAD if progress else TOLD).search(line)):
                told += 1
                print(f"{log.stem}: {line.strip('= ')[:WIDTH]}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
