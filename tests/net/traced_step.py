"""Count the files of the package that a steady step of the demo's pure distillation executes, process by process.

    python tests/net/traced_step.py [FILE]

prints the list and writes it to FILE; `traced_step.json` is the list of the last review. The demo runs as a user starts
it. A flag is set for all its processes between two steps and cleared two steps later, so the list covers at least one
complete step, without start and end. A file counts if one of its functions is called.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TRACER = Path(__file__).with_name("traced")
COMMITTED = Path(__file__).with_name("traced_step.json")
DEMO = ("run", "examples/demo/onpolicy_distill.yaml", "max_steps=7", "save_steps=100", "eval_steps=0")
SMALL = ("rollout_batch_size=32", "student_train.training_args.gradient_accumulation_steps=1")
FIRST, LAST = 3, 5  # the flag is up between the ends of these two steps
SECONDS = 900.0


def traced() -> dict[str, list[str]]:
    """Return the executed files by process, those of processes of one name together."""
    with tempfile.TemporaryDirectory(prefix="traced_step-") as scratch:
        root = Path(scratch)
        (root / "flag").write_bytes(b"\0")
        # from a directory without a `roll_opd`, so that the one of this interpreter is found
        words = [sys.executable, "-m", "roll_opd", *DEMO, *SMALL, f"output_dir={root}/output"]
        path = os.pathsep.join(filter(None, [str(TRACER), os.environ.get("PYTHONPATH")]))
        untraced = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
        environment = {**untraced, "PYTHONPATH": path, "TRACED_STEP": str(root)}  # coverage would replace the tracer
        with (root / "log").open("w") as log:
            run = subprocess.Popen(words, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            names = _watch(run, root)
        finally:
            if run.poll() is None:
                run.terminate()
                run.wait(120)
        found: dict[str, set[str]] = defaultdict(set)
        for file in root.glob("*.files"):
            found[names.get(int(file.stem), "other")] |= set(file.read_text().split())
        return {name: sorted(files) for name, files in sorted(found.items())}


def _watch(run: subprocess.Popen[bytes], root: Path) -> dict[int, str]:
    """Raise the flag after step FIRST and lower it after LAST; return the names of the processes by their ids."""
    deadline = time.monotonic() + SECONDS
    names: dict[int, str] = {}
    flag = (root / "flag").open("r+b", buffering=0)
    for step in (FIRST, LAST):
        while _steps(root) < step:
            if run.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the run has made no step {step}:\n{(root / 'log').read_text()[-3000:]}")
            time.sleep(0.002)
        os.pwrite(flag.fileno(), b"\1" if step == FIRST else b"\0", 0)
        if step == LAST:
            names = {int(file.stem): _name(int(file.stem), run.pid) for file in root.glob("*.files")}
    return names


def _steps(root: Path) -> int:
    for file in root.glob("output/*/*/metrics.jsonl"):
        with suppress(ValueError, IndexError, KeyError):
            return int(json.loads(file.read_text().splitlines()[-1])["step"])
    return 0


def _name(process: int, driver: int) -> str:
    """Return the name of a process: the driver, the class of a Ray actor, or the module of a program."""
    if process == driver:
        return "driver"
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "other"
    found = re.search(r"ray::(\w+)|-m roll_opd\.(\S+)", words)
    return (found[1] or found[2]) if found else "engine core"  # a fork, with the words of what it was forked from


def all_files(by_process: dict[str, list[str]]) -> list[str]:
    """Return the distinct files."""
    return sorted({file for files in by_process.values() for file in files})


def _lines(by_process: dict[str, list[str]]) -> Iterator[str]:
    for name, files in by_process.items():
        yield f"{name}: {len(files)} files"
        yield from (f"  {file}" for file in files)
    yield f"{len(all_files(by_process))} distinct files"


def main(arguments: Sequence[str]) -> None:
    """Trace a step, print its files, and write them where asked to."""
    found = traced()
    print("\n".join(_lines(found)))
    for file in arguments:
        Path(file).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
