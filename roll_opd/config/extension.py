"""From what a configuration calls a part to the part itself: a name of the package's, one that a user registered, or
the dotted path of a user's own.
"""

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")

_REGISTERED: dict[tuple[str, str], str] = {}  # (kind, name) -> dotted path

Part = TypeVar("Part", bound=Callable[..., Any])


class ExtensionError(Exception):
    """A part that cannot be found; the message says what was looked for and what is known."""


def register(kind: str, name: str) -> Callable[[Part], Part]:
    """Make a function or class of a module known as `name` among its `kind`.

    Raises `ExtensionError` where another one has the name, or where no other process could import it.
    """

    def decorate(part: Part) -> Part:
        path = f"{part.__module__}.{part.__qualname__}"
        if part.__module__ == "__main__" or not DOTTED.fullmatch(path):
            raise ExtensionError(f"{kind} {name}: {path} cannot be imported by the workers; put it into a module")
        if _REGISTERED.setdefault((kind, name), path) != path:
            raise ExtensionError(f"a {kind} named {name!r} is already registered: {_REGISTERED[kind, name]}")
        return part

    return decorate


def located(kind: str, name: str, ours: Mapping[str, Any]) -> str:
    """Return `name` if it is one of ours, else a dotted path that any process can import; imports nothing itself.

    Raises `ExtensionError` for a name that is neither known nor a dotted path.
    """
    if name in ours:
        return name
    path = _REGISTERED.get((kind, name), name)
    if not DOTTED.fullmatch(path):
        known = ", ".join(sorted({*ours, *(own for of, own in _REGISTERED if of == kind)}))
        raise ExtensionError(f"unknown {kind} {name!r}; use one of {known}, or a dotted path such as mypackage.mine")
    return path


def resolve(kind: str, name: str, ours: Mapping[str, Any]) -> Any:
    """Return the part that `name` stands for. Raises `ExtensionError` where there is none."""
    path = located(kind, name, ours)
    if path in ours:
        return ours[path]
    module_name, _, attribute = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ExtensionError(f"{kind} {path}: the module {module_name} cannot be imported: {error}") from error
    if attribute not in vars(module):
        raise ExtensionError(f"{kind} {path}: {module_name} has nothing named {attribute}")
    return vars(module)[attribute]
