"""Measure the lines of the package that a process executes from its start, also if it is killed.

MEASURED_LINES names a JSON file with `package`, a directory, and `data`, the beginning of the names of data files. A
process saves its lines every few seconds, because Ray and the reaper end most processes by SIGKILL. Forks start a new
measurement.
"""

import contextlib
import json
import os
import threading
import time

LONGEST_WAIT = 6.0  # seconds between two savings
saving = threading.Lock()  # held across a fork, so that no fork begins with half a saving
current = None


def begin(package: str, data: str) -> None:
    """Start to measure this process, in a separate data file."""
    global current
    import coverage

    if current is not None:  # of the process that this one is a fork of
        current._auto_save = False
        current.stop()
    current = coverage.Coverage(
        data_file=data, data_suffix=True, include=[f"{package}/*"], config_file=False, messages=False
    )
    current._warn_no_data = False
    current._auto_save = True  # at the end, too
    current.start()
    threading.Thread(target=save_often, args=(current,), daemon=True).start()


def save() -> None:
    """Write the lines so far; a failure, as of a full disk, is no matter of the process."""
    with saving, contextlib.suppress(Exception):
        current.save()


def save_often(measure: object) -> None:
    """Save repeatedly until the measurement of another process replaces `measure`."""
    wait = 2.0
    while current is measure:
        time.sleep(wait)
        wait = min(wait + 1.0, LONGEST_WAIT)
        save()


def begin_in_fork(settings: dict[str, str]) -> None:
    global saving
    saving = threading.Lock()
    begin(**settings)


def exit_saved(code: int) -> None:
    """Save and end the process like `os._exit`."""
    save()
    exit_at_once(code)


exit_at_once = os._exit
if "MEASURED_LINES" in os.environ:
    with open(os.environ["MEASURED_LINES"], encoding="utf-8") as file:
        settings = json.load(file)
    begin(**settings)
    os._exit = exit_saved
    os.register_at_fork(
        before=lambda: saving.acquire(),
        after_in_parent=lambda: saving.release(),
        after_in_child=lambda: begin_in_fork(settings),
    )
