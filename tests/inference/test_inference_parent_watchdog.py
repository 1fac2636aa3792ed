"""SIGKILL of a process ends its children; for complete runs see tests/pipelines/test_rewarded_runs.py."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

HERE = str(Path(__file__).parent)


def wait_until_gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        alive = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if not alive:
            return []
        time.sleep(0.1)
    return alive


def run_until_ready(program: str, *arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": HERE}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )
    for line in process.stdout:
        if line.strip() == "ready":
            return process
    raise AssertionError(f"the process ended with {process.wait()} before it was ready")


def kill_and_see_who_is_left(process: subprocess.Popen) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    assert children, "no child process: nothing is being tested"
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = wait_until_gone(children, seconds=15)
    for child in left:
        child.kill()
    return left


@pytest.mark.parametrize("kind", ["multiprocessing", "other"])
def test_a_child_follows_its_parent(kind: str) -> None:
    program = """
import multiprocessing, sys, time
from roll_opd.inference.failed_start import die_with_parent

def child(ready):
    if sys.argv[1] == "other":
        multiprocessing.parent_process = lambda: None
    die_with_parent()
    ready.set()
    time.sleep(600)

context = multiprocessing.get_context("fork")
ready = context.Event()
context.Process(target=child, args=(ready,)).start()
ready.wait()
print("ready", flush=True)
time.sleep(600)
"""
    assert kill_and_see_who_is_left(run_until_ready(program, kind)) == []
