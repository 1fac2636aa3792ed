"""Base classes of workflows, of agents that call the policy over HTTP, and of reward functions; their registries."""

import inspect
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from roll_opd.base.registry import Part, Registry
from roll_opd.data.row_formats import is_missing
from roll_opd.workflows.model_wrapper import ModelWrapper
from roll_opd.workflows.workflow_checks import advice, flag
from roll_opd.workflows.workflow_experience import Experience, WorkflowError

Class = TypeVar("Class", bound=type)


@dataclass
class FormatConfig:
    """Column names of a dataset row, and texts that are added before and after the row's prompt."""

    prompt_key: str = "prompt"
    response_key: str = "ground_truth"
    system_prompt: str | None = None
    reply_prefix: str | None = None
    messages_key: str = "messages"
    tools_key: str = "tools"


@dataclass
class GenerationConfig:
    """Sampling parameters. For a parameter that is None, the value of the configuration is used."""

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    logprobs: int | None = None


@dataclass
class Task:
    """A dataset row, together with the settings of its workflow."""

    raw_task: dict[str, Any] = field(default_factory=dict)
    format_args: FormatConfig = field(default_factory=FormatConfig)
    rollout_args: GenerationConfig = field(default_factory=GenerationConfig)
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward_fn: Any = None
    reward_fn_args: dict[str, Any] = field(default_factory=dict)
    repeat_times: int = 1
    is_eval: bool = False
    batch_id: int | str = ""
    task_id: int | str = ""
    run_id: int = 0  # number of the first run of the call
    index: dict[str, Any] = field(default_factory=dict)
    is_scored: bool = False  # whether the configuration's `rewards` score experiences without a reward

    @property
    def task_desc(self) -> Any:
        """Prompt of the row."""
        return self.raw_task.get(self.format_args.prompt_key)

    @property
    def truth(self) -> Any:
        """Answer of the row, or None if the row has no answer."""
        truth = self.raw_task.get(self.format_args.response_key)
        return None if is_missing(truth) else truth

    def to_dict(self) -> dict[str, Any]:
        """Return the row."""
        return self.raw_task


class Workflow:
    """Base class of workflows. A workflow calls the model for one task and returns experiences. Implement `run`.

    The class may set three flags:

    - `can_reset`: one instance runs many tasks. Implement `reset`.
    - `can_repeat`: one call makes `repeat_times` runs of a task. Set the `eid.run` of each experience.
    - `is_async`: the workflow is a coroutine. Implement `run_async` instead of `run`.
    """

    can_reset: bool = False
    can_repeat: bool = False
    is_async: bool = False

    task: Any = None

    def __init__(self, model: ModelWrapper, task: Task | None = None, auxiliary_models: list | None = None) -> None:
        if task is not None:
            self.task = task
        self.model, self.auxiliary_model_wrappers = model, auxiliary_models or None
        self.repeat_times, self.run_id_base = 1, 0
        self.logger = logging.getLogger(type(self).__module__)

    @cached_property
    def auxiliary_models(self) -> list | None:
        """OpenAI clients of the auxiliary models, or None. Each client has an attribute `model_path`.

        `auxiliary_model_wrappers` has the wrappers of the same models. Both attributes are None without auxiliary
        models.
        """
        is_async = flag(self, "is_async")
        return self.auxiliary_model_wrappers and [
            model.get_openai_async_client() if is_async else model.get_openai_client()
            for model in self.auxiliary_model_wrappers
        ]

    @property
    def resettable(self) -> bool:
        """Whether the instance can be prepared for another task by `reset`.

        In older workflows, `resettable` is a method.
        """
        return type(self).can_reset

    @property
    def repeatable(self) -> bool:
        """Whether one call makes all runs of a task."""
        return type(self).can_repeat

    @property
    def asynchronous(self) -> bool:
        """Whether the workflow implements `run_async`."""
        return type(self).is_async

    def reset(self, task: Task) -> None:
        """Prepare for another task."""
        raise NotImplementedError(f"{type(self).__name__} has can_reset = True but no method `reset`")

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Make the next call produce `repeat_times` runs. The first run has the number `run_id_base`."""
        self.repeat_times, self.run_id_base = repeat_times, run_id_base

    def set_single_run_context(self, run_id_base: int) -> None:
        """Make the next call produce one run with the number `run_id_base`.

        This method is called if the class does not set `can_repeat`.
        """
        self.repeat_times, self.run_id_base = 1, run_id_base

    def run(self) -> list[Experience]:
        """Run the task and return experiences. This method may block, because it is called in its own thread."""
        raise NotImplementedError(f"{type(self).__name__} has no method `run`")

    async def run_async(self) -> list[Experience]:
        """Run the task and return experiences. This method is called if `is_async` is set."""
        raise NotImplementedError(f"{type(self).__name__} has no method `run_async`")

    def experiences_of(self, returned: Any) -> Any:
        """Convert the return value of a call to experiences. The base class returns the value unchanged."""
        return returned


class Modules(Registry[dict]):
    """A registry with the method names of Trinity-RFT's registries."""

    def register(self, name: str, **facts: Any) -> Callable[[Part], Part]:
        """Register a class as `name`.

        A user's class replaces a built-in class of the same name. Therefore a copied file of Trinity-RFT can register
        its original names. A second user's class of the same name is an error.
        """
        built_in = self.declared(name)
        registered = super().register(name, **facts)

        def decorate(part: Part) -> Part:
            if built_in is None:
                return registered(part)
            holder = self._registered[name][0].__module__ if name in self._registered else None
            if part.__module__ == built_in.module:
                if holder in (None, part.__module__):
                    return registered(part)
            elif holder in (None, built_in.module, part.__module__):
                self._registered[name] = (part, self.facts_type(**facts))
            else:
                return registered(part)  # raises the error that names the current owner
            return part

        return decorate

    def register_module(self, name: str, **facts: Any) -> Callable[[Class], Class]:
        """Register a class as `name`. A built-in class also passes the names of its `arguments`."""
        return self.register(name, **facts)

    def find(self, name: str) -> Callable[..., Any]:
        """Return the class that is registered as `name`.

        If only Trinity-RFT has a class with this name, the error message gives the path of the Trinity-RFT file.
        """
        if "." not in name and name not in self.builtin and name not in self._registered:
            theirs = advice(name)
            if theirs:
                raise self.error(f"unknown {self.kind} {name!r}: {theirs}")
        return super().find(name)

    def get(self, name: str) -> Any:
        """Return the class that is registered as `name`."""
        return self.find(name)


