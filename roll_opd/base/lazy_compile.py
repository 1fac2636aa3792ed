"""Delay `torch.compile`, so that a decorated function is compiled when it is first called."""

import functools
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def lazy_compile() -> Iterator[None]:
    """Delay `torch.compile` of the functions that are decorated inside the block.

    A function is then compiled when it is first called. Megatron decorates functions that are rarely called on CPUs. If
    none of them is called, the compiler is not imported.
    """
    torch: Any = importlib.import_module("torch")
    compile_now = torch.compile

    def later(model: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        if model is None:
            return functools.partial(later, **options)

        compiled: list[Callable[..., Any]] = []

        @functools.wraps(model)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not compiled:
                is_off = os.environ.get("TORCHDYNAMO_DISABLE") == "1"
                compiled.append(model if is_off else compile_now(model, **options))
            return compiled[0](*args, **kwargs)

        return call

    torch.compile = later
    try:
        yield
    finally:
        torch.compile = compile_now
