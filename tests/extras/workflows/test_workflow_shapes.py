"""Workflows in the forms of Trinity-RFT's own workflows, old and new, with their undocumented behaviour."""

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from roll_opd.config.plan import SamplingPlan
from roll_opd.data.dataset import Prompt
from roll_opd.extras.trinity.workflows.multi_step import TryAgainWorkflow
from roll_opd.extras.trinity.workflows.single_turn import BOXED, THINK_AND_BOX
from roll_opd.inference.vllm_requests import Completion
from roll_opd.workflows import (
    WORKFLOWS,
    AsyncMathBoxedWorkflow,
    Experience,
    FormatConfig,
    GenerationConfig,
    MathBoxedRewardFn,
    MathBoxedWorkflow,
    MathRewardFn,
    MathWorkflow,
    ModelWrapper,
    MultiTurnWorkflow,
    RewardFn,
    SimpleWorkflow,
    Task,
    Workflow,
    WorkflowError,
    get_logger,
)
from roll_opd.workflows.workflow_experience import TokenLimits, by_run, trained
from tests.workflows.sampled import Sampled
from tests.workflows.test_call_tree import play

MODEL = Path(__file__).parents[3] / "examples" / "demo" / "models" / "student"
RUNS = 3
logger = get_logger(__name__)


class Asked(Sampled):
    """Remembers how it was to sample."""

    sampling: SamplingPlan

    async def generate(
        self, group: int, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: SamplingPlan
    ) -> list[Completion]:
        self.sampling = sampling
        return await super().generate(group, prompts, seeds, sampling)


@pytest.fixture
def engine() -> Asked:
    answers = ["46<|end|>", "12<|end|>", "46<|end|>", "7<|end|>", "46<|end|>", "7<|end|>"]
    return Asked(AutoTokenizer.from_pretrained(MODEL), answers)


def made_by(kind: Any, engine: Asked, runs: int = 1, **task: Any) -> list[Experience]:
    """Make a workflow, with a reset where it takes one, and have it make its runs, as its process does."""
    row = {
        "question": "12+34=",
        "answer": "46",
        "deep": {"answer": "46"},
        "said": [{"role": "user", "content": "1+1="}],
    }
    given = Task(
        raw_task=row,
        format_args=FormatConfig(
            task.pop("prompt_key", "question"), task.pop("response_key", "answer"), task.pop("system", None)
        ),
        rollout_args=GenerationConfig(n=runs, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=9),
        repeat_times=runs,
        **task,
    )

    async def script(model: ModelWrapper) -> list[Experience]:
        workflow: Workflow = kind(task=given, model=model, auxiliary_models=[])
        for _ in range(2 if workflow.resettable else 1):
            if workflow.resettable:
                workflow.reset(given)
            if workflow.repeatable:
                workflow.set_repeat_times(runs, 0)
        return await workflow.run_async() if kind.is_async else await asyncio.to_thread(workflow.run)

    return play(engine, engine._tokenizer, script, runs)


class Older(SimpleWorkflow):
    """Sets `rollout_args` itself, and omits keys that its base class would read."""

    def reset(self, task: Task) -> None:
        self.task_desc, self.truth = task.task_desc, task.truth
        self.system_prompt, self.reply_prefix = task.format_args.system_prompt, task.format_args.reply_prefix
        self.rollout_args = asdict(task.rollout_args)
        self.coefficient = task.workflow_args.get("coefficient", 0.5)

    def run(self) -> list[Experience]:
        responses = self.model.chat(self.format_messages(), **self.rollout_args)
        for run, response in enumerate(responses):
            if response.metrics is None:
                response.metrics = {}
            parts = {"right": self.coefficient * float(response.response_text == self.truth)}
            response.metrics.update(parts)
            response.reward = sum(parts.values())
            response.eid.run = run
            logger.debug("reward %s", response.reward)
        return responses


def test_rollout_args_of_ones_own(engine: Asked) -> None:
    made = made_by(Older, engine, RUNS, workflow_args={"coefficient": 2.0})
    assert [one.reward for one in made] == [2.0, 0.0, 2.0] and [one.eid.run for one in made] == [0, 1, 2]
    assert engine.sampling.max_new_tokens == 9 and list(by_run(made, range(RUNS))) == [0, 1, 2]


