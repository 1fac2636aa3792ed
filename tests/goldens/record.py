"""Record the golden runs: weights, metrics and samples of two deterministic steps of every objective, bit for bit.

.venv/bin/python tests/goldens/record.py OUT [NAME ...] [--rev REV] [--jobs N]
.venv/bin/python tests/goldens/record.py --fixture

OUT gets NAME.json.gz of each run and machine.json. With --rev, the runs of another commit are recorded, in a separate
worktree with this environment. `compare.py` compares two such directories. With --fixture, OUT is the directory of the
repository in which `test_goldens.py` looks for the record of this class of machine.
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from machine import directory_name, fingerprint
from recording import read_run, write

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
SECONDS = 600  # that one run may take
MACHINE = "machine.json"
SUFFIX = ".json.gz"


def fixtures() -> Path:
    """Return the directory with the repository's records of this class of machine."""
    return HERE / "fixtures" / directory_name(fingerprint())


class RecordingError(Exception):
    """A run that failed, or a tree that cannot be recorded."""


def record(out: Path, names: list[str], tree: Path = REPOSITORY, jobs: int = 2) -> None:
    """Record the runs with `names`, or all runs, of the package in `tree`; RecordingError if one fails."""
    runs, common = _table(tree)
    if unknown := [name for name in names if name not in runs]:
        raise RecordingError(f"no golden run {', '.join(unknown)}; there are {', '.join(runs)}")
    _check_package(tree)
    chosen = {name: runs[name] for name in names or runs}
    out.mkdir(parents=True, exist_ok=True)
    (out / MACHINE).write_text(json.dumps(fingerprint(), indent=1) + "\n")
    with tempfile.TemporaryDirectory(prefix="goldens-") as place, ThreadPoolExecutor(jobs) as pool:
        if any("{inputs}" in text for run in chosen.values() for text in run.overrides):
            _run([sys.executable, str(HERE / "inputs.py"), f"{place}/inputs"], REPOSITORY, Path(place) / "inputs.log")

        def one(name: str) -> str:
            return _record_one(name, chosen[name], common, tree, Path(place), out / f"{name}{SUFFIX}")

        failures = [failure for failure in pool.map(one, chosen) if failure]
    if failures:
        raise RecordingError("\n".join(failures))


def _record_one(name: str, run: Any, common: tuple[str, ...], tree: Path, place: Path, out: Path) -> str:
    """Launch one run, write its record to `out` and print its digests; return the error or ""."""
    began, results = time.monotonic(), place / name
    out.unlink(missing_ok=True)
    overrides = [*common, *(text.replace("{inputs}", str(place / "inputs")) for text in run.overrides)]
    config = ["--config_path", run.config[0], "--config_name", run.config[1]]
    command = [sys.executable, f"examples/{run.launcher}", *config, f"output_dir={results}", *overrides]
    try:
        _run(command, tree, place / f"{name}.log")
    except RecordingError as error:
        print(f"{name}: failed", flush=True)
        return f"{name}: {error}"
    [latest] = results.glob("*/latest")
    found = read_run(latest.resolve(), [run.launcher, *config, *common, *run.overrides])
    write(found, out)
    digests = "  ".join(f"{part} {digest[:12]}" for part, digest in found["digests"].items())
    print(f"{name:12} {time.monotonic() - began:4.0f} s  {digests}", flush=True)
    return ""


def _run(command: list[str], tree: Path, log: Path) -> None:
    """Run `command` in `tree` with its package; RecordingError with the end of the output if it fails."""
    with log.open("w") as sink:
        process = subprocess.Popen(command, cwd=tree, env=_environment(tree), stdout=sink, stderr=subprocess.STDOUT)
        try:
            code = process.wait(SECONDS)
        except BaseException as error:
            process.terminate()  # the launcher ends its own processes
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise RecordingError(f"no end after {SECONDS} s:\n{log.read_text()[-3000:]}") from None
            raise
    if code:
        raise RecordingError(f"exit code {code}:\n{log.read_text()[-3000:]}")


def _environment(tree: Path) -> dict[str, str]:
    """Return this environment with `tree` at the front of PYTHONPATH."""
    path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "120"}


def _check_package(tree: Path) -> None:
    """Raise RecordingError if `import roll_opd` does not find the package of `tree`."""
    command = [sys.executable, "-c", "import roll_opd; print(roll_opd.__file__)"]
    found = subprocess.run(command, cwd="/", env=_environment(tree), capture_output=True, text=True, check=True).stdout
    if not Path(found.strip()).resolve().is_relative_to(tree.resolve()):
        raise RecordingError(f"{sys.executable} imports {found.strip()} and not the package in {tree}")


def _table(tree: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the runs and their common overrides: from the table of `tree`, or from this table if `tree` has none."""
    own = tree / HERE.relative_to(REPOSITORY) / "golden_runs.py"
    names = runpy.run_path(str(own if own.exists() else HERE / "golden_runs.py"))
    return names["RUNS"], names["COMMON"]


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """A worktree of a commit, removed afterwards."""
    git: Callable[..., Any] = lambda *words: subprocess.run(["git", *words], cwd=REPOSITORY, check=True)  # noqa: E731
    with tempfile.TemporaryDirectory(prefix="goldens-tree-") as place:
        tree = Path(place) / "tree"
        git("worktree", "add", "--quiet", "--detach", str(tree), revision)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="directory for the records")
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs of golden_runs.py; all where none is given")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--rev", help="a commit, in place of this tree")
    source.add_argument("--tree", type=Path, help="another checkout, in place of this tree")
    parser.add_argument("--fixture", action="store_true", help="record every run into the repository, without OUT")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (2)")
    parsed = parser.parse_intermixed_args()
    if parsed.fixture == bool(parsed.out):
        parser.error("write either OUT or --fixture")
    out = parsed.out or fixtures()
    try:
        with worktree(parsed.rev) if parsed.rev else nullcontext((parsed.tree or REPOSITORY).resolve()) as tree:
            record(out, parsed.names, tree, parsed.jobs)
    except RecordingError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
