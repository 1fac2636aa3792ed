"""`RewardFn`: base of reward functions that a workflow calls itself, with the `REWARD_FUNCTIONS` registry."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from roll_opd.workflows.interface import Modules
from roll_opd.workflows.workflow_errors import WorkflowError


class RewardFn(ABC):
    """Reward function: called with `response`, `truth` and further keyword arguments, it returns named parts.

    The reward is their sum. Each workflow instance creates one, with the configuration's arguments.
    """

    def __init__(self, **kwargs: Any) -> None:  # noqa: B027  # optional for subclasses without arguments
        pass

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Return the parts of the reward."""


def parts_of(function: Any, inputs: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts of a reward function, called with the subset of `inputs` that it takes."""
    taken = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        inputs = {name: value for name, value in inputs.items() if name in taken}
    return dict(function(**inputs))


REWARD_FUNCTIONS = Modules(
    "reward function",
    "class",
    "my_workflows.MyReward",
    WorkflowError,
    "roll_opd.workflows.builtin",
    dict,
    decorator="REWARD_FUNCTIONS.register_module",
)
