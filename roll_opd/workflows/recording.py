"""Record and train on the requests of an agent that calls the policy at an OpenAI address."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from roll_opd.workflows.interface import Task, Workflow
from roll_opd.workflows.model import ModelWrapper
from roll_opd.workflows.workflow_experience import Experience


class WorkflowWithRecording(Workflow):
    """Base of workflows that start an agent with `base_url`, `api_key` and `model_name` and train on its requests.

    Implement `run_async`: it calls `update_reward` and returns the run's metrics, numbers by name. Each conversation of
    a run is one experience, as with `agent_workflow`.
    """

    is_async = True

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        super().__init__(model, task, list(auxiliary_models or ()))
        self.auxiliary_models = self.auxiliary_model_wrappers  # models, not clients, as in Trinity-RFT
        self._info: dict[str, Any] = {}

    @property
    def base_url(self) -> str:
        """The address of the policy, ending in /v1."""
        return self.model.base_url

    @property
    def api_key(self) -> str:
        """The key of this run."""
        return self.model.api_key

    @property
    def model_name(self) -> str:
        """The name of the policy; requests with other names are answered too."""
        return self.model.model_path

    async def update_reward(
        self, reward: float, info: Mapping[str, Any] | None = None, sample_ids: Sequence[str] | None = None
    ) -> None:
        """Set the reward of all experiences of the run and add to their `info`; the last call counts.

        Raises ValueError for a reward that is not a finite number, and for `sample_ids`.
        """
        if sample_ids is not None:
            raise ValueError(
                "update_reward: sample_ids (rewards of single requests) is not supported; set one reward per run, or"
                " return experiences with their own rewards from a Workflow (self.model.history)"
            )
        self.model.take_reward(json.dumps({"reward": float(reward)}))
        self._info.update(info or {})

    async def run_async(self) -> Any:
        """Run the agent on the task and return the metrics of the run. Override it."""
        raise NotImplementedError(f"{type(self).__name__} has no method `run_async`")

    def experiences_of(self, returned: Any) -> list[Experience]:
        """Return the agent's requests as one experience per conversation; the first has the metrics `returned`.

        Raises TypeError if `returned` is neither a mapping nor None.
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
