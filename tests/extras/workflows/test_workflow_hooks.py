"""Hooks of Trinity-RFT's workflow classes: called as in Trinity-RFT, or refused by name before a run starts."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from transformers import AutoTokenizer

from roll_opd import workflows
from roll_opd.data.dataset import Prompt
from roll_opd.workflows import (
    AsyncSimpleWorkflow,
    AsyncStepWiseRewardWorkflow,
    Experience,
    FormatConfig,
    GenerationConfig,
    MathBoxedWorkflow,
    MultiTurnWorkflow,
    OnPolicyDistillMathWorkflow,
    OnPolicyDistillWorkflow,
    RewardFn,
    RewardPropagationWorkflow,
    SimpleWorkflow,
    Task,
    Workflow,
    WorkflowError,
    WorkflowWithRecording,
)
from roll_opd.workflows.builtin.agent import AgentWorkflow
from roll_opd.workflows.plugins import find_workflow, load_plugins
from roll_opd.workflows.workflow_checks import hook_problems
from roll_opd.workflows.workflow_experience import EID, TokenLimits, trained
from tests.workflows.test_workflow_endpoint import Served, served

MODEL = Path(__file__).parents[3] / "examples" / "demo" / "models" / "student"
ANSWERS = ["46<|end|>", "7<|end|>", "46<|end|>"]
PROMPT = Prompt("p", 0, "t", np.array([1]), None, {})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def played(kind: type, tokenizer: Any, *, answers: list[str] = ANSWERS, runs: int = 3, **task: Any) -> list[Experience]:
    """Have a workflow make its runs at a row, as its process does."""
    given = Task(
        raw_task={"question": "12+34=", "answer": "46"},
        format_args=FormatConfig("question", "answer"),
        rollout_args=GenerationConfig(n=runs, temperature=1.0),
        **task,
    )

    async def script(there: Served) -> list[Experience]:
        there.run()
        workflow = find(kind)(task=given, model=there.model, auxiliary_models=[there.model])
        if kind.can_repeat:
            workflow.set_repeat_times(runs, 0)
        found = await workflow.run_async() if kind.is_async else await asyncio.to_thread(workflow.run)
        return workflow.experiences_of(found)

    return served(script, tokenizer, *answers)


def find(kind: type) -> Any:
    """Find a class as a configuration does, which refuses it where a hook of its is not called."""
    for name, problem in hook_problems(kind):
        raise WorkflowError(f"{name} {problem}")
    return kind


class Exact(OnPolicyDistillMathWorkflow):
    def compute_reward(self, response: Experience) -> float:
        right = float(response.response_text == self.truth)
        if response.metrics is None:
            response.metrics = {}
        response.metrics["accuracy"] = right
        return right


class Bonus(OnPolicyDistillMathWorkflow):
    def compute_reward(self, response: Experience) -> float:
        return super().compute_reward(response) + 0.5


class InPlace(OnPolicyDistillWorkflow):
    """A run of its own, as Trinity-RFT's: the base does not interfere with it."""

    def compute_reward(self, response: Experience) -> float:
        return 3.0

    async def run_async(self) -> list[Experience]:
        responses = await self.model.chat_async(self.format_messages(), **self.rollout_args)
        for number, response in enumerate(responses):
            teacher = await self.teacher_model.logprobs_async(tokens=response.tokens.tolist(), temperature=1.0)
            response.teacher_logprobs = teacher[response.prompt_length - 1 :]
            response.info, response.metrics = None, None
            response.teacher_logprobs = teacher[response.prompt_length - 1 :]
            response.action_mask[-1] = False
            response.eid.run = number + self.run_id_base
            response.reward = self.compute_reward(response) - number
        return responses


class Formatted(OnPolicyDistillMathWorkflow):
    def format_messages(self) -> list[dict]:
        return [{"role": "user", "content": self.task_desc}]


class Silent(OnPolicyDistillWorkflow):
    def format_messages(self) -> list[dict]:
        return [{"role": "user", "content": self.task_desc}]


