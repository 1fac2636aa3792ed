"""Reward functions that a workflow calls itself: `RewardFn`, and the names by which configurations find them."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from roll_opd.workflows.interface import Modules
from roll_opd.workflows.workflow_errors import WorkflowError


class RewardFn(ABC):
    """Scores a response: called with `response`, `truth` and what else its workflow knows, it returns parts by name.

    The reward is their sum. It is made once for each instance of the workflow, with the configuration's arguments.
    """

    def __init__(self, **kwargs: Any) -> None:  # noqa: B027  # one without arguments need not write it
        pass

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Return the parts of the reward."""


def parts_of(function: Any, told: Mapping[str, Any]) -> dict[str, float]:
    """Return what a reward function says of a response; of what is `told` it gets what it takes."""
    taken = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        told = {name: value for name, value in told.items() if name in taken}
    return dict(function(**told))


REWARD_FUNCTIONS = Modules(
    "reward function",
    "class",
    "my_workflows.MyReward",
    WorkflowError,
    "roll_opd.workflows.builtin",
    dict,
    decorator="REWARD_FUNCTIONS.register_module",
)