class Filtered(MultiTurnWorkflow):
    """Makes all runs in one call and names none; a wrong one is replaced by an empty experience."""

    can_reset = True

    def __init__(self, model: ModelWrapper, task: Task, auxiliary_models: list | None = None) -> None:
        super().__init__(model=model, task=task)
        self.n = task.repeat_times
        self.nothing = Experience(
            tokens=torch.tensor([0, 0]),
            prompt_length=1,
            action_mask=torch.tensor([False]),
            logprobs=torch.tensor([0.0]),
            metrics={"right": 0.0},
            reward=0.0,
        )

    def reset(self, task: Task) -> None:
        self.task = task

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        self.n = repeat_times

    def run(self) -> list[Experience]:
        made = []
        for _ in range(self.n):
            messages = [{"role": "user", "content": self.task.task_desc}]
            text = self.model.chat(messages, n=1)[0].response_text
            messages.append({"role": "assistant", "content": text})
            one = self.process_messages_to_experience(messages, float(text == self.task.truth), {"right": 1})
            made.append(one if one.reward else copy.deepcopy(self.nothing))
        return made


def test_runs_that_are_not_named_are_one_each(engine: Asked) -> None:
    made = made_by(Filtered, engine, RUNS)
    numbered = by_run(made, range(RUNS))
    prompt = Prompt("p", 0, "t", np.array([1]), None, {})
    experiences = [
        trained(one, TokenLimits(99, 999), prompt, 0, run, 0, step) for run, ((step, one),) in numbered.items()
    ]
    assert [one.id for one in experiences] == ["p#0/0", "p#0/1", "p#0/2"]
    assert [one.reward for one in experiences] == [1.0, 0.0, 1.0]
    assert [int(one.action_mask.sum()) for one in experiences] == [3, 0, 3]  # two digits and the end
    assert [one.metrics["right"] for one in experiences] == [1.0, 0.0, 1.0]


class Evaluating(Workflow):
    """Samples in its own way, and scores in metrics alone."""

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.sampling = asdict(GenerationConfig(temperature=0.6, top_p=0.8, logprobs=0, n=1))

    def run(self) -> list[Experience]:
        responses = self.model.chat([{"role": "user", "content": self.task.raw_task["question"]}], **self.sampling)
        for response in responses:
            response.metrics.update({"accuracy": response.response_text == self.task.truth})
        return responses


def test_what_a_generation_config_does_not_say_is_as_configured(engine: Asked) -> None:
    (made,) = made_by(Evaluating, engine)
    assert (engine.sampling.temperature, engine.sampling.top_p, engine.sampling.max_new_tokens) == (0.6, 0.8, 9)
    assert made.reward is None and made.metrics == {"accuracy": True}


class Nested(MathBoxedWorkflow):
    """Takes its question and its answer from elsewhere in the row, and calls a reward function made by itself."""

    class Right(RewardFn):
        def __call__(self, response: str, truth: str, **kwargs: Any) -> dict[str, float]:
            return {"right": float(response == truth)}

    def reset(self, task: Task) -> None:
        super().reset(task)
        self.reward_fn = self.Right(**self.reward_fn_args)
        self.truth = task.raw_task["deep"]["answer"]

    def format_messages(self) -> list[dict[str, str]]:
        assert self.raw_task["said"] and self.workflow_args == {}
        return self.raw_task["said"]


def test_a_question_that_is_elsewhere_in_the_row(engine: Asked) -> None:
    made = made_by(Nested, engine, RUNS, prompt_key="said.content", response_key="deep.answer")
    assert [one.reward for one in made] == [1.0, 0.0, 1.0]
    assert [one.metrics for one in made] == [{"right": 1.0}, {"right": 0.0}, {"right": 1.0}]


class Given(RewardFn):
    """Accepts only the arguments that it names."""

    def __call__(self, response: str, truth: str, with_think: bool, response_token: Any, prompt: str) -> dict:
        assert (response, truth, with_think, prompt) == ("46", "46", True, "12+34=")
        return {"tokens": float(len(response_token))}


class GivenAll(RewardFn):
    """Accepts all arguments."""

    def __call__(self, **given: Any) -> dict[str, float]:
        assert given.keys() >= {"response", "truth", "prompt", "response_token", "info"}
        assert given["format_score_coef"] == 0.3 and given["with_think"]
        return {"all": 1.0}


class Brief(RewardFn):
    def __call__(self, response: str) -> dict[str, float]:
        return {"brief": float(len(response))}


@pytest.mark.parametrize("kind", [MathBoxedWorkflow, AsyncMathBoxedWorkflow])
@pytest.mark.parametrize(
    ("reward", "parts"),
    [(Given, {"tokens": 3.0}), (GivenAll, {"all": 1.0}), (MathBoxedRewardFn, {"accuracy": 1, "format_score": -0.3})],
)
def test_reward_functions_get_the_arguments_that_trinity_passes(
    kind: Any, reward: Any, parts: dict, engine: Asked
) -> None:
    args = {"with_think": True, "format_score_coef": 0.3}
    (made,) = made_by(kind, engine, workflow_args=args, reward_fn=reward)
    assert made.metrics == parts and made.reward == pytest.approx(sum(parts.values()))


