"""What a warm server imports, and what its forks must know of the time before."""

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

ENVIRONMENT = dict(os.environ)  # before any import has changed it
PATH = list(sys.path)

MEGATRON = ("roll_opd.megatron.trainer", "roll_opd.megatron.critic", "roll_opd.megatron.export")
VLLM = ("roll_opd.inference.engine", "vllm.v1.engine.async_llm", "vllm.v1.engine.core")


def preload(told: TextIO) -> None:
    """Import what Megatron's roles need, and vLLM where the driver, which reads its configuration meanwhile, says so.

    What cannot be imported is left to the process that needs it, which says what is wrong. Ray is left to it as well:
    it reads who it works for from the environment, as it is imported and never again.
    """
    from roll_opd.inference.settings import prepare_environment

    modules: dict[str, Any] = sys.modules
    modules["ray"] = None  # vLLM tries to import it
    gc.disable()  # a collection finds nothing, and takes a fifth of the time
    prepare_environment(eager_on_cpu=False)  # vLLM reads a part of it as it is imported
    _import(MEGATRON)
    if told.read() == "vllm":
        _import(VLLM)
    del modules["ray"]
    gc.collect()
    gc.freeze()  # so that collections in the forks do not copy all of these pages
    gc.enable()


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        with suppress(Exception):
            importlib.import_module(module)
