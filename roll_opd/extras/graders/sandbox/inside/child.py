"""Child process that runs a program: its resource limits, its module and its report."""

import __future__

import atexit
import collections.abc
import decimal
import functools
import json
import numbers
import operator
import os
import random
import resource
import signal
import sys
import threading
import types
from collections.abc import Callable
from typing import NoReturn

from .cleaning import IS_INIT, write_all

# modules that ROLL star-imports into every program, in ROLL's order
STARS = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
PRELUDE = "".join(f"from {name} import *\n" for name in STARS) + "".join(
    f"import {name}\n" for name in STARS if name not in ("builtins", "typing")
)


# compiler flags of imports from __future__
FUTURE = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


def load_module() -> types.ModuleType:
    """Return the module in which programs run.

    The names of the prelude are defined in it. The module is created once, before forking. If each child defined the
    names itself, each would have its own copy of them in memory.
    """
    module = types.ModuleType("__main__")
    exec(PRELUDE, module.__dict__)
    module.__dict__.update(exit=sys.exit, quit=sys.exit)
    return module


def confine(limits: dict[str, int]) -> None:
    """Set the resource limits of this process and of its children."""
    memory, disk, cpu = limits["memory_mb"] << 20, limits["disk_mb"] << 20, limits["cpu_seconds"]
    for what, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_FSIZE, disk, disk),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_NPROC, limits["processes"] + 1, limits["processes"] + 1),
    ):
        if what == resource.RLIMIT_NPROC and not IS_INIT:
            continue  # outside a user namespace, the limit would count all processes of the user
        resource.setrlimit(what, (soft, hard))
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def play(
    module: types.ModuleType,
    before: str,
    program: str,
    check: str | None,
    limits: dict[str, int],
    report_end: int,
    exit: Callable[[int], NoReturn] = os._exit,
    write: Callable[..., int] = os.write,
) -> NoReturn:
    """Run the code `before`, then the program and then the check; never return.

    If there is a check, the program runs as an imported module. Code under `__name__ == "__main__"` is then not run,
    because it could wait for input.
    """
    confine(limits)
    random.seed(0)
    sys.setrecursionlimit(600_000)  # as ROLL does; memory is the limit
    sys.set_int_max_str_digits(0)  # CPU seconds are the limit
    if check is not None:
        module.__name__ = "solution"  # tests of KodCode import from a module of this name
    sys.modules[module.__name__] = module
    space = module.__dict__
    seen: list[list[object]] = []
    code = 1
    report: dict[str, object] = {}
    try:
        # compiled separately: the program may start with imports from __future__
        prefix = compile(before, "before.py", "exec", dont_inherit=True)
        exec(prefix, space)
        flags = prefix.co_flags & FUTURE
        exec(compile(program, "program.py", "exec", flags, dont_inherit=True), space)
        if check is not None:
            space["_seen"] = lambda key, value: seen.append([key, plain(value)])
            exec(compile(check, "check.py", "exec", dont_inherit=True), space)
            report = {"seen": seen}
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        report = {"error": "SystemExit"}
    except BaseException as error:
        report = {"error": type(error).__name__}
    try:
        if check is not None:
            write_all(report_end, json.dumps(report).encode(), write)
        getattr(threading, "_shutdown")()  # noqa: B009 - as the interpreter does on exit; hidden by type stubs
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:
        report, code = {"error": type(error).__name__}, 1
    if check is None:
        write_all(report_end, json.dumps(report).encode(), write)
    exit(code & 255)


def plain(value: object, depth: int = 0) -> list[object] | bool | None:
    """Encode a value as JSON types, with a letter for its type.

    The result is [] if the type of the value is not supported. `read_value` in comparison.py decodes the result.
    """
    if depth > 100:
        return []
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else ["s", str.__str__(value)]
    if isinstance(value, int):
        return ["i", hex(value)]
    if isinstance(value, float):
        return ["f", float(value).hex()]
    if isinstance(value, complex):
        return ["c", value.real.hex(), value.imag.hex()]
    if isinstance(value, bytes | bytearray):
        return ["b", value.hex()]
    if isinstance(value, decimal.Decimal):
        return ["d", str(value)]
    if isinstance(value, numbers.Rational):
        return ["q", hex(value.numerator), hex(value.denominator)]
    if isinstance(value, collections.abc.Mapping):
        return ["m", [[plain(key, depth + 1), plain(item, depth + 1)] for key, item in value.items()]]
    for kind, family in (("l", list), ("t", tuple), ("e", collections.abc.Set)):
        if isinstance(value, family):
            return [kind, [plain(item, depth + 1) for item in value]]
    return []