def test_a_reward_function_that_takes_little(engine: Asked) -> None:
    assert made_by(SimpleWorkflow, engine, reward_fn=Brief)[0].reward == 2.0
    assert made_by(TryAgainWorkflow, engine, reward_fn=Brief, workflow_args={"enough": 2.0})[0].reward == 2.0


@pytest.mark.parametrize("kind", [MathBoxedWorkflow, AsyncMathBoxedWorkflow])
@pytest.mark.parametrize("system", [None, "", "Add."])
@pytest.mark.parametrize("with_think", [False, True])
def test_a_box_is_asked_for(kind: Any, system: str | None, with_think: bool, engine: Asked) -> None:
    """As a system prompt, unless the configuration has one; a base model gets the plain text of Trinity-RFT."""
    tokenizer = engine._tokenizer
    args = {"use_base": True, "with_think": with_think}
    chosen = {None: THINK_AND_BOX if with_think else BOXED, "": "", "Add.": "Add."}[system]
    made_by(kind, engine, 2, workflow_args={"with_think": with_think}, system=system)
    made_by(kind, engine, 2, workflow_args=args, system=system)
    messages = [{"role": "system", "content": chosen}] if chosen else []
    messages.append({"role": "user", "content": "12+34="})
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    text = (f"System:{chosen}\n" if chosen else "") + "User:\n12+34=\nAssistant:\n"
    assert [tokenizer.decode(prompt) for prompt in engine.asked] == [
        tokenizer.decode(tokenizer(text).input_ids) for text in (chat, chat, text, text)
    ]


@pytest.mark.parametrize(
    ("reward", "system", "prompted"),
    [
        (None, None, True),
        (MathRewardFn, None, True),
        (MathBoxedRewardFn, None, False),
        (Brief, None, False),
        (None, "", False),
        (None, "Add.", False),
    ],
)
def test_answers_in_tags_are_asked_for_where_they_are_read(
    reward: Any, system: str | None, prompted: bool, engine: Asked
) -> None:
    made_by(MathWorkflow, engine, reward_fn=reward, system=system)
    assert ("<answer>" in engine._tokenizer.decode(engine.asked[0])) == prompted


def test_log_probs_of_a_teacher_as_an_attribute(engine: Asked) -> None:
    class Taught(Workflow):
        is_async = True

        async def run_async(self) -> list[Experience]:
            (response,) = await self.model.chat_async([{"role": "user", "content": self.task.task_desc}])
            response.teacher_logprobs = response.logprobs - 0.5
            return [response]

    (made,) = made_by(Taught, engine)
    found = trained(made, TokenLimits(99, 999), Prompt("p", 0, "t", np.array([1]), None, {}), 0, 0, 0)
    assert made.logprobs is not None
    np.testing.assert_allclose(found.teacher_logprobs["teacher_logprobs"], made.logprobs.numpy() - 0.5)


def test_all_of_a_response_is_the_models_unless_a_mask_says_less() -> None:
    def learned(made: Experience) -> list[bool]:
        return trained(
            made, TokenLimits(99, 999), Prompt("p", 0, "t", np.array([1]), None, {}), 0, 0, 0
        ).action_mask.tolist()

    made = Experience(tokens=[1, 2, 3], logprobs=[-1.0, -2.0])
    assert learned(made) == made.action_mask.tolist() == [True, True]
    made.action_mask = [True, False]
    assert learned(made) == [True, False]
    made.action_mask = [True]
    with pytest.raises(ValueError, match="action_mask has shape"):
        learned(made)
    with pytest.raises(ValueError, match="wrote are missing"):
        learned(Experience(tokens=[1, 2, 3]))
    assert learned(Experience(tokens=[1, 2], prompt_length=2)) == []


@pytest.mark.parametrize("own_first", [True, False])
def test_a_workflow_of_ones_own_takes_the_name_of_a_built_in_one(
    monkeypatch: pytest.MonkeyPatch, own_first: bool
) -> None:
    """In either order of their modules; two of one's own under one name are still an error."""
    built_in = WORKFLOWS.get("math_workflow")
    register = WORKFLOWS.register_module("math_workflow")
    own, other = (type("Mine", (built_in,), {"__module__": module}) for module in ("my_file", "my_other_file"))
    monkeypatch.delitem(WORKFLOWS._registered, "math_workflow")  # as in a new process
    for one in (own, built_in) if own_first else (built_in, own):
        assert register(one) is one
    assert WORKFLOWS.get("math_workflow") is own and register(own) is own
    with pytest.raises(WorkflowError, match="a workflow named 'math_workflow' is already registered"):
        register(other)
