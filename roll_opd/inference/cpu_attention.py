"""vLLM's attention on CPUs: the head sizes that it supports, and a fix of its linear attention.

The head sizes are read from vLLM's source, because importing vLLM takes seconds. With vLLM 0.32, a step of linear
attention with a single token crashes the engine.
"""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

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


def copies_single_tokens() -> None:
    """Patch vLLM's linear attention to copy the projections of a single token. Idempotent.

    PyTorch treats a single row of a wider matrix as contiguous, whatever its strides are. The convolution kernel reads
    the strides, so it needs a copy with the strides of a single row.
    """
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    module: Any = gdn_attention
    compute = module._cpu_gdn_attention_nonspec
    if getattr(compute, "copies", False):
        return

    def with_copy(layer: Any, metadata: Any, mixed_qkv: "Tensor", *rest: "Tensor") -> None:
        # a new tensor has the strides of its shape
        projections = mixed_qkv.new_empty(mixed_qkv.shape).copy_(mixed_qkv) if len(mixed_qkv) == 1 else mixed_qkv
        compute(layer, metadata, projections, *rest)

    with_copy.copies = True  # type: ignore[attr-defined]
    module._cpu_gdn_attention_nonspec = with_copy
