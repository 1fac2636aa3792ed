"""Read the fields of the installed engines' option classes, with their types and bounds, in a subprocess.

Importing vLLM takes 5 to 20 s, and importing Megatron-core 2 to 5 s. So the subprocess runs only once per installed
version, and its answer is cached as a JSON file in `~/.cache/roll_opd/`. The planning process itself imports neither
engines nor torch.
"""

import fcntl
import hashlib
import importlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

from roll_opd.base.paths import user_cache


class OptionClass(NamedTuple):
    """Where to find the dataclass that holds the options of an engine."""

    package: str
    module: str  # in the package
    name: str
    bounded: tuple[str, ...] = ()  # modules in the package with pydantic dataclasses, which have bounds of the options


CLASSES = {
    "Megatron": OptionClass("megatron.core", "transformer.transformer_config", "TransformerConfig"),
    "vLLM": OptionClass(
        "vllm",
        "engine.arg_utils",
        "AsyncEngineArgs",
        tuple(f"config.{name}" for name in ("cache", "scheduler", "parallel", "model", "load", "offload")),
    ),
}
FORMAT = 1  # format version of the cache files
TIMEOUT_S = 300
_PLAIN: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "null": None}
_CONTAINERS: dict[str, Any] = {"dict": dict, "list": list, "tuple": tuple}
_BOUNDS = {"gt": Gt, "ge": Ge, "lt": Lt, "le": Le}
_PROGRAM = "import sys; sys.path[:] = {path!r}; from roll_opd.models.engine_fields import main; main({engines!r})"
_answers: dict[str, dict[str, Any]] = {}  # answers in this process: engine -> encoded fields, or {"error": reason}


def engine_fields(engine: str) -> dict[str, Any] | None:
    """Return {option: type} for an engine, or None if the engine cannot be imported.

    The type is `Any` if the engine itself defines the type.
    """
    files = {name: file for name in CLASSES if (file := _cache_file(name))}
    if engine not in files:
        return None
    found = _answers.get(engine) or _cached(files[engine])
    if found is None:
        with _lock() as is_writable:  # another process may have written the file meanwhile
            cold = [name for name in files if name not in _answers and _cached(files[name]) is None]
            if engine in cold:
                _answers.update(_query(cold, is_writable))
                for name in cold if is_writable else ():
                    _write(files[name], _answers[name])
        found = _answers.get(engine) or _cached(files[engine])
    if not found or "error" in found:
        return None
    return {name: decoded(text) for name, text in found.items()}


def _cache_file(engine: str) -> Path | None:
    """Return the cache file of an engine, or None if the engine is not installed.

    The name of the file contains a hash of the engine's sources.
    """
    package, module, _, bounded = CLASSES[engine]
    spec = find_spec(package.partition(".")[0]) and find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations)))
    files = [Path(root, *name.split(".")).with_suffix(".py") for name in (module, *bounded)]
    if not files[0].is_file():
        return None  # another version with a different layout
    state = hashlib.sha256(f"{FORMAT} {sys.version_info[:2]}".encode())
    for file in files:
        state.update(file.read_bytes() if file.is_file() else b"")
    return user_cache() / f"{engine.lower()}-options-{state.hexdigest()[:16]}.json"


@contextmanager
def _lock() -> Iterator[bool]:
    """Lock the cache until the end of the `with` block.

    The value of the block is True if the cache is writable.
    """
    with ExitStack() as stack:
        is_writable = False
        with suppress(OSError):
            user_cache().mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((user_cache() / "engine-options.lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
            is_writable = True
        yield is_writable


def _cached(file: Path) -> dict[str, Any] | None:
    """Return the content of a cache file, or None if it is missing or damaged."""
    with suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else None
    return None


def _write(file: Path, answer: dict[str, Any]) -> None:
    """Write an answer to its cache file atomically, unless the answer is a failure."""
    partial = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        if "error" not in answer:
            partial.write_text(json.dumps(answer), encoding="utf-8")
            os.replace(partial, file)


def _query(engines: list[str], is_writable: bool) -> dict[str, dict[str, Any]]:
    """Return {engine: encoded fields} from a subprocess that imports the engines."""
    kept = (
        f"kept in {user_cache()}"
        if is_writable
        else f"{user_cache()} is not writable, so each plan reads the options again"
    )
    names = " and ".join(engines)
    print(f"Reading the options of the installed {names} (up to 30 s; {kept}) ...", file=sys.stderr, flush=True)
    program = _PROGRAM.format(path=sys.path, engines={name: tuple(CLASSES[name]) for name in engines})
    command = [sys.executable, "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        found = {name: {"error": reason[-1] if reason else type(error).__name__} for name in engines}
    for name, answer in found.items():
        if "error" in answer:
            why = f"it cannot be imported ({answer['error']})"
            print(f"The options of {name} are not checked: {why}", file=sys.stderr, flush=True)
    return found


def main(engines: Mapping[str, tuple[str, str, str, tuple[str, ...]]]) -> None:
    """Print {engine: encoded fields} as one line of JSON. Runs in the subprocess."""
    found: dict[str, Any] = {}
    for engine, where in engines.items():
        try:
            found[engine] = _fields(OptionClass(*where))
        except Exception as error:  # modules of an engine may raise anything
            found[engine] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))


def _fields(options: OptionClass) -> dict[str, Any]:
    module = importlib.import_module(f"{options.package}.{options.module}")
    bounds: dict[str, dict[str, float]] = {}
    for name in options.bounded:
        for kind in list(vars(importlib.import_module(f"{options.package}.{name}")).values()):
            for field, info in getattr(kind, "__pydantic_fields__", {}).items():
                bounds.setdefault(field, {}).update(_bounds(info.metadata))
    found = {item.name: encoded(item.type) for item in fields(getattr(module, options.name))}
    return {name: _with_bounds(text, bounds.get(name)) for name, text in found.items()}


def _bounds(metadata: list[Any]) -> dict[str, float]:
    return {name: getattr(item, name) for item in metadata for name, kind in _BOUNDS.items() if isinstance(item, kind)}


def _with_bounds(text: Any, bounds: dict[str, float] | None) -> Any:
    return {"of": text, **bounds} if bounds and text != "any" else text


def encoded(annotation: Any) -> Any:
    """Return a type, encoded as JSON.

    The result is "any" if a part of the type is not a plain Python type.
    """
    try:
        return _encoded(annotation)
    except TypeError:
        return "any"


def _encoded(annotation: Any) -> Any:
    if annotation in (None, type(None)):
        return "null"
    for name, kind in (_PLAIN | _CONTAINERS | {"any": Any}).items():
        if annotation is kind:
            return name
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return {"literal": list(arguments)}
    parts = ["..." if part is ... else _encoded(part) for part in arguments]
    if origin in (Union, types.UnionType):
        return {"union": parts}
    for name, kind in _CONTAINERS.items():
        if origin is kind:
            return {name: parts}
    raise TypeError(f"{annotation} is not a plain type")


def decoded(text: Any) -> Any:
    """Return the type for its JSON form `text`. This is the inverse of `encoded`."""
    if isinstance(text, str):
        return (_PLAIN | _CONTAINERS | {"any": Any, "...": ...})[text]
    if "of" in text:
        bounds = [_BOUNDS[name](bound) for name, bound in text.items() if name != "of"]
        return Annotated[(decoded(text["of"]), *bounds)]
    ((kind, parts),) = text.items()
    if kind == "literal":
        return Literal[tuple(parts)]
    arguments = tuple(map(decoded, parts))
    return Union[arguments] if kind == "union" else _CONTAINERS[kind][arguments]  # noqa: UP007