WORKFLOWS = Modules(
    "workflow",
    "class",
    "my_workflows.MyWorkflow",
    WorkflowError,
    "roll_opd.workflows.builtin",
    dict,
    decorator="WORKFLOWS.register_module",
    group="workflows",
)


class RewardFn(ABC):
    """Base class of reward functions. A reward function returns the named parts of a reward.

    The reward is the sum of its parts. A reward function is called with the keyword arguments `response`, `truth` and
    others. Each workflow instance creates one reward function with the configured arguments.
    """

    def __init__(self, **kwargs: Any) -> None:  # noqa: B027  # optional for subclasses without arguments
        pass

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Return the parts of the reward."""


def parts_of(function: Any, inputs: Mapping[str, Any]) -> dict[str, float]:
    """Call a reward function and return the parts of the reward.

    Only those `inputs` are passed that the function accepts.
    """
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
    group="reward_functions",
)


class WorkflowWithRecording(Workflow):
    """Base class of workflows with an agent that calls the policy over HTTP.

    The agent uses `base_url`, `api_key` and `model_name`. The responses to its requests are trained on. As with
    `agent_workflow`, each conversation becomes one experience.

    A subclass implements `run_async`, which calls `update_reward` and returns the metrics of the run as a dict from
    name to number.
    """

    is_async = True

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        super().__init__(model, task, list(auxiliary_models or ()))
        self.auxiliary_models = self.auxiliary_model_wrappers  # models instead of clients, as in Trinity-RFT
        self._info: dict[str, Any] = {}

    @property
    def base_url(self) -> str:
        """Base URL of the policy, which ends in /v1."""
        return self.model.base_url

    @property
    def api_key(self) -> str:
        """API key of this run."""
        return self.model.api_key

    @property
    def model_name(self) -> str:
        """Name of the policy. The policy also answers requests with any other model name."""
        return self.model.model_path

    async def update_reward(
        self, reward: float, info: Mapping[str, Any] | None = None, sample_ids: Sequence[str] | None = None
    ) -> None:
        """Set the reward of all experiences of the run, and add `info` to their `info`.

        A later call replaces the reward. Raises ValueError if the reward is not a finite number, or if `sample_ids` is
        given.
        """
        if sample_ids is not None:
            raise ValueError(
                "update_reward: sample_ids (rewards of single requests) is not supported; set one reward per run, or"
                " return experiences with their own rewards from a Workflow (self.model.history)"
            )
        self.model.take_reward(json.dumps({"reward": float(reward)}))
        self._info.update(info or {})

    async def run_async(self) -> Any:
        """Run the agent on the task. Return the metrics of the run. Override this method."""
        raise NotImplementedError(f"{type(self).__name__} has no method `run_async`")

    def experiences_of(self, returned: Any) -> list[Experience]:
        """Return one experience for each conversation of the agent.

        The metrics in `returned` are added to the first experience. Raises TypeError if `returned` is neither a mapping
        nor None.
        """
        if returned is not None and not isinstance(returned, Mapping):
            raise TypeError(
                f"run_async returned {type(returned).__name__}, expected metrics (numbers by name); derive from"
                " Workflow to return experiences"
            )
        made, info, self._info = self.model.branches(), self._info, {}
        for number, experience in enumerate(made):
            experience.reward = self.model.reward
            experience.info = {**experience.info, **info}
            if number == 0:
                experience.metrics = {**experience.metrics, **(returned or {})}
        return made
