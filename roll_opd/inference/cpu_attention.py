"""Head sizes that vLLM's attention supports on CPUs, read from vLLM's source: importing vLLM takes seconds."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

BACKENDS = "v1/attention/backends"
PLAIN = (f"{BACKENDS}/cpu_attn.py", "CPUAttentionBackend")
LATENT = (f"{BACKENDS}/mla/cpu_mla.py", "CPUMLABackend")  # the size of a token's cache entry
SIZES = "get_supported_head_sizes"


@cache
def head_sizes(file: str, name: str) -> tuple[int, ...]:
    """Return the head sizes that backend `name` supports. `file` is the source file of the backend.

    The result is empty if the source does not return a literal list.
    """
    spec = find_spec("vllm")
    source = Path(next(iter(spec.submodule_search_locations or ())), file) if spec else None
    if source is None or not source.is_file():
        return ()
    for backend in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(backend, ast.ClassDef) and backend.name == name:
            for node in ast.walk(backend):
                if isinstance(node, ast.FunctionDef) and node.name == SIZES:
                    return _literal(node)
    return ()


def _literal(function: ast.FunctionDef) -> tuple[int, ...]:
    """Return the list in the last `return` of a function, or an empty tuple if the list is not a literal."""
    last = function.body[-1]
    try:
        found = ast.literal_eval(last.value) if isinstance(last, ast.Return) and last.value else ()
    except ValueError:  # not a literal in this version of vLLM
        return ()
    return tuple(size for size in found if isinstance(size, int))
