"""Jobs of the Megatron ranks, and the operations that execute them: a file of `megatron_jobs` registers both.

A job is a dictionary: `op` names its operation, `name` the job and its files, `layout` its ranks. A job that continues
from the state of another job has `load`, the name of that job with ".ckpt". The operation reads all further keys.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Job = dict[str, Any]
OPERATIONS: dict[str, Callable[[Job, Path], None]] = {}
BUILDERS: list[Callable[[], Iterable[Job]]] = []


def operation(function: Callable[[Job, Path], None]) -> Callable[[Job, Path], None]:
    """Register a function that a rank executes for the jobs whose `op` is its name; it writes into the given
    directory."""
    OPERATIONS[function.__name__] = function
    return function


def jobs(function: Callable[[], Iterable[Job]]) -> Callable[[], Iterable[Job]]:
    """Register a function that returns jobs."""
    BUILDERS.append(function)
    return function


def load_modules() -> None:
    """Import every file of `megatron_jobs`."""
    package = importlib.import_module("megatron_jobs")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"megatron_jobs.{module.name}")


def assemble_jobs() -> dict[str, Job]:
    """Return all jobs by name."""
    load_modules()
    return {job["name"]: job for builder in BUILDERS for job in builder()}