RIGHT = [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "task", "rewards", "accuracies"),
    [
        (Exact, {}, RIGHT, RIGHT),
        (Exact, {"is_scored": True}, RIGHT, RIGHT),
        (Bonus, {}, [1.5, 0.5, 1.5], RIGHT),
        (InPlace, {}, [3.0, 2.0, 1.0], [None] * 3),
        (Formatted, {}, RIGHT, RIGHT),  # the base's, as in Trinity-RFT
        (Formatted, {"is_scored": True}, [None] * 3, [None] * 3),  # the configuration's rewards score it
        (OnPolicyDistillMathWorkflow, {}, RIGHT, RIGHT),
        (Silent, {}, [None] * 3, [None] * 3),
        (OnPolicyDistillWorkflow, {}, [None] * 3, [None] * 3),
    ],
)
def test_rewards_of_distillation(kind: type, task: dict, rewards: list, accuracies: list, tokenizer: Any) -> None:
    made = played(kind, tokenizer, **task)
    assert [one.reward for one in made] == rewards
    assert [(one.metrics or {}).get("accuracy") for one in made] == accuracies
    assert [one.eid.run for one in made] == [0, 1, 2]
    learned = [trained(one, TokenLimits(999, 9999), PROMPT, 0, run, 0) for run, one in enumerate(made)]
    assert [one.reward for one in learned] == rewards
    if kind is InPlace:
        assert [int(one.action_mask.sum()) for one in learned] == [len(one.action_mask) - 1 for one in learned]
        assert all(one.teacher_logprobs for one in learned)


def test_a_teacher_that_is_not_there_is_named(tokenizer: Any) -> None:
    async def script(there: Served) -> None:
        workflow = OnPolicyDistillWorkflow(task=Task({"prompt": "1"}), model=there.model)
        with pytest.raises(ValueError, match="auxiliary_models is empty"):
            _ = workflow.teacher_model

    served(script, tokenizer)


def helper(workflow: Any) -> float:
    return workflow.calculate_reward("1", "1")


class WithHelper(SimpleWorkflow):
    """Called through a function of the module, which the code of the class does not show."""

    def calculate_reward(self, response: str, truth: str) -> float:
        return float(response == truth)

    def run(self) -> list[Experience]:
        helper(self)
        return []


class ByName(Workflow):
    def compute_reward(self) -> float:
        return 1.0

    def run(self) -> list[Experience]:
        return getattr(self, "compute_reward")()  # noqa: B009


class AwaitedOnes(Workflow):
    is_async = True

    async def compute_reward(self) -> float:
        return 1.0

    async def step(self) -> None: ...

    async def run_async(self) -> list[Experience]:
        await self.step()
        await self.compute_reward()
        return []


class Both(Workflow):
    is_async = True

    def run(self) -> list[Experience]:
        return []

    async def run_async(self) -> list[Experience]:
        return []


@pytest.mark.parametrize("kind", [Exact, Bonus, InPlace, Formatted, Silent, WithHelper, ByName, AwaitedOnes, Both])
def test_what_is_called_is_not_refused(kind: type) -> None:
    assert list(hook_problems(kind)) == []


HELPERS = """
import functools

def timed(function):
    def inner(self, *args):
        return function(self, *args)
    return inner

def scored(function):
    @functools.wraps(function)
    def inner(self):
        return [self.compute_reward(one) for one in function(self)]
    return inner

def thin(function):
    @functools.wraps(function)
    def inner(*args, **named):
        return function(*args, **named)
    return inner

def drive(workflow):
    return workflow.step()
"""
USES = {
    "a decorator": "step = lambda self: []\n    @timed\n    def run(self): return self.step()",
    "a decorator that calls it": "compute_reward = lambda self, one: 1.0\n    @scored\n    def run(self): return []",
    "another module": "step = lambda self: []\n    def run(self): return drive(self)",
    "a name that is computed": (
        "compute_reward = lambda self: []\n    def run(self):\n        kind = 'reward'\n"
        "        return getattr(self, f'compute_{kind}')()"
    ),
    "a name in arguments": (
        "calculate_reward = lambda self: []\n    def run(self): return getattr(self, self.task.workflow_args['how'])()"
    ),
    "a name in a list": (
        "names = ('compute_reward',)\n    def compute_reward(self): return 1\n"
        "    def run(self): return [getattr(self, name)() for name in self.names]"
    ),
    "an agent that holds it": "step = lambda self: []\n    def run(self): return Agent(environment=self)",
    "what another coroutine function makes": (
        "is_async = True\n    async def own(self): ...\n    def step_async(self): return self.own()\n"
        "    async def run_async(self): return await self.step_async()"
    ),
}
AWAITED = {  # of a base whose run awaits them
    "made by another": "async def own(self, n): ...\n    def step_async(self, step_num): return self.own(step_num)",
    "decorated": "@thin\n    async def step_async(self, step_num): ...",
}


