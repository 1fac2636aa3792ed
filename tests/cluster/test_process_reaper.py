"""After a driver is killed, none of its processes and no session directory remains."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from roll_opd.cluster.process_reaper import guarded

# a child that shares memory as the ranks of an engine do
CHILD = """
import mmap, os, time
open("/proc/self/comm", "w").write("VLLM::Worker_TP0")
file = open(f"/dev/shm/vllm_dist_{os.getpid()}", "w+b")
file.truncate(4096)
shared = mmap.mmap(file.fileno(), 4096)
time.sleep(60)
"""
DRIVER = """
import subprocess, sys, time
from pathlib import Path
from roll_opd.cluster.process_reaper import POLL_INTERVAL_S, guarded
with guarded() as reaper:
    reaper.remove_at_the_end(Path(sys.argv[1]))
    reaper.copy_at_the_end(Path(sys.argv[1]) / "logs", Path(sys.argv[1]).parent / "kept 1" / "ray")
    reaper.copy_at_the_end(Path(sys.argv[1]) / "absent", Path(sys.argv[1]).parent / "kept 2")
    beside = Path(sys.argv[1]).parent / "a [b]"
    reaper.remove_at_the_end(beside, f"session_*_{sys.argv[4]}")
    reaper.remove_at_the_end(beside, "session_*")
    reaper.cancel_removal(beside, "session_*")
    child = subprocess.Popen([sys.executable, "-c", sys.argv[3]], start_new_session=True)
    time.sleep(2 * POLL_INTERVAL_S + 0.5)
    print(child.pid, flush=True)
    if sys.argv[2] == "wait":
        time.sleep(60)
    child.kill()
"""


@pytest.mark.parametrize("how", ["wait", "go"])
def test_the_reaper_leaves_no_process_and_no_file(how: str, tmp_path: Path) -> None:
    session, latest = tmp_path / "session_1", tmp_path / "session_latest"
    (session / "logs" / "old").mkdir(parents=True)
    (session / "logs" / "old" / "raylet.out").write_text("a line\n")
    (session / "logs" / "link").symlink_to("nowhere")
    matches, others = (tmp_path / "a [b]" / f"session_date_{pid}" for pid in (7, 77))
    for place in (matches, others):
        place.mkdir(parents=True)
    latest.symlink_to(session)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(session), how, CHILD, "7"], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    child = int(driver.stdout.readline())
    if how == "wait":
        driver.kill()
    driver.wait()
    deadline = time.monotonic() + 20
    shared = Path(f"/dev/shm/vllm_dist_{child}")
    while session.exists() or matches.exists() or psutil.pid_exists(child) or latest.is_symlink() or shared.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert others.exists()
    assert (tmp_path / "kept 1/ray/old/raylet.out").read_text() == "a line\n"


WRITER = """
import os, sys, time
while True:
    os.makedirs(sys.argv[1], exist_ok=True)
    open(os.path.join(sys.argv[1], "log"), "a").close()
"""


def test_a_process_started_just_before_the_end_of_the_block_is_ended(tmp_path: Path) -> None:
    """Ray's processes are an example: after Ctrl-C during the start, they wrote into the removed session directory."""
    session = tmp_path / "session_1"
    with guarded() as reaper:
        reaper.remove_at_the_end(session)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(session)])
        while not session.exists():
            time.sleep(0.01)
    assert writer.wait(timeout=5) == -signal.SIGKILL
    assert not session.exists()


DRIVER_OF_PROGRAM = """
import sys
from roll_opd.cluster.process_reaper import run_guarded
sys.exit(run_guarded([sys.executable, "-c", sys.argv[1]], {}) % 256)
"""
# a server with a process of its own, which outlives it; the process appears at once, and its parent ends
SERVER = """
import subprocess, sys, time
code = (
    "import subprocess as s, sys;"
    "print(s.Popen([sys.executable, '-c', 'import time; time.sleep(99)'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
)
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout, flush=True)
time.sleep(99)
"""


@pytest.mark.parametrize("killed", ["driver", "program", "driver by SIGTERM"])
def test_no_process_of_a_guarded_program_outlives_it(killed: str) -> None:
    """The driver is `roll-opd serve`, the program is vLLM's server, and its process is the engine core."""
    command = [sys.executable, "-c", DRIVER_OF_PROGRAM, SERVER]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert driver.stdout and driver.stderr
    engine = psutil.Process(int(driver.stdout.readline()))
    program = next(each for each in psutil.Process(driver.pid).children() if SERVER in each.cmdline())
    {
        "driver": driver.kill,
        "program": program.kill,
        "driver by SIGTERM": driver.terminate,
    }[killed]()
    code = driver.wait(20)
    assert not psutil.wait_procs([engine, program], timeout=10)[1]
    assert code == {"driver": -9, "program": 256 - 9, "driver by SIGTERM": 256 - 15}[killed]
    said = driver.stderr.read()
    assert said.startswith(f"roll-opd: process {driver.pid} was killed") if killed == "driver" else not said
