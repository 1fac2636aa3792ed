"""Measure which lines of the package a process executes, from its start, and keep them also where it is killed.

MEASURED_LINES names a JSON file with `package`, a directory, and `data`, the beginning of the names of data files. A
process saves its lines every few seconds, since Ray and the reaper end most of them by SIGKILL. Forks begin anew.
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
    """Measure this process from now on, in a data file of its own."""
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
    """Save until another process's measure has taken the place of `measure`."""
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
    """End the process as `os._exit` does, after a saving."""
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