def users_class(directory: Path, name: str, base: str, body: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    (directory / f"{name}_helpers.py").write_text(HELPERS)
    imports = f"from roll_opd.workflows import {base}\nfrom {name}_helpers import drive, scored, thin, timed\n"
    (directory / f"{name}.py").write_text(f"{imports}class Mine({base}):\n    {body}\n")
    monkeypatch.syspath_prepend(str(directory))
    return find_workflow(f"{name}.Mine", None)


@pytest.mark.parametrize("way", USES)
def test_hooks_that_may_be_called_are_not_refused(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert users_class(tmp_path, f"uses_{list(USES).index(way)}", "Workflow", USES[way], monkeypatch)


@pytest.mark.parametrize("way", AWAITED)
def test_functions_of_which_the_result_is_awaited(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"awaited_{list(AWAITED).index(way)}"
    assert users_class(tmp_path, name, "AsyncStepWiseRewardWorkflow", AWAITED[way], monkeypatch)


def async_method(*_: Any) -> Any: ...


async def awaited(*_: Any) -> Any: ...


@pytest.mark.parametrize(
    ("base", "methods", "name", "message"),
    [
        (SimpleWorkflow, {"compute_reward": async_method}, "compute_reward", "derive from OnPolicyDistillWorkflow"),
        (OnPolicyDistillWorkflow, {"calculate_reward": async_method}, "calculate_reward", "name it compute_reward"),
        (OnPolicyDistillWorkflow, {"run": async_method}, "run", "write run_async, or is_async = False"),
        (SimpleWorkflow, {"run_async": awaited}, "run_async", "write is_async = True"),
        (OnPolicyDistillWorkflow, {"compute_reward": awaited}, "compute_reward", "write it without `async`"),
        (SimpleWorkflow, {"format_messages": awaited}, "format_messages", "write it without `async`"),
        (AsyncStepWiseRewardWorkflow, {"step": async_method}, "step", "or write step_async"),
        (RewardPropagationWorkflow, {"reward_async": awaited}, "reward_async", "or write reward"),
        (RewardPropagationWorkflow, {"reward": awaited}, "reward", "reward_async in an asynchronous base"),
        (SimpleWorkflow, {"execute": awaited}, "execute", "their return value is collected"),
        (MultiTurnWorkflow, {"set_repeat_times": async_method, "run": async_method}, "set_repeat_times", "can_repeat"),
        (SimpleWorkflow, {"format_prompt": async_method}, "format_prompt", "derive from MathBoxedWorkflow"),
    ],
)
def test_uncalled_hooks_are_refused_by_name(base: type, methods: dict, name: str, message: str) -> None:
    ((method, problem),) = hook_problems(type("Mine", (base,), {**methods, "__module__": "mine"}))
    assert method == f"Mine.{name}" and message in problem, problem


@pytest.mark.parametrize(
    ("base", "source", "called", "is_right"),
    [
        (
            "OnPolicyDistillWorkflow",
            "def compute_reward(self, response, truth): ...",
            "compute_reward(response)",
            False,
        ),
        ("OnPolicyDistillWorkflow", "def compute_reward(self): ...", "compute_reward(response)", False),
        ("OnPolicyDistillWorkflow", "compute_reward = staticmethod(lambda response, truth: 1.0)", "(response)", False),
        (
            "OnPolicyDistillWorkflow",
            "def compute_reward(self, one, truth): return super().compute_reward(one)",
            "compute_reward(response)",
            False,
        ),
        ("SimpleWorkflow", "def format_messages(self, task): ...", "format_messages()", False),
        ("SimpleWorkflow", "def set_repeat_times(self, times): ...", "(repeat_times, run_id_base)", False),
        ("Workflow", "def run(self, model): ...", "run()", False),
        ("StepWiseRewardWorkflow", "def reward(self, exps): ...", "reward(exps, step_num=step_num)", False),
        ("StepWiseRewardWorkflow", "def step(self, number): ...", "step(step_num=step_num)", False),
        ("RewardPropagationWorkflow", "def reward(self, exps, step_num): ...", "reward(exps)", False),
        ("AsyncRewardPropagationWorkflow", "async def reward_async(self): ...", "reward_async(exps)", False),
        ("OnPolicyDistillWorkflow", "def compute_reward(self, one, truth=None): ...", "", True),
        ("OnPolicyDistillWorkflow", "compute_reward = staticmethod(lambda response: 1.0)", "", True),
        ("StepWiseRewardWorkflow", "def step(self, **named): ...", "", True),
        (
            "OnPolicyDistillWorkflow",
            "def compute_reward(self, one, truth): ...\n    async def run_async(self): self.compute_reward(1, 2)",
            "",
            True,
        ),
        (
            "OnPolicyDistillWorkflow",
            "@functools.wraps(lambda self, one, truth: 1.0)\n    def compute_reward(self, response): return 1.0",
            "",
            True,
        ),
    ],
)
def test_hooks_take_the_arguments_of_their_call(base: str, source: str, called: str, is_right: bool) -> None:
    space: dict[str, Any] = {"__name__": "mine"}
    exec(f"import functools\nfrom roll_opd.workflows import {base}\nclass Mine({base}):\n    {source}\n", space)
    found = [problem for _, problem in hook_problems(space["Mine"])]
    assert (found == []) is is_right, found
    assert all(f"is called as {called}" in problem or called in problem for problem in found)


def test_a_base_model_s_prompt_is_called() -> None:
    kind = type("Mine", (MathBoxedWorkflow,), {"format_prompt": async_method, "__module__": "mine"})
    assert list(hook_problems(kind)) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class W(Workflow):\n    is_async = True\n    def run(self): ...", "or is_async = False for its run"),
        ("class W(Workflow):\n    async def run_async(self): ...", "or is_async = True for its run_async"),
        (
            "class W(Workflow):\n    def __init__(self, task, model, judge): ...\n    def run(self): ...",
            "requires judge",
        ),
        ("class W(SimpleWorkflow):\n    def compute_reward(self, response): ...", "W.compute_reward is never called"),
        ("from trinity.common.workflows import Workflow", "`from roll_opd.workflows import ...` for `from trinity"),
        ("from roll_opd.workflows import WorkflowBase", "WorkflowBase of Trinity-RFT does not exist here: derive"),
        ("from roll_opd.workflows import MathRULERWorkflow", "copy trinity/common/workflows/math_ruler_workflow.py"),
        ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
    ],
)
def test_plugins_that_cannot_work(tmp_path: Path, source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"hooked_{abs(hash(source))}"
    imports = "from roll_opd.workflows import SimpleWorkflow, Workflow, WORKFLOWS\n"
    (tmp_path / f"{name}.py").write_text(imports + source + "\n")
    with pytest.raises(WorkflowError) as caught:
        load_plugins(str(tmp_path))
        find_workflow(f"{name}.W", None)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["Status", "WorkflowBase", "MathRULERWorkflow", "nothing_at_all"])
def test_looking_for_what_does_not_exist_raises_no_import_error(name: str) -> None:
    """`hasattr` and a default of `getattr` work; only `from ... import ...` raises, with the advice."""
    assert not hasattr(workflows, name)
    assert getattr(workflows, name, None) is None
    with pytest.raises(ImportError, match="Status of Trinity-RFT does not exist here: return a list of experiences"):
        from roll_opd.workflows import Status  # noqa: F401


class Recorded(WorkflowWithRecording):
    """Two conversations: the second turn continues the first, and another one begins."""

    async def run_async(self) -> dict[str, float]:
        async with openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key) as client:
            first = {"role": "user", "content": self.task.raw_task["question"]}
            done = await client.chat.completions.create(model=self.model_name, messages=[first])
            answer = {"role": "assistant", "content": done.choices[0].message.content}
            more = [first, answer, {"role": "user", "content": "Sure?"}]
            await client.chat.completions.create(model=self.model_name, messages=more)
            other = [{"role": "user", "content": "1+1="}]
            await client.chat.completions.create(model=self.model_name, messages=other)
        await self.update_reward(0.25, info={"note": "first"})
        await self.update_reward(0.75, info={"kind": "last"})
        return {"example/reward": 0.75}


