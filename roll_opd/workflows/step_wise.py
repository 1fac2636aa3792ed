"""The bases of workflows of several steps, each with experiences of its own: what the model was asked in a step.

A step is one call of `step` (or `step_async`), in which the model may be asked as often as needed. Its experiences say
in `eid.step` which one it was; advantages of several steps compare runs, and know a run's last step by that.
"""

from collections.abc import Sequence
from typing import Any

from roll_opd.workflows.interface import Task, Workflow, flag
from roll_opd.workflows.model import ModelWrapper
from roll_opd.workflows.workflow_experience import Experience

STEPS = "actual_env_steps"  # the metric of a run's steps, under Trinity-RFT's name


class _Steps(Workflow):
    """What workflows of several steps share."""

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
        """An OpenAI client of this run, asynchronous where it is, made when asked for; None where none is wanted."""
        if self._own_client is not None:
            return self._own_client
        run = (self.model.base_url, self.model.api_key) if self._uses_client else ("", "")
        if run != self._client[0]:  # an instance that can be reset serves one run after another
            is_async = flag(self, "is_async")
            client = self.model.get_openai_async_client() if is_async else self.model.get_openai_client()
            self._client = (run, client)
        return self._client[1]

    @client.setter
    def client(self, client: Any) -> None:
        self._own_client = client

    @property
    def max_step_num(self) -> int:
        """Most steps of a run. Overwrite it."""
        raise NotImplementedError(f"{type(self).__name__} has no property max_step_num; write it")

    def step(self, step_num: int) -> bool:
        """Do a step, and return whether another one is to follow. Overwrite it."""
        raise NotImplementedError(f"{type(self).__name__} has no method step; write it")

    async def step_async(self, step_num: int) -> bool:
        """Do a step, and return whether another one is to follow. Overwrite it in asynchronous workflows."""
        raise NotImplementedError(f"{type(self).__name__} has no method step_async; write it")

    def _of_step(self, number: int) -> list[Experience]:
        """Return what the model was asked in the step that has just been done."""
        made = self.model.extract_experience_from_history()
        for one in made:
            one.eid.step = number
        return made


class StepWiseRewardWorkflow(_Steps):
    """A reward for each step. Implement `step`, `reward` and `max_step_num`."""

    def run(self) -> list[Experience]:
        """Return the experiences of all steps."""
        made: list[Experience] = []
        for number in range(self.max_step_num):
            goes_on = self.step(step_num=number)
            of_step = self._of_step(number)
            made += rewarded(of_step, self.reward(of_step, step_num=number))
            if not goes_on:
                break
        return made

    def reward(self, exps: list[Experience], step_num: int) -> float:
        """Return the reward of a step, whose experiences are `exps`. Overwrite it."""
        raise NotImplementedError(f"{type(self).__name__} has no method reward; write it")


class AsyncStepWiseRewardWorkflow(StepWiseRewardWorkflow):
    """`StepWiseRewardWorkflow` in a coroutine. Implement `step_async`, `reward_async` and `max_step_num`."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        """Return the experiences of all steps."""
        made: list[Experience] = []
        for number in range(self.max_step_num):
            goes_on = await self.step_async(step_num=number)
            of_step = self._of_step(number)
            made += rewarded(of_step, await self.reward_async(of_step, step_num=number))
            if not goes_on:
                break
        return made

    async def reward_async(self, exps: list[Experience], step_num: int) -> float:
        """Return the reward of a step, whose experiences are `exps`. Overwrite it."""
        raise NotImplementedError(f"{type(self).__name__} has no method reward_async; write it")


class RewardPropagationWorkflow(_Steps):
    """One reward for all steps, known at the end. Implement `step`, `reward` and `max_step_num`."""

    def run(self) -> list[Experience]:
        """Return the experiences of all steps."""
        made: list[Experience] = []
        number = -1
        for number in range(self.max_step_num):
            goes_on = self.step(step_num=number)
            made += self._of_step(number)
            if not goes_on:
                break
        return rewarded(made, self.reward(made), {STEPS: number + 1})

    def reward(self, exps: list[Experience]) -> float:
        """Return the reward of the run, whose experiences are `exps`. Overwrite it."""
        raise NotImplementedError(f"{type(self).__name__} has no method reward; write it")


class AsyncRewardPropagationWorkflow(RewardPropagationWorkflow):
    """`RewardPropagationWorkflow` in a coroutine. Implement `step_async`, `reward_async` and `max_step_num`."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        """Return the experiences of all steps."""
        made: list[Experience] = []
        number = -1
        for number in range(self.max_step_num):
            goes_on = await self.step_async(step_num=number)
            made += self._of_step(number)
            if not goes_on:
                break
        return rewarded(made, await self.reward_async(made), {STEPS: number + 1})

    async def reward_async(self, exps: list[Experience]) -> float:
        """Return the reward of the run, whose experiences are `exps`. Overwrite it."""
        raise NotImplementedError(f"{type(self).__name__} has no method reward_async; write it")


def rewarded(
    experiences: Sequence[Experience], reward: float, metrics: dict[str, float] | None = None
) -> list[Experience]:
    """Give all `experiences` one reward, and the same metrics; return them."""
    for one in experiences:
        one.reward = reward
        one.metrics.update(metrics or {})
    return list(experiences)
