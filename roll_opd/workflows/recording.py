"""Base class of users' workflows with an agent that calls the policy over HTTP."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from roll_opd.workflows.model_wrapper import ModelWrapper
from roll_opd.workflows.workflow_experience import Experience
from roll_opd.workflows.workflow_interface import Task, Workflow


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