class Unfit(Recorded):
    async def run_async(self) -> Any:
        return [1.0]


class PerRequest(Recorded):
    async def run_async(self) -> Any:
        await self.update_reward(1.0, sample_ids=["a"])


def test_an_agent_s_requests_are_recorded(tokenizer: Any) -> None:
    made = played(Recorded, tokenizer, runs=1)
    assert [one.reward for one in made] == [0.75, 0.75]
    assert [one.metrics for one in made] == [{"example/reward": 0.75}, {}]  # once a run
    assert [one.info for one in made] == [{"note": "first", "kind": "last"}] * 2
    assert sum(int(one.action_mask.sum()) for one in made) == sum(map(count(tokenizer), ANSWERS))


def count(tokenizer: Any) -> Callable[[str], int]:
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def test_what_a_recorded_run_may_not_do(tokenizer: Any) -> None:
    with pytest.raises(TypeError, match="returned list, expected metrics"):
        played(Unfit, tokenizer, runs=1)
    with pytest.raises(ValueError, match="sample_ids"):
        played(PerRequest, tokenizer, runs=1)


class Fields(Workflow):
    def run(self) -> list[Experience]: ...


@pytest.mark.parametrize("field", ["token_level_reward", "advantages", "returns", "multi_modal_inputs"])
def test_fields_that_nothing_reads_are_refused(field: str) -> None:
    given = {"tokens": [1, 2, 3], "prompt_length": 1, "logprobs": [-1.0, -1.0]}
    later = Experience(**given)
    setattr(later, field, [0.5, 0.5])
    for made in (Experience(**given, **{field: [0.5, 0.5]}), later):
        with pytest.raises(ValueError, match=f"Experience.{field} is not used in training"):
            trained(made, TokenLimits(9, 9), PROMPT, 0, 0, 0)
    trained(Experience(**given, **{field: None}), TokenLimits(9, 9), PROMPT, 0, 0, 0)


