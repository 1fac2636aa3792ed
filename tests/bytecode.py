"""Bytecode of a new checkout: each process of a test session writes a part of it, and reads the parts of the others.

pytest rewrites the assertions of a test file when it imports it, and caches the result as Python caches bytecode.
Processes that start together would each compile every file, which takes ten seconds.
"""

import compileall
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).parents[1]


def write_share_of_worker(config: pytest.Config) -> None:
    """Compile the part of this process among the processes of pytest-xdist."""
    worker = getattr(config, "workerinput", None)
    if worker and not sys.dont_write_bytecode:
        files = sorted([*ROOT.glob("roll_opd/**/*.py"), *ROOT.glob("tests/**/*.py")])
        write_share(files, int(worker["workerid"].removeprefix("gw")), worker["workercount"], config)


def write_share(files: Sequence[Path], number: int, count: int, config: pytest.Config) -> None:
    """Compile every `count`-th of `files`, starting with file `number`, unless its bytecode exists."""
    for file in files[number::count]:
        with suppress(SyntaxError):  # its import reports the error
            if file.name == "conftest.py" or file.name.startswith("test_"):
                _rewrite(file, config)
            else:
                compileall.compile_file(file, quiet=2)


def _rewrite(file: Path, config: pytest.Config) -> None:
    """Rewrite the assertions of a file and cache its bytecode, by pytest's private functions."""
    directory = rewrite.get_cache_dir(file)
    cached = directory / (file.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(file, cached) is None and rewrite.try_makedirs(directory):
        source_hash, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, cached)
