"""The public interface for users' workflows. A workflow written for Trinity-RFT only needs different imports.

from roll_opd.workflows import WORKFLOWS, Experience, Task, Workflow

Entry points in the group `roll_opd.workflow_classes` add further names.
"""

import dis
import importlib
import logging
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

from roll_opd.base.entry_points import entries, load

if TYPE_CHECKING:
    from roll_opd.workflows.model_wrapper import ModelWrapper
    from roll_opd.workflows.workflow_experience import EID, Experience, WorkflowError
    from roll_opd.workflows.workflow_interface import (
        REWARD_FUNCTIONS,
        WORKFLOWS,
        FormatConfig,
        GenerationConfig,
        RewardFn,
        Task,
        Workflow,
        WorkflowWithRecording,
    )

__all__ = [
    "EID",
    "REWARD_FUNCTIONS",
    "WORKFLOWS",
    "Experience",
    "FormatConfig",
    "GenerationConfig",
    "Metrics",
    "ModelWrapper",
    "RewardFn",
    "Task",
    "Workflow",
    "WorkflowError",
    "WorkflowWithRecording",
    "get_logger",
]
_MODULES = {
    "workflow_experience": ("EID", "Experience", "WorkflowError"),
    "workflow_interface": (
        *("REWARD_FUNCTIONS", "RewardFn", "WORKFLOWS", "FormatConfig", "GenerationConfig", "Task", "Workflow"),
        "WorkflowWithRecording",
    ),
    "model_wrapper": ("ModelWrapper",),
}
Metrics = dict[str, float]


def get_logger(name: str | None = None) -> logging.Logger:
    """Return the logger `name`."""
    return logging.getLogger(name)


def __getattr__(name: str) -> Any:
    """Import a public name lazily, so that checking a configuration does not import torch."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    if entry := entries("workflow_classes").get(name):
        return load(entry)
    advice = importlib.import_module(f"{__name__}.workflow_checks").advice(name)
    if advice and _is_from_import(sys._getframe(1)):
        raise ImportError(advice)  # Python would replace the message of an AttributeError
    raise AttributeError(advice or f"module {__name__} has no attribute {name!r}")


def _is_from_import(caller: FrameType) -> bool:
    """Return whether a frame executes `from ... import ...`.

    For any other access to a missing name, the caller raises an AttributeError, which `hasattr` and `getattr` require.
    """
    return dis.opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM"
