"""Runs whose raylet is killed, and teacher servers that are killed: a program, not a test.

    python tests/pipelines/raylet_kills.py PLACE [MOMENT...]

Each moment prints a line as JSON: the seconds from SIGKILL to the end of the command, its exit code, its last message,
and the processes that remain.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from runs import MARK, REPOSITORY, SMALL

from roll_opd.commands import run as launch
from roll_opd.pipelines import start_roles
from roll_opd.tracking.phase_clock import PhaseClock

# moment -> the phase of the driver's clock that begins shortly before SIGKILL, and how often it has begun before
PHASES = {"sampling": ("generate", 2), "scoring": ("teacher", 2), "update": ("train", 1), "sync": ("weight_sync", 2)}
PHASES["validation"] = ("validate", 1)
START, CONNECTING = "start of the roles", "start of Ray"
SERVER, ENDED = "teacher server, SIGKILL", "teacher server, SIGTERM"
MOMENTS = (CONNECTING, START, *PHASES, SERVER, ENDED)
SETTINGS = (*SMALL, "max_steps=50", "save_steps=0", "eval_steps=2")
DELAY, LIMIT, SETTLE = 0.03, 120.0, 10.0  # seconds
KILLED_AT = "KILLED_AT"  # variable with the file to which the time of SIGKILL is written


def kill_raylet(delay: float = DELAY) -> None:
    """Kill the raylet of this process's run with SIGKILL after a delay."""

    def kill() -> None:
        time.sleep(delay)
        while not (found := [p for p in psutil.Process().children(recursive=True) if p.name() == "raylet"]):
            time.sleep(0.01)
        for process in found:
            process.send_signal(signal.SIGKILL)
        Path(os.environ[KILLED_AT]).write_text(repr(time.time()))

    threading.Thread(target=kill, daemon=True).start()


def run(moment: str, arguments: list[str]) -> int:
    """Run the pipeline in this process, and kill its raylet at a moment."""
    if moment == CONNECTING:
        kill_raylet()
    elif moment == START:
        original: Any = start_roles.start_workers

        def start_workers(*given: Any) -> Any:
            kill_raylet(1.0)
            return original(*given)

        start_roles.start_workers = start_workers
    else:
        name, before = PHASES[moment]
        phase, begun = PhaseClock.phase, [0]

        @contextmanager
        def counted(clock: PhaseClock, entered: str) -> Iterator[None]:
            with phase(clock, entered):
                if entered == name:
                    begun[0] += 1
                    if begun[0] == before + 1:
                        kill_raylet()
                yield

        patched: Any = PhaseClock
        patched.phase = counted
    return launch.main("a run whose raylet is killed", pure=True, arguments=arguments)


def of_mark(mark: str) -> list[str]:
    """Return the titles of the processes that were started with a mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:100])
        except psutil.Error:
            continue
    return found


def remaining(mark: str) -> tuple[float, list[str]]:
    """Return (seconds, processes): the time until no process of a mark is there, at most `SETTLE`, and those left."""
    began = time.monotonic()
    while (left := of_mark(mark)) and time.monotonic() - began < SETTLE:
        time.sleep(0.1)
    return round(time.monotonic() - began, 1), left


def killed_run(moment: str, place: Path) -> dict[str, Any]:
    """Start a run in another process and return how it ended."""
    mark, log, at = f"{place}-{time.monotonic_ns()}", place / "log", place / "at"
    words = ["--config_path", "demo", "--config_name", "onpolicy_distill", f"output_dir={place}", *SETTINGS]
    environment = {**os.environ, MARK: mark, KILLED_AT: str(at)}
    with log.open("w") as sink:
        command = [sys.executable, __file__, "--run", moment, *words]
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=sink, stderr=sink)
        try:
            code: int | None = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
    ended = time.time()
    seconds, left = remaining(mark)
    said = re.findall(r"^roll-opd: .*(?:\n  .*)*", log.read_text(), re.MULTILINE)
    return {
        "exit": code,
        "seconds": round(ended - float(at.read_text()), 1) if at.exists() else None,
        "message": " ".join(said[-1].split()) if said else "",
        "seconds until no process": seconds,
        "left": left,
    }


def ended_server(number: signal.Signals, place: Path) -> dict[str, Any]:
    """Serve a teacher, send a signal to the command, and return how it ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mark, log = f"{place}-{time.monotonic_ns()}", place / "log"
    words = ["serve", "examples/demo/models/teacher", "--dtype", "fp32", "--port", str(port), "--max-model-len", "129"]
    with log.open("w") as sink:
        command = [sys.executable, "-m", "roll_opd", *words]
        environment = {**os.environ, MARK: mark}
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=sink, stderr=sink)
    began = time.monotonic()
    while process.poll() is None and time.monotonic() - began < LIMIT:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).read()
            break
        except OSError:
            time.sleep(0.5)
    served, before = process.poll() is None, len(of_mark(mark))
    began = time.monotonic()
    process.send_signal(number)
    code = process.wait(LIMIT)
    took = round(time.monotonic() - began, 1)
    seconds, left = remaining(mark)
    lines = log.read_text().splitlines()
    return {
        "served": served,
        "processes": before,
        "exit": code,
        "seconds": took,
        "message": " ".join(lines[-2:])[-300:],
        "traceback": any("Traceback" in line for line in lines),
        "seconds until no process": seconds,
        "left": left,
    }


def main() -> int:
    if sys.argv[1] == "--run":
        return run(sys.argv[2], sys.argv[3:])
    place, *moments = sys.argv[1:]
    for moment in moments or MOMENTS:
        own = Path(place) / re.sub(r"\W+", "_", moment)
        own.mkdir(parents=True, exist_ok=True)
        signals = {SERVER: signal.SIGKILL, ENDED: signal.SIGTERM}
        found = ended_server(signals[moment], own) if moment in signals else killed_run(moment, own)
        print(json.dumps({"moment": moment, **found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
