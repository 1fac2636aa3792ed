"""Starts the real launcher in a separate process, and reads the files of a run.

The imports of a launcher and its processes take longer than a short run. If a test uses `forks`, all of them are forks
of one preloaded server, like the processes of a run. Otherwise, and if a run will be killed, a launcher is started as
by a user.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from roll_opd.cluster.forkserver import forkserver_worker
from roll_opd.cluster.forkserver.forkserver_main import EAGER_ENGINES, ENGINES, MEGATRON
from roll_opd.cluster.forkserver.forkserver_start import ForkServer, fork_server
from roll_opd.tracking.run_directory import read_jsonl

REPOSITORY = Path(__file__).resolve().parents[2]
PURE, RLVR = "start_onpolicy_distill_pipeline.py", "start_rlvr_pipeline.py"
AGENTIC = "start_agentic_pipeline.py"
SECONDS = 400
MARK = "ROLL_OPD_TEST_RUN"  # in the environment of everything a run starts
FORKS = f"forks of {os.getpid()}"  # the mark of the warm server of this process, and so of its forks
FORKED_AT = ""  # its address, while it is there
SERVERS: list[int] = []  # its processes' ids

# of pure distillation: fewer processes to start than the demo's own spread has, and a teacher that is tensor-parallel
SPREAD = (
    "student_train.device_mapping=[0]",
    "student_infer.device_mapping=[1]",
    "teacher.strategy_args.strategy_config.tensor_model_parallel_size=2",
)
# The demo in small: 16 prompts x 4 samples a step, nothing measured that a test does not ask for
SMALL = (
    "deterministic=true",
    "rollout_batch_size=16",
    *SPREAD,
    "student_train.training_args.gradient_accumulation_steps=1",
    "validation.data_args.file_name=examples/demo/data/val.jsonl",
    "validation.evaluate_teacher=false",
    "eval_steps=0",
)


@dataclass
class Run:
    """A launch: its exit code (negative: the signal that ended it), its output, its newest run directory."""

    code: int
    output: str
    path: Path
    seconds: float = 0.0  # that the launch took

    def rows(self, name: str) -> list[dict]:
        return read_jsonl(self.path / name)

    @property
    def draws(self) -> list[dict]:
        return draws_of(self.path)


def draws_of(run: Path) -> list[dict]:
    """Return the ledger without the id of the run and the checksums that cover it: the part that two runs share."""
    rows = read_jsonl(run / "ledger.jsonl")
    assert all(row["run"] == run.resolve().name for row in rows[:1])
    return [{key: value for key, value in row.items() if key not in ("run", "checksum")} for row in rows]


@contextmanager
def forks() -> Iterator[None]:
    """Start the launchers in the block as forks of one preloaded server."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        with mock.patch.dict(os.environ, {MARK: FORKS}):
            server = stack.enter_context(fork_server())
            server.import_for({"engines": EAGER_ENGINES, "variables": {MEGATRON: {}, ENGINES: {}}})
            patch.setattr(sys.modules[__name__], "SERVERS", _processes_of_the_server())
            patch.setattr(sys.modules[__name__], "FORKED_AT", os.environ[forkserver_worker.ADDRESS])
        yield


def _processes_of_the_server() -> list[int]:
    """Return the server and its fork that imports Megatron, when the fork exists and before a process is requested."""
    deadline = time.monotonic() + SECONDS
    while not (servers := [child for child in psutil.Process().children() if _belongs(child, FORKS)]):
        assert time.monotonic() < deadline, "the warm server has not started"
        time.sleep(0.05)  # until its `exec`, a process shows the variables of this one
    [server] = servers
    while not (forked := server.children()):
        assert time.monotonic() < deadline, "the warm server has no second process"
        time.sleep(0.05)
    return [server.pid, *(process.pid for process in forked)]


