"""Reward functions that a workflow calls itself: `RewardFn`, and the names by which configurations find them."""

from abc import ABC, abstractmethod
from typing import Any

from roll_opd.workflows.errors import WorkflowError
from roll_opd.workflows.interface import Modules


class RewardFn(ABC):
    """Scores a response: called with `response`, `truth` and what else its workflow knows, it returns parts by name.

    The reward is their sum. It is made once for each instance of the workflow, with the configuration's arguments.
    """

    def __init__(self, **kwargs: Any) -> None:  # noqa: B027  # one without arguments need not write it
        pass

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Return the parts of the reward."""


REWARD_FUNCTIONS = Modules(
    "reward function",
    "class",
    "my_workflows.MyReward",
    WorkflowError,
    "roll_opd.workflows.builtin",
    dict,
    decorator="REWARD_FUNCTIONS.register_module",
)
