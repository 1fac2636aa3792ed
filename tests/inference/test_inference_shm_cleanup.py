"""Shared memory of a killed process is unlinked before its parent is killed."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, signal, sys
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory

from roll_opd.inference.failed_start import unlink_shared_memory

def child(sent):
    memory = SharedMemory(create=True, size=1 << 20)
    sent.send(memory.name)
    signal.pause()

if __name__ == "__main__":
    received, sent = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=child, args=(sent,))
    process.start()
    name = received.recv()
    process.kill()
    process.join()
    print(name, os.path.exists("/dev/shm/" + name), flush=True)
    if sys.argv[1] == "unlinks":
        unlink_shared_memory()
        unlink_shared_memory()  # nothing is left to do
    os.killpg(0, signal.SIGKILL)
"""


def test_shared_memory_is_unlinked_although_the_tracker_is_killed_with_the_group(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    for word, stays in (("unlinks", False), ("leaves", True)):
        command = [sys.executable, str(program), word]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, start_new_session=True)
        name, was_there = done.stdout.split()
        left = Path("/dev/shm") / name
        assert was_there == "True" and left.exists() == stays
        left.unlink(missing_ok=True)
