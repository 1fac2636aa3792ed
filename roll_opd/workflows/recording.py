"""Record and train on the requests of an agent that calls the policy at an OpenAI address."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from roll_opd.workflows.experience import Experience
from roll_opd.workflows.interface import Task, Workflow
from roll_opd.workflows.model import ModelWrapper


class WorkflowWithRecording(Workflow):
    """Starts an agent with `base_url`, `api_key` and `model_name`, and learns from what it asked there.

    Implement `run_async`: it calls `update_reward` and returns the run's metrics, numbers by name. A run is one
    experience a conversation, as with `agent_workflow`.
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
        """The address of the policy, with the /v1."""
        return self.model.base_url

    @property
    def api_key(self) -> str:
        """The key of this run."""
        return self.model.api_key

    @property
    def model_name(self) -> str:
        """The name of the policy; requests with any other are answered too."""
        return self.model.model_path

    async def update_reward(
        self, reward: float, info: Mapping[str, Any] | None = None, sample_ids: Sequence[str] | None = None
    ) -> None:
        """Give all experiences of the run a reward and add to their `info`; the last call counts.

        ValueError for a reward that is no finite number, and for `sample_ids`.
        """
        if sample_ids is not None:
            raise ValueError(
                "update_reward: rewards of single requests (sample_ids) are not available; give the run one reward, or"
                " return experiences with their own rewards from a Workflow (self.model.history)"
            )
        self.model.take_reward(json.dumps({"reward": float(reward)}))
        self._info.update(info or {})

    async def run_async(self) -> Any:
        """Have the agent do the task; return the metrics of the run. Overwrite it."""
        raise NotImplementedError(f"{type(self).__name__} has no method `run_async`")

    def experiences_of(self, returned: Any) -> list[Experience]:
        """Return what the agent asked, one experience a conversation; `returned` are metrics, which the first has.

        TypeError where `returned` is neither a mapping nor None.
        """
        if returned is not None and not isinstance(returned, Mapping):
            raise TypeError(
                f"run_async returned {type(returned).__name__} where metrics, numbers by name, were expected; a"
                " Workflow returns experiences"
            )
        made, info, self._info = self.model.branches(), self._info, {}
        for number, experience in enumerate(made):
            experience.reward = self.model.reward
            experience.info = {**experience.info, **info}
            if number == 0:
                experience.metrics = {**experience.metrics, **(returned or {})}
        return made
