"""Single-turn workflows: one question and one answer.

The answer is scored by the configuration's `rewards` or by the reward function of the task.
"""

from dataclasses import asdict
from typing import Any

from roll_opd.data.row_formats import BadRow, parse_messages
from roll_opd.data.template_check import omission
from roll_opd.extras.trinity.workflows.reward_functions import MathRewardFn, accuracy
from roll_opd.workflows.workflow_experience import Experience
from roll_opd.workflows.workflow_interface import WORKFLOWS, Task, Workflow, parts_of

THINK_AND_ANSWER = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant"
    " first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning"
    " process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., <think>"
    " reasoning process here </think> <answer> answer here </answer>."
)
THINK_AND_BOX = (
    "You are a helpful assistant and solve problems of mathematics. First think, and write your reasoning between"
    " <think> and </think>; then answer. The final answer stands in \\boxed{}, in closed form."
)
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


class BaseSimpleWorkflow(Workflow):
    """Base class of single-turn workflows. It builds the messages and scores the responses.

    One call makes one run, unless a subclass sets `can_repeat = True`.
    """

    can_reset = True
    _rollout_args: dict[str, Any] | None = None

    def __init__(self, *, task: Task, model: Any, auxiliary_models: list | None = None) -> None:
        super().__init__(model, task, auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        """Prepare for the next task."""
        self.task, self.raw_task, self.format_args = task, task.raw_task, task.format_args
        self.system_prompt, self.reply_prefix = task.format_args.system_prompt, task.format_args.reply_prefix
        self.truth, self.task_desc, self.is_eval = task.truth, task.task_desc, task.is_eval
        self.workflow_args, self.reward_fn_args = task.workflow_args, task.reward_fn_args
        self.reward_fn = task.reward_fn(**task.reward_fn_args) if task.reward_fn else None

    @property
    def rollout_args(self) -> dict[str, Any]:
        """The sampling options of a call. `n` is the number of runs, so each run has one response.

        Workflows of older versions assign other options to this attribute.
        """
        return {**(self._rollout_args or asdict(self.task.rollout_args)), "n": self.repeat_times}

    @rollout_args.setter
    def rollout_args(self, given: dict[str, Any]) -> None:
        self._rollout_args = given

    def format_messages(self) -> list[dict[str, str]]:
        """Return the messages that the model continues.

        Raises ValueError if the chat template drops a part of the messages.
        """
        messages = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        messages += conversation_of(self.task)
        if left := omission(self.model.tokenizer, messages):
            raise ValueError(f"the chat template {left}")
        if self.reply_prefix:
            messages.append({"role": "assistant", "content": self.reply_prefix})
        return messages

    def scored(self, responses: list[Experience]) -> list[Experience]:
        """Set the run id and the reward of each response, and return the responses.

        Each response is one run.
        """
        for run, response in enumerate(responses, self.run_id_base):
            response.eid.run = run
            self.score(response)
        return responses

    def score(self, response: Experience) -> None:
        """Set the reward of a response with the reward function of the task, if the task has one."""
        if self.reward_fn is not None:
            parts = parts_of(self.reward_fn, self.reward_inputs(response))
            response.metrics.update(parts)
            response.reward = sum(parts.values())

    def reward_inputs(self, response: Experience) -> dict[str, Any]:
        """Return the keyword arguments with which a reward function may be called for a response."""
        return {
            "response": response.response_text,
            "truth": self.truth,
            "prompt": self.task_desc,
            "response_token": response.tokens[response.prompt_length :],
            "info": response.info,
        }


def conversation_of(task: Task) -> list[dict[str, Any]]:
    """Return the prompt of a row as messages. A prompt that is a string becomes a user message.

    Raises ValueError for a row without a prompt.
    """
    row, name = task.raw_task, task.format_args.prompt_key
    prompt = row[name] if name in row else row.get("messages")
    if isinstance(prompt, str) and name in row and name != "messages":
        return [{"role": "user", "content": prompt}]
    try:
        return [dict(message) for message in parse_messages(prompt)]
    except BadRow as bad:
        raise ValueError(
            f"the row has no prompt in {name!r} ({bad.kind}: {bad.detail}); set prompt_key to the column of the prompt"
        ) from None


@WORKFLOWS.register_module("simple_workflow")
class SimpleWorkflow(BaseSimpleWorkflow):
    """Sample an answer to the row's prompt."""

    can_repeat = True

    def run(self) -> list[Experience]:
        """Return one response per run."""
        return self.scored(self.model.chat(self.format_messages(), **self.rollout_args))


@WORKFLOWS.register_module("async_simple_workflow")
class AsyncSimpleWorkflow(BaseSimpleWorkflow):
    """`simple_workflow` as a coroutine. A coroutine costs less than a thread."""

    can_repeat = is_async = True

    async def run_async(self) -> list[Experience]:
        """Return one response per run."""
        return self.scored(await self.model.chat_async(self.format_messages(), **self.rollout_args))


class _Thinking(BaseSimpleWorkflow):
    def reset(self, task: Task) -> None:
        super().reset(task)
        if self.system_prompt is None and task.reward_fn in (
            None,
            MathRewardFn,
        ):  # other reward functions expect a different format of the answer
            self.system_prompt = THINK_AND_ANSWER


class _Boxed(BaseSimpleWorkflow):
    """Base class of workflows with boxed answers, for chat models and base models.

    The default system prompt asks for a boxed answer. A system prompt in the configuration replaces it.
    """

    use_base = with_think = False
    format_score_coef = 0.1

    def reset(self, task: Task) -> None:
        super().reset(task)
        self.use_base = bool(self.workflow_args.get("use_base", False))
        self.with_think = bool(self.workflow_args.get("with_think", False))
        self.format_score_coef = self.workflow_args.get("format_score_coef", 0.1)
        if self.system_prompt is None:
            self.system_prompt = THINK_AND_BOX if self.with_think else BOXED

    def format_prompt(self) -> str:
        """Return the prompt text for a base model."""
        system = [f"System:{self.system_prompt}"] if self.system_prompt else []
        turns = [f"{turn['role'].capitalize()}:\n{turn['content']}" for turn in conversation_of(self.task)]
        return "\n".join([*system, *turns, "Assistant:\n"])

    def reward_inputs(self, response: Experience) -> dict[str, Any]:
        """Return the keyword arguments with which a reward function may be called for a response."""
        own = {"with_think": self.with_think, "format_score_coef": self.format_score_coef}
        return {**super().reward_inputs(response), **own}


class _BoxedInQuestion(BaseSimpleWorkflow):
    def format_messages(self) -> list[dict[str, str]]:
        messages = super().format_messages()
        if not self.system_prompt:
            messages.insert(0, {"role": "system", "content": "You are a helpful assistant."})
        return [
            {**message, "content": f"{message['content']}\n{BOXED}"} if message["role"] == "user" else message
            for message in messages
        ]


@WORKFLOWS.register_module("math_workflow")
class MathWorkflow(_Thinking, SimpleWorkflow):
    """A mathematics question with the system prompt of DeepSeek-R1-Zero.

    A system prompt in the configuration replaces this default. As in Trinity-RFT, there is no default if
    `workflow_reward` is set to a function other than `math_reward`.
    """


@WORKFLOWS.register_module("async_math_workflow")
class AsyncMathWorkflow(_Thinking, AsyncSimpleWorkflow):
    """`math_workflow` as a coroutine."""


@WORKFLOWS.register_module("math_boxed_workflow", arguments=("use_base", "with_think", "format_score_coef"))
class MathBoxedWorkflow(_Boxed, SimpleWorkflow):
    """A mathematics question with a boxed answer.

    `workflow_args` may have three keys:

    - `use_base`: the prompt is sent as text, without the chat template.
    - `with_think`: the system prompt asks for a thought in tags before the answer. The value is also passed to the
      reward function.
    - `format_score_coef`: the value is passed to the reward function.
    """

    def run(self) -> list[Experience]:
        """Return one response per run."""
        if not self.use_base:
            return super().run()
        return self.scored(self.model.generate([self.format_prompt()], **self.rollout_args))


@WORKFLOWS.register_module("async_math_boxed_workflow", arguments=("use_base", "with_think", "format_score_coef"))
class AsyncMathBoxedWorkflow(_Boxed, AsyncSimpleWorkflow):
    """`math_boxed_workflow` as a coroutine."""

    async def run_async(self) -> list[Experience]:
        """Return one response per run."""
        if not self.use_base:
            return await super().run_async()
        return self.scored(await self.model.generate_async([self.format_prompt()], **self.rollout_args))


@WORKFLOWS.register_module("on_policy_distill_workflow")
class OnPolicyDistillWorkflow(AsyncSimpleWorkflow):
    """Sample an answer to the row's prompt. The teachers of the configuration score the answer.

    A subclass may override `compute_reward` to set a reward, as in Trinity-RFT. Pure distillation records this reward
    but does not train on it.
    """

    def reset(self, task: Task) -> None:
        """Prepare for the next task."""
        super().reset(task)
        self.temperature = task.workflow_args.get("temperature", 1.0)

    @property
    def teacher_model(self) -> Any:
        """The first auxiliary model. It is meant for subclasses whose `run_async` calls the teacher."""
        if not self.auxiliary_model_wrappers:
            raise ValueError(
                "teacher_model: auxiliary_models is empty; add the teacher to this list, or let the configuration's"
                " teachers score the responses"
            )
        return self.auxiliary_model_wrappers[0]

    def compute_reward(self, response: Experience) -> float:
        """Return the reward of a response. It is called only if a subclass overrides it."""
        return 0.0

    def score(self, response: Experience) -> None:
        """Set the reward of a response from the first of three sources.

        If a user's class overrides `compute_reward`, that method gives the reward. Otherwise the reward function of the
        task gives it. The `compute_reward` of a built-in class is called only if the configuration sets no reward.
        """
        written_by = next(kind for kind in type(self).__mro__ if "compute_reward" in vars(kind))
        is_own = written_by.__module__ != __name__
        if is_own or (written_by is not OnPolicyDistillWorkflow and not (self.reward_fn or self.task.is_scored)):
            response.reward = self.compute_reward(response)
        else:
            super().score(response)


@WORKFLOWS.register_module("on_policy_distill_math_workflow")
class OnPolicyDistillMathWorkflow(_BoxedInQuestion, OnPolicyDistillWorkflow):
    """A mathematics question with a boxed answer. The reward is 1.0 if the boxed answer is correct.

    If the configuration has `rewards` or a `workflow_reward`, they are used instead. A `compute_reward` that a subclass
    overrides is always used.
    """

    def compute_reward(self, response: Experience) -> float:
        """Return 1.0 if the final answer is correct, else 0.0. The metric `accuracy` records the same value."""
        if not response.response_text or self.truth is None:
            return 0.0
        right = accuracy(response.response_text, self.truth)
        response.metrics = {**(response.metrics or {}), "accuracy": right}
        return right
