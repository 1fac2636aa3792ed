"""Put each wrong formula into a copy of the package, and check that a test fails.

    python tests/net/mutations.py [WORD ...]

Without words, all formulas of `wrong_formulas.py` are tried, else the formulas whose names contain one of the words.
Each runs in a fork of one process that has imported torch and Megatron, because these imports take longer than the
tests.
"""

import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from wrong_formulas import WRONG_FORMULAS, WrongFormula

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE, TESTS = "roll_opd", "tests"
COPIED = (PACKAGE, TESTS, "scripts", "pyproject.toml")
PASSED, FAILED = 0, 1  # exit codes of pytest


@dataclass(frozen=True)
class Result:
    """Result of a wrong formula: `caught`, or the reason in `problem`; `output` is pytest's output."""

    formula: WrongFormula
    caught: bool
    problem: str
    output: str
    seconds: float


def file_of(text: str, package: Path) -> Path:
    """Return the file of the package that has `text`; ValueError unless it is there exactly once."""
    found = [(file, file.read_text(encoding="utf-8").count(text)) for file in sorted(package.rglob("*.py"))]
    places = [f"{file.relative_to(package)} ({count})" for file, count in found if count]
    if sum(count for _, count in found) != 1:
        where = ", ".join(places) or "nowhere"
        raise ValueError(f"{text!r} should be in the package once, and is in {where}; correct wrong_formulas.py")
    return next(file for file, count in found if count)


def file_of_test(name: str, tests: Path) -> Path:
    """Return the test file whose path ends in `name`; ValueError unless there is exactly one."""
    found = sorted(tests.rglob(name))
    if len(found) != 1:
        raise ValueError(f"{len(found)} test files are called {name}; correct wrong_formulas.py")
    return found[0]


def survivors(formulas: Sequence[WrongFormula], say: bool = True) -> list[Result]:
    """Return the wrong formulas that no test detects. ValueError if the tests fail without a wrong formula."""
    _import_once()
    with tempfile.TemporaryDirectory(prefix="wrong_formulas-") as scratch:
        root = _copy(Path(scratch))
        for formula in formulas:  # before anything runs: a table out of date is said at the start
            file_of(formula.right, root / PACKAGE)
            for name in formula.tests:
                file_of_test(name, root / TESTS)
        names = dict.fromkeys(name for formula in formulas for name in formula.tests)
        code, output = _tested(root, list(names))
        if code != PASSED:
            raise ValueError(f"the tests fail without a wrong formula (exit code {code}):\n{output[-3000:]}")
        results = []
        for formula in formulas:
            results.append(_result(formula, root))
            if say:
                _show(results[-1])
    return [result for result in results if not result.caught]


def _import_once() -> None:
    """Import the modules that all tests need, except for the package."""
    warnings.simplefilter("ignore")  # of Megatron, of libraries that are not installed
    import megatron.core.models.gpt  # noqa: F401
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)


def _copy(root: Path) -> Path:
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, root / name)
        else:
            shutil.copy2(source, root / name)
    return root


def _result(formula: WrongFormula, root: Path) -> Result:
    begin = time.monotonic()
    file = file_of(formula.right, root / PACKAGE)
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(formula.right, formula.wrong), encoding="utf-8")
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()
    try:
        code, output = _tested(root, formula.tests, bytecode=False)
    finally:
        file.write_text(text, encoding="utf-8")
    problem = {PASSED: "no test fails", FAILED: ""}.get(code, f"pytest ended with {code}")
    if code == FAILED and "\nERROR " in output:
        problem = "the tests cannot run"
    return Result(formula, not problem, problem, output, time.monotonic() - begin)


def _tested(root: Path, names: Sequence[str], *, bytecode: bool = True) -> tuple[int, str]:
    """Run test files of the copy in a fork, to the first failure; return pytest's exit code and output."""
    log = root / "pytest.log"
    child = os.fork()
    if not child:
        code = 70
        try:
            with log.open("w", encoding="utf-8") as output, redirect_stdout(output), redirect_stderr(output):
                code = _in_copy(root, names, bytecode)
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, log.read_text(encoding="utf-8")


def _in_copy(root: Path, names: Sequence[str], bytecode: bool) -> int:
    import pytest

    os.chdir(root)
    sys.dont_write_bytecode = not bytecode
    sys.path.insert(0, str(root))
    for name in [name for name in sys.modules if name.partition(".")[0] in (PACKAGE, TESTS)]:
        del sys.modules[name]
    files = [str(file_of_test(name, root / TESTS)) for name in names]
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "-W", "ignore"]
    return int(pytest.main([*options, *files]))


def _show(result: Result) -> None:
    failed = next((line for line in result.output.splitlines() if line.startswith("FAILED")), "").split(" - ")[0]
    verdict = f"caught by {failed.removeprefix('FAILED ')}" if result.caught else f"NOT CAUGHT: {result.problem}"
    print(f"{result.seconds:5.1f} s  {result.formula.name}: {verdict}", flush=True)


def main(words: Sequence[str]) -> int:
    """Try the wrong formulas whose names contain one of the words; return 1 if one is not detected."""
    chosen = [one for one in WRONG_FORMULAS if not words or any(word in one.name for word in words)]
    begin = time.monotonic()
    left = survivors(chosen)
    for result in left:
        print(f"\n{result.formula.name}: {result.problem}\n{result.output[-2000:]}")
    print(f"{len(chosen) - len(left)} of {len(chosen)} caught in {time.monotonic() - begin:.0f} s")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
