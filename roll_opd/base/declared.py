"""Read the declarations of built-in parts from source, without importing torch or optional packages."""

import ast
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_NO_ARGUMENTS = ast.parse("def f(): ...").body[0].args  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Declared:
    """Built-in part: module, registered facts, defaults of its keyword arguments."""

    module: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


def declarations(package: str, decorator: str | None) -> Mapping[str, Declared]:
    """Return name -> declaration of the functions and classes under `decorator`; None: one per module.

    Raises ValueError if a name, a fact or a default is not a literal.
    """
    directories = importlib.import_module(package).__path__
    sources = {Path(d, f"{module.name}.py") for d in directories for module in pkgutil.iter_modules([d])}
    modules = {source.stem: f"{package}.{source.stem}" for source in sources}
    if decorator is None:
        return {name: Declared(module) for name, module in modules.items()}
    return dict(found for source in sources for found in _read(source, modules[source.stem], decorator))


@cache
def _read(source: Path, module: str, decorator: str) -> tuple[tuple[str, Declared], ...]:
    found: list[tuple[str, Declared]] = []
    tree = ast.parse(source.read_text(encoding="utf-8"))
    for part in [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]:
        for call in part.decorator_list:
            if not isinstance(call, ast.Call) or ast.unparse(call.func) != decorator:
                continue
            arguments = part.args if isinstance(part, ast.FunctionDef) else _NO_ARGUMENTS
            given = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            try:
                facts = {str(fact.arg): ast.literal_eval(fact.value) for fact in call.keywords}
                defaults = {argument.arg: ast.literal_eval(default) for argument, default in given if default}
                found.append((ast.literal_eval(call.args[0]), Declared(module, facts, defaults)))
            except ValueError as error:
                what = "write its name, facts and defaults as literals, they are read before torch is imported"
                raise ValueError(f"{source}:{part.lineno}: {part.name}: {what} ({error})") from error
    return tuple(found)
