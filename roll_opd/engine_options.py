"""The options of the installed engines, read from their sources: importing vLLM or Megatron-core takes seconds.

A `strategy_config` passes through to the engine as it is. Here its names, and its values as far as annotations can be
understood without an import, are held against the dataclasses that will take them.
"""

import ast
import difflib
import typing
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from roll_opd.extensions import type_problem

# engine -> (package, file, dataclass), a later one inheriting from an earlier one
DATACLASSES = {
    "Megatron": (
        ("megatron.core", "model_parallel_config.py", "ModelParallelConfig"),
        ("megatron.core", "transformer/transformer_config.py", "TransformerConfig"),
    ),
    "vLLM": (("vllm", "engine/arg_utils.py", "EngineArgs"), ("vllm", "engine/arg_utils.py", "AsyncEngineArgs")),
}
# what an annotation may be made of to be understood; with anything else in it, any value is accepted
_PLAIN = {kind.__name__: kind for kind in (int, float, bool, str, dict, list, tuple)}
_TYPING = {name: getattr(typing, name) for name in ("Any", "Optional", "Union", "Literal", "Dict", "List", "Tuple")}


@cache
def engine_options(engine: str) -> dict[str, Any] | None:
    """Return option -> its type (Any where that is not understood); None where the engine is not installed."""
    options: dict[str, Any] = {}
    for package, file, name in DATACLASSES[engine]:
        spec = find_spec(package.partition(".")[0]) and find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            return None
        source = Path(next(iter(spec.submodule_search_locations))) / file
        tree = ast.parse(source.read_text(encoding="utf-8"))
        (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
        for node in found.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                options[node.target.id] = _understood(node.annotation)
    return options


def _understood(annotation: ast.expr) -> Any:
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    if any(isinstance(node, ast.Attribute | ast.Call) for node in ast.walk(annotation)):
        return Any
    if not names <= {*_PLAIN, *_TYPING}:
        return Any
    return eval(ast.unparse(annotation), {"__builtins__": {}, **_PLAIN, **_TYPING})


def option_problem(engine: str, name: str, value: Any, also_known: Iterable[str] = ()) -> str | None:
    """Say what is wrong with an option of an engine; None: nothing, or the engine is not installed.

    `also_known` are keys that are read elsewhere, for the hint at a misspelt one.
    """
    options = engine_options(engine)
    if options is None:
        return None
    if name in options:
        return type_problem(options[name], value)
    near = difflib.get_close_matches(name, sorted({*options, *also_known}), n=1, cutoff=0.5)
    what = "unknown engine argument of vLLM" if engine == "vLLM" else f"unknown key for a {engine} strategy"
    return f"{what}; {f'did you mean {near[0]!r}?' if near else 'remove it'}"
