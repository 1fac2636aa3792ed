"""Run a command while its processes stop at random for 50 to 400 ms, as on a loaded machine.

    .venv/bin/python tests/stalls.py make tests-push

Tests that fail only so have a limit of time that is too short, or have found a race.
"""

import random
import signal
import subprocess
import sys
import time

import psutil

PAUSE_S = 0.3  # between two stops
STOPS_S = (0.05, 0.1, 0.2, 0.4)
OF_PYTHON = 0.7  # share of stops in Python's processes, which are the minority


def main(command: list[str]) -> int:
    """Run `command`; return its exit code."""
    running = subprocess.Popen(command)
    stops = 0
    while running.poll() is None:
        try:
            processes = psutil.Process(running.pid).children(recursive=True)
            own = [one for one in processes if one.name().startswith("python")]
            chosen = random.choice(own if own and random.random() < OF_PYTHON else processes)
            if chosen.status() != psutil.STATUS_STOPPED:  # a test may have stopped it
                chosen.send_signal(signal.SIGSTOP)
                time.sleep(random.choice(STOPS_S))
                chosen.send_signal(signal.SIGCONT)
                stops += 1
        except (psutil.Error, IndexError):  # it has ended, or none has started yet
            pass
        time.sleep(PAUSE_S)
    print(f"{stops} stops")
    return running.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