def test_info_may_be_none_and_hold_anything() -> None:
    for info in (None, {"turn_rewards": 3.0}):
        made = Experience(tokens=[1, 2], logprobs=[-1.0])
        made.info = info
        assert trained(made, TokenLimits(9, 9), PROMPT, 0, 0, 0).turn_rewards == ()


def test_a_metric_that_is_no_number_is_named() -> None:
    made = Experience(tokens=[1, 2], logprobs=[-1.0], metrics={"answer": "seven"})
    with pytest.raises(ValueError, match=r"metrics\['answer'\] is 'seven', expected a number"):
        trained(made, TokenLimits(9, 9), PROMPT, 0, 0, 0)


def test_names_of_an_experience() -> None:
    eid = EID("b", "t", 2, 3, "x")
    assert (eid.uid, eid.rid, eid.sid, eid.tid) == ("b/t/2/3/x", "b/t/2", "b/t/3", "b/t")


def test_methods_of_a_model_that_are_not_here_are_named(tokenizer: Any) -> None:
    async def script(there: Served) -> None:
        there.run()
        with pytest.raises(AttributeError, match="set_api_key of Trinity-RFT's ModelWrapper"):
            there.model.set_api_key("x")
        with pytest.raises(AttributeError, match="has no attribute 'chatt'"):
            there.model.chatt()
        await there.model.set_workflow_state({"step": 1})
        assert await there.model.get_workflow_state() == {"step": 1}
        await there.model.clean_workflow_state()
        assert await there.model.get_workflow_state() == {}

    served(script, tokenizer)


class Parts(RewardFn):
    def __call__(self, response: str, **_: Any) -> dict[str, float]:
        return {"length": float(len(response))}


@pytest.mark.parametrize("kind", [SimpleWorkflow, AsyncSimpleWorkflow, OnPolicyDistillWorkflow, Silent, Formatted])
def test_a_reward_function_scores_what_no_hook_does(kind: type, tokenizer: Any) -> None:
    made = played(kind, tokenizer, reward_fn=Parts)
    assert [one.reward for one in made] == [2.0, 1.0, 2.0] and made[0].metrics == {"length": 2.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"agent": "no_such_module.solve"}, "no_such_module cannot be imported"),
        ({"agent": "json.solve"}, "json has no function named solve"),
        ({"agent": "solve"}, "is not a dotted path"),
        ({"agent": "os.getpid"}, r"must take \(row, base_url, api_key\)"),
        ({"command": "node agent.js"}, "a list of strings"),
    ],
)
def test_agents_that_no_run_could_call(arguments: dict, message: str) -> None:
    with pytest.raises(WorkflowError, match=message):
        AgentWorkflow.check_arguments(arguments)
