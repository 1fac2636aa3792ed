"""`try_again_workflow`: several attempts to answer a question, with feedback after each wrong answer.

Each attempt is a step with one experience.
"""

from dataclasses import asdict
from typing import Any

from roll_opd.extras.trinity.workflows.reward_functions import AccuracyReward
from roll_opd.extras.trinity.workflows.single_turn import conversation_of
from roll_opd.extras.trinity.workflows.step_bases import AsyncStepWiseRewardWorkflow
from roll_opd.workflows.workflow_experience import Experience
from roll_opd.workflows.workflow_interface import WORKFLOWS, Task, parts_of

FEEDBACK = "That is not right. Look for the mistake, and answer again."


@WORKFLOWS.register_module("try_again_workflow", arguments=("max_steps", "enough", "feedback"))
class TryAgainWorkflow(AsyncStepWiseRewardWorkflow):
    """Ask a question, and ask again with feedback while the reward is too low. Each attempt is one step.

    `workflow_args` may have three keys:

    - `max_steps`: maximum number of attempts (default 3).
    - `enough`: reward that ends the attempts (default 1.0).
    - `feedback`: user message after a wrong answer.

    The reward is computed by the `workflow_reward` of the configuration, or by `accuracy_reward` if none is set.
    """

    can_reset = True

    def __init__(self, *, task: Task, model: Any, auxiliary_models: list | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models, use_openai_client=False)
        self.reset(task)

    def reset(self, task: Task) -> None:
        """Prepare for the next task."""
        self.task = task
        self.reward_fn = (task.reward_fn or AccuracyReward)(**task.reward_fn_args)
        system = task.format_args.system_prompt
        self.messages = [{"role": "system", "content": system}] if system else []
        self.messages += conversation_of(task)
        self.parts: dict[str, float] = {}

    @property
    def max_step_num(self) -> int:
        """Maximum number of attempts."""
        return int(self.task.workflow_args.get("max_steps", 3))

    async def step_async(self, step_num: int) -> bool:
        """Sample one answer. Return whether its reward is so low that another attempt is needed."""
        (response,) = await self.model.chat_async(self.messages, **{**asdict(self.task.rollout_args), "n": 1})
        text = response.response_text or ""
        inputs = {"response": text, "truth": self.task.truth, "prompt": self.task.task_desc, "info": response.info}
        self.parts = parts_of(self.reward_fn, {**inputs, "response_token": response.tokens[response.prompt_length :]})
        feedback = self.task.workflow_args.get("feedback", FEEDBACK)
        self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": feedback}]
        return sum(self.parts.values()) < float(self.task.workflow_args.get("enough", 1.0))

    async def reward_async(self, exps: list[Experience], step_num: int) -> float:
        """Return the reward of the latest attempt."""
        for one in exps:
            one.metrics.update(self.parts)
        return sum(self.parts.values())