def launch(
    output_dir: Path,
    *overrides: str,
    launcher: str = PURE,
    config: tuple[str, str] = ("demo", "onpolicy_distill"),
    kill_when: Callable[[], bool] | None = None,
    columns: int = 1000,
    seconds: float = SECONDS,
) -> Run:
    """Run the launcher to its end, or until `kill_when` returns true and it is ended by SIGKILL.

    It may take `seconds`. Afterwards no process and no file in its TMPDIR may remain. Its output is `columns` wide.
    """
    mark = f"{output_dir}-{time.monotonic_ns()}"
    log = output_dir.parent / f"{output_dir.name}-{time.monotonic_ns()}.log"
    arguments = ["--config_path", config[0], "--config_name", config[1], f"output_dir={output_dir}", *overrides]
    words = [str(REPOSITORY / "examples" / launcher), *arguments]
    start = _forked if FORKED_AT and not kill_when else _started
    began = time.monotonic()
    temporaries = Path(tempfile.mkdtemp(prefix="run-", dir="/tmp"))  # short, for sockets
    with mock.patch.dict(os.environ, {MARK: mark, "COLUMNS": str(columns), "TMPDIR": str(temporaries)}):
        pid, ended = start(words, log)
    deadline = time.monotonic() + seconds
    while (code := ended()) is None:
        if kill_when and kill_when():
            os.kill(pid, signal.SIGKILL)
            kill_when = None
        elif time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"no end after {seconds:g} s:\n{log.read_text()[-4000:]}")
        time.sleep(0.01)
    took = time.monotonic() - began
    wait_until_gone(mark)
    assert [str(path) for path in temporaries.rglob("*")] == []
    temporaries.rmdir()
    return Run(code, log.read_text(), newest_run(output_dir / config[0]), took)


def newest_run(experiment: Path) -> Path:
    """Return the newest run directory of an experiment, also of a run without a step, which is not `latest`."""
    latest = experiment / "latest"
    runs = [path for path in experiment.glob("20*") if path.is_dir()]
    newest = max(runs, key=lambda path: path.name, default=latest)
    return latest if latest.exists() and latest.resolve() == newest.resolve() else newest


def _started(words: Sequence[str], log: Path) -> tuple[int, Callable[[], int | None]]:
    """Start a Python program like a user; return its process id and a function that returns its exit code."""
    with log.open("w") as sink:
        process = subprocess.Popen([sys.executable, *words], cwd=REPOSITORY, stdout=sink, stderr=subprocess.STDOUT)
    return process.pid, process.poll


def _forked(words: Sequence[str], log: Path) -> tuple[int, Callable[[], int | None]]:
    """Start it as a fork of the preloaded server."""
    process = forkserver_worker.ForkedProcess(target=_run_program, args=(list(words), log))
    with pytest.MonkeyPatch.context() as patch:  # only this process is to be a fork
        for module, names in (
            (forkserver_worker._SERVER, ("_forkserver_address", "_forkserver_alive_fd", "ensure_running")),
            (forkserver_worker._TRACKER, ("_fd",)),
        ):
            for name in names:
                patch.setattr(module, name, getattr(module, name))
        patch.setenv(forkserver_worker.ADDRESS, FORKED_AT)
        patch.setenv(forkserver_worker.KIND, MEGATRON)
        forkserver_worker.connect(forkserver_worker.address_of(FORKED_AT, MEGATRON))
        process.start()
    assert process.pid
    return process.pid, lambda: process.exitcode


def _run_program(words: list[str], log: Path) -> None:
    """Run a launcher in a fork; its processes are forks of the same server."""
    from roll_opd.commands import run as launch

    with log.open("w") as sink:
        for output in (1, 2):
            os.dup2(sink.fileno(), output)
    os.chdir(REPOSITORY)
    already: Any = lambda: nullcontext(ForkServer())  # noqa: E731
    launch.fork_server = already
    forkserver_worker._run_program(words)


def of_run(out: Path, name: str) -> list[psutil.Process]:
    """Return the processes of a run with a title that begins with `name`."""
    found = []
    for process in psutil.process_iter():
        try:
            title = " ".join(process.cmdline())
            if title.startswith(name) and process.environ().get(MARK, "").startswith(str(out)):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until_gone(mark: str, seconds: float = 10.0) -> None:
    """Fail if a process of the run with `mark` is alive after `seconds`."""
    deadline = time.monotonic() + seconds
    while left := [process.name() for process in psutil.process_iter() if _belongs(process, mark)]:
        assert time.monotonic() < deadline, f"left running: {left}"
        time.sleep(0.1)


def _belongs(process: psutil.Process, mark: str) -> bool:
    try:
        found = process.environ().get(MARK)
        return found == mark or (found == FORKS and process.pid not in SERVERS)
    except (psutil.Error, OSError):
        return False
