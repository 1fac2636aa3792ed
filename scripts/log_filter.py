"""Write the output of `pytest -n 2 -v` to a log file and print its important lines.

It prints the progress in steps of 10 %, failures with reasons, skips, and the summary.
"""

import re
import sys
from pathlib import Path

PROGRESS = re.compile(r"^\[gw\d+\] \[ *(\d+)%\]")
BAD = re.compile(r"^\[gw\d+\] \[ *\d+%\] (FAILED|ERROR)")
REPORTED = re.compile(r"^(E  |FAILED|ERROR|SKIPPED|INTERNALERROR)")
ENDED = re.compile(r"=+ .*(passed|failed|error|no tests ran)")
WIDTH = 400
MOST = 100  # maximum number of lines about failures, as a broken fixture fails all tests of a session


def main(log: Path) -> None:
    """Copy standard input to the file `log`, and important lines, with the log's name, to standard output."""
    shown, reported = -1, 0
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        for line in map(str.rstrip, sys.stdin):
            print(line, file=file, flush=True)
            progress = PROGRESS.search(line)
            if progress and int(progress[1]) // 10 > shown:
                shown = int(progress[1]) // 10
                print(f"{log.stem}: {shown * 10} %", flush=True)
            if ENDED.match(line) or (reported < MOST and (BAD if progress else REPORTED).search(line)):
                reported += 1
                print(f"{log.stem}: {line.strip('= ')[:WIDTH]}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
