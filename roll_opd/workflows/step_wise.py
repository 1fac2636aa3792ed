"""Bases of multi-step workflows: each step's model calls are its own experiences, rewarded per step or at the end.

A step is one call of `step` (or `step_async`) with any number of model calls. Its experiences carry the number in
`eid.step`, from which multi-step advantages find a run's last step.
"""

from collections.abc import Sequence
from typing import Any

from roll_opd.workflows.interface import Task, Workflow, flag
from roll_opd.workflows.model import ModelWrapper
from roll_opd.workflows.workflow_experience import Experience

STEPS = "actual_env_steps"  # metric: number of steps of a run, Trinity-RFT's name


class _Steps(Workflow):
    """Shared parts of multi-step workflows."""

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
        """OpenAI client of this run, created on first use; None without `use_openai_client`."""
        if self._own_client is not None:
            return self._own_client
        run = (self.model.base_url, self.model.api_key) if self._uses_client else ("", "")
        if run != self._client[0]:  # a reset instance serves another run
            is_async = flag(self, "is_async")
            client = self.model.get_openai_async_client() if is_async else self.model.get_openai_client()
            self._client = (run, client)
        return self._client[1]

    @client.setter
    def client(self, client: Any) -> None:
        self._own_client = client

    @property
    def max_step_num(self) -> int:
        """Maximum number of steps of a run. Override it."""
        raise NotImplementedError(f"{type(self).__name__} has no property max_step_num; write it")

    def step(self, step_num: int) -> bool:
        """Do one step; return whether to continue. Override it."""
        raise NotImplementedError(f"{type(self).__name__} has no method step; write it")

    async def step_async(self, step_num: int) -> bool:
        """Do one step; return whether to continue. Override it in asynchronous workflows."""
        raise NotImplementedError(f"{type(self).__name__} has no method step_async; write it")

    def _of_step(self, number: int) -> list[Experience]:
        """Return the experiences of the step just done."""
        made = self.model.extract_experience_from_history()
        for one in made:
            one.eid.step = number
        return made


class StepWiseRewardWorkflow(_Steps):
    """Workflow with a reward per step. Implement `step`, `reward` and `max_step_num`."""

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
        """Return the reward of a step with the experiences `exps`. Override it."""
        raise NotImplementedError(f"{type(self).__name__} has no method reward; write it")


class AsyncStepWiseRewardWorkflow(StepWiseRewardWorkflow):
    """`StepWiseRewardWorkflow` in a coroutine. Implement `step_async`, `reward_async` and `max_step_num`."""

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
        """Return the reward of a step with the experiences `exps`. Override it."""
        raise NotImplementedError(f"{type(self).__name__} has no method reward_async; write it")


class RewardPropagationWorkflow(_Steps):
    """Workflow with one reward for all steps, computed at the end. Implement `step`, `reward` and `max_step_num`."""

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
        """Return the reward of the run with the experiences `exps`. Override it."""
        raise NotImplementedError(f"{type(self).__name__} has no method reward; write it")


class AsyncRewardPropagationWorkflow(RewardPropagationWorkflow):
    """`RewardPropagationWorkflow` in a coroutine. Implement `step_async`, `reward_async` and `max_step_num`."""

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
        """Return the reward of the run with the experiences `exps`. Override it."""
        raise NotImplementedError(f"{type(self).__name__} has no method reward_async; write it")


def rewarded(
    experiences: Sequence[Experience], reward: float, metrics: dict[str, float] | None = None
) -> list[Experience]:
    """Set the same reward and metrics on all `experiences`; return them."""
    for one in experiences:
        one.reward = reward
        one.metrics.update(metrics or {})
    return list(experiences)
