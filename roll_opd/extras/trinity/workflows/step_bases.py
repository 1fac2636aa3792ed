"""Base classes of users' workflows with several steps or turns.

A step is one call of `step` or `step_async`, which may call the model any number of times. Each experience has the
number of its step in `eid.step`. Multi-step advantages are computed from these numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from roll_opd.workflows.model_wrapper import ModelWrapper
from roll_opd.workflows.workflow_checks import flag
from roll_opd.workflows.workflow_experience import Experience
from roll_opd.workflows.workflow_interface import Task, Workflow

STEPS = "actual_env_steps"  # metric: number of steps of a run (the name is Trinity-RFT's)


class _Steps(Workflow):
    """Base class of all multi-step workflows."""

    _own_client: Any = None

    def __init__(
        self,
        *,
        task: Task,
        model: ModelWrapper,
        auxiliary_models: list | None = None,
        use_openai_client: bool = True,
    ) -> None:
        super().__init__(model, task, auxiliary_models)
        self._uses_client, self._client = use_openai_client, (("", ""), None)

    @property
    def client(self) -> Any:
        """OpenAI client of this run. It is created on first use.

        Without `use_openai_client`, it is None.
        """
        if self._own_client is not None:
            return self._own_client
        run = (self.model.base_url, self.model.api_key) if self._uses_client else ("", "")
        if run != self._client[0]:  # an instance that was reset serves another run
            is_async = flag(self, "is_async")
            client = self.model.get_openai_async_client() if is_async else self.model.get_openai_client()
            self._client = (run, client)
        return self._client[1]

    @client.setter
    def client(self, client: Any) -> None:
        self._own_client = client

    @property
    def max_step_num(self) -> int:
        """Maximum number of steps of a run. Override this property."""
        raise NotImplementedError(f"{type(self).__name__} has no property max_step_num; write it")

    def step(self, step_num: int) -> bool:
        """Do one step. Return whether the run continues. Override this method."""
        raise NotImplementedError(f"{type(self).__name__} has no method step; write it")

    async def step_async(self, step_num: int) -> bool:
        """Do one step. Return whether the run continues. Override this method in asynchronous workflows."""
        raise NotImplementedError(f"{type(self).__name__} has no method step_async; write it")

    def _of_step(self, number: int) -> list[Experience]:
        """Return the experiences of the latest step, and set `number` as their step."""
        made = self.model.extract_experience_from_history()
        for one in made:
            one.eid.step = number
        return made


class StepWiseRewardWorkflow(_Steps):
    """Workflow with a separate reward for each step. Implement `step`, `reward` and `max_step_num`."""

    def run(self) -> list[Experience]:
        """Return the experiences of all steps."""
        made: list[Experience] = []
        for number in range(self.max_step_num):
            continues = self.step(step_num=number)
            experiences = self._of_step(number)
            made += rewarded(experiences, self.reward(experiences, step_num=number))
            if not continues:
                break
        return made

    def reward(self, exps: list[Experience], step_num: int) -> float:
        """Return the reward of a step. Override this method. `exps` are the experiences of the step."""
        raise NotImplementedError(f"{type(self).__name__} has no method reward; write it")


class AsyncStepWiseRewardWorkflow(StepWiseRewardWorkflow):
    """`StepWiseRewardWorkflow` as a coroutine. Implement `step_async`, `reward_async` and `max_step_num`."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        """Return the experiences of all steps."""
        made: list[Experience] = []
        for number in range(self.max_step_num):
            continues = await self.step_async(step_num=number)
            experiences = self._of_step(number)
            made += rewarded(experiences, await self.reward_async(experiences, step_num=number))
            if not continues:
                break
        return made

    async def reward_async(self, exps: list[Experience], step_num: int) -> float:
        """Return the reward of a step. Override this method. `exps` are the experiences of the step."""
        raise NotImplementedError(f"{type(self).__name__} has no method reward_async; write it")


class RewardPropagationWorkflow(_Steps):
    """Workflow with one reward for all steps. Implement `step`, `reward` and `max_step_num`.

    The reward is computed after the last step.
    """

    def run(self) -> list[Experience]:
        """Return the experiences of all steps."""
        made: list[Experience] = []
        number = -1
        for number in range(self.max_step_num):
            continues = self.step(step_num=number)
            made += self._of_step(number)
            if not continues:
                break
        return rewarded(made, self.reward(made), {STEPS: number + 1})

    def reward(self, exps: list[Experience]) -> float:
        """Return the reward of the run. Override this method. `exps` are the experiences of all steps."""
        raise NotImplementedError(f"{type(self).__name__} has no method reward; write it")


class AsyncRewardPropagationWorkflow(RewardPropagationWorkflow):
    """`RewardPropagationWorkflow` as a coroutine. Implement `step_async`, `reward_async` and `max_step_num`."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        """Return the experiences of all steps."""
        made: list[Experience] = []
        number = -1
        for number in range(self.max_step_num):
            continues = await self.step_async(step_num=number)
            made += self._of_step(number)
            if not continues:
                break
        return rewarded(made, await self.reward_async(made), {STEPS: number + 1})

    async def reward_async(self, exps: list[Experience]) -> float:
        """Return the reward of the run. Override this method. `exps` are the experiences of all steps."""
        raise NotImplementedError(f"{type(self).__name__} has no method reward_async; write it")


def rewarded(
    experiences: Sequence[Experience], reward: float, metrics: dict[str, float] | None = None
) -> list[Experience]:
    """Set the same reward and the same metrics on all experiences. Return the experiences."""
    for one in experiences:
        one.reward = reward
        one.metrics.update(metrics or {})
    return list(experiences)


class MultiTurnWorkflow(Workflow):
    """Base class of workflows that convert a multi-turn conversation to one experience.

    Only the model's turns are trained on. As in Trinity-RFT, one call makes one run of a task. A subclass may make all
    runs in one call. It must then set `can_repeat = True` and the `eid.run` of each experience.
    """

    def process_messages_to_experience(
        self,
        messages: Sequence[Mapping[str, Any]],
        reward: float | None,
        info: Mapping[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        """Return a conversation of this run as one experience.

        The entries of `info` are added to the `info` of the experience. Numbers in `info` also become metrics. Raises
        ValueError if this run has no such conversation.
        """
        return self._described(self.model.convert_messages_to_experience(messages), reward, info, truncate_status)

    async def process_messages_to_experience_async(
        self,
        messages: Sequence[Mapping[str, Any]],
        reward: float | None,
        info: Mapping[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        """Async form of `process_messages_to_experience`."""
        made = await self.model.convert_messages_to_experience_async(messages)
        return self._described(made, reward, info, truncate_status)

    def _described(
        self, made: Experience, reward: float | None, info: Mapping[str, Any] | None, truncate_status: str | None
    ) -> Experience:
        made.reward = reward
        made.truncate_status = made.truncate_status or truncate_status
        made.info.update(info or {})
        numbers = {name: value for name, value in (info or {}).items() if isinstance(value, int | float)}
        made.metrics.update({name: float(value) for name, value in numbers.items()})
        return made
