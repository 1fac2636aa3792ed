"""Workflows of several turns and several steps: the experiences of the base classes, and their advantages."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from roll_opd.config.plan import ObjectivePlan
from roll_opd.data.dataset import Prompt
from roll_opd.extras.trinity.workflows.multi_step import FEEDBACK, TryAgainWorkflow
from roll_opd.objective.external_advantages import external_advantages
from roll_opd.samples.sample import one_a_run
from roll_opd.tracking.sample_metrics import opd_metrics
from roll_opd.workflows import (
    AccuracyReward,
    AsyncRewardPropagationWorkflow,
    AsyncStepWiseRewardWorkflow,
    CountDownRewardFn,
    Experience,
    FormatConfig,
    FormatReward,
    MathBoxedRewardFn,
    MathRewardFn,
    ModelWrapper,
    MultiTurnWorkflow,
    RewardPropagationWorkflow,
    StepWiseRewardWorkflow,
    Task,
    Workflow,
)
from roll_opd.workflows.plugins import find_reward, load_plugins
from roll_opd.workflows.workflow_experience import EID, TokenLimits, WorkflowError, by_run, trained
from tests.each import each
from tests.workflows.sampled import Sampled
from tests.workflows.test_call_tree import play
from tests.workflows.test_workflow_endpoint import Served, served

MODEL = Path(__file__).parents[3] / "examples" / "demo" / "models" / "student"
ANSWERS = ["1<|end|>", "22<|end|>", "333<|end|>", "4<|end|>"]


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


class Walk:
    """Calls the model twice in step 1 and once in other steps; ends before the last step."""

    task: Any
    model: ModelWrapper
    max_step_num = 5

    def asked(self, step_num: int) -> list[list[dict]]:
        return [[{"role": "user", "content": f"{step_num}+{call}="}] for call in range(2 if step_num == 1 else 1)]

    def step(self, step_num: int) -> bool:
        for messages in self.asked(step_num):
            self.model.chat(messages)
        return step_num < 2

    async def step_async(self, step_num: int) -> bool:
        for messages in self.asked(step_num):
            await self.model.chat_async(messages)
        return step_num < 2


class Stepped(Walk, StepWiseRewardWorkflow):
    def reward(self, exps: list[Experience], step_num: int) -> float:
        return step_num + len(exps) / 10


class AsyncStepped(Walk, AsyncStepWiseRewardWorkflow):
    async def reward_async(self, exps: list[Experience], step_num: int) -> float:
        return step_num + len(exps) / 10


class Propagated(Walk, RewardPropagationWorkflow):
    def reward(self, exps: list[Experience]) -> float:
        return float(len(exps))


class AsyncPropagated(Walk, AsyncRewardPropagationWorkflow):
    async def reward_async(self, exps: list[Experience]) -> float:
        return float(len(exps))


def done(kind: Any, engine: Sampled, tokenizer: Any, task: Task | None = None) -> list[Experience]:
    """Run a workflow as its process does: a coroutine, or a thread of its own."""

    async def script(model: ModelWrapper) -> list[Experience]:
        workflow: Workflow = kind(task=task or Task(), model=model, auxiliary_models=[])
        return await workflow.run_async() if kind.is_async else await asyncio.to_thread(workflow.run)

    return play(engine, tokenizer, script)


@pytest.mark.parametrize("kind", [Stepped, AsyncStepped])
def test_each_step_has_its_reward(kind: Any, tokenizer: Any) -> None:
    made = done(kind, Sampled(tokenizer, ANSWERS), tokenizer)
    assert [one.response_text for one in made] == ["1", "22", "333", "4"]
    assert [one.eid.step for one in made] == [0, 1, 1, 2]
    assert [one.reward for one in made] == [0.1, 1.2, 1.2, 2.1]


@pytest.mark.parametrize("kind", [Propagated, AsyncPropagated])
def test_all_steps_have_the_reward_of_the_end(kind: Any, tokenizer: Any) -> None:
    made = done(kind, Sampled(tokenizer, ANSWERS), tokenizer)
    assert [one.eid.step for one in made] == [0, 1, 1, 2]
    assert [one.reward for one in made] == [4.0] * 4
    assert all(one.metrics == {"actual_env_steps": 3} for one in made)


def test_steps_by_an_openai_client(tokenizer: Any) -> None:
    """An instance that serves two runs uses the client of each run for its calls."""

    class Clients(Stepped):
        def step(self, step_num: int) -> bool:
            assert self.client is self.client
            for messages in self.asked(step_num):
                self.client.chat.completions.create(model="policy", messages=messages)
            return step_num < 2

    async def script(served: Served) -> list[list[Experience]]:
        served.run()
        workflow = Clients(task=Task(), model=served.model)
        runs = []
        for number in range(2):
            served.run(number)
            runs.append(await asyncio.to_thread(workflow.run))
        assert Clients(task=Task(), model=served.model, use_openai_client=False).client is None
        return runs

    for made in served(script, tokenizer, *ANSWERS, *ANSWERS):
        assert [one.response_text for one in made] == ["1", "22", "333", "4"]
        assert [(one.eid.step, one.reward) for one in made] == [(0, 0.1), (1, 1.2), (1, 1.2), (2, 2.1)]


def test_what_is_not_written_is_said(tokenizer: Any) -> None:
    with pytest.raises(NotImplementedError, match="StepWiseRewardWorkflow has no property max_step_num; write it"):
        done(StepWiseRewardWorkflow, Sampled(tokenizer), tokenizer)


@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_conversation_becomes_one_experience(is_awaited: bool, tokenizer: Any) -> None:
    class Talk(MultiTurnWorkflow):
        is_async = True

        async def run_async(self) -> list[Experience]:
            messages: list[dict] = []
            for question in ("12+34=", "56+78="):
                messages.append({"role": "user", "content": question})
                (response,) = await self.model.chat_async(messages)
                messages.append({"role": "assistant", "content": response.response_text})
            given = {"messages": messages, "reward": 0.5, "info": {"steps": 2, "won": True, "who": "me"}}
            if is_awaited:
                return [await self.process_messages_to_experience_async(**given, truncate_status="cut")]
            return [
                self.process_messages_to_experience(**given, truncate_status="cut") for _ in range(self.repeat_times)
            ]

    engine = Sampled(tokenizer, ANSWERS)
    (made,) = done(Talk, engine, tokenizer)
    assert made.reward == 0.5 and made.metrics == {"steps": 2.0, "won": 1.0} and made.truncate_status == "cut"
    assert made.info["who"] == "me" and not Talk.can_repeat
    sampled = np.concatenate([completion.tokens for completion in engine.answered])
    np.testing.assert_array_equal(made.tokens[made.prompt_length :][made.action_mask].numpy(), sampled)


def experience(run: int, step: int, reward: float, tokens: int = 2) -> Experience:
    return Experience(tokens=[1] * (tokens + 1), logprobs=[-0.5] * tokens, reward=reward, eid=EID(run=run, step=step))


@each("enable_step_norm", [False, True])
@each("seed", range(20))
def test_advantages_of_steps_compare_the_last_ones_of_their_runs(seed: int, enable_step_norm: bool) -> None:
    """For any order of the returned steps; the reference compares the rewards of the runs' last steps."""
    rng = np.random.default_rng(seed)
    runs = int(rng.integers(2, 5))
    made = [
        experience(run, step, float(rng.normal()))
        for run in range(runs)
        for step in range(int(rng.integers(1, 5)))
        for _ in range(1 if step else 2)  # twice in the first step
    ]
    shuffled = [made[place] for place in rng.permutation(len(made))]
    prompt = Prompt("p", 0, "t", np.array([1]), None, {})
    experiences = [
        trained(one, TokenLimits(10, 5), prompt, 0, run, place, step)
        for run, of_run in by_run(shuffled, range(runs)).items()
        for place, (step, one) in enumerate(of_run)
    ]
    arguments = {"enable_step_norm": enable_step_norm}
    objective = ObjectivePlan(adv_estimator="step_wise_grpo", advantage_args=arguments, init_kl_coef=0.0)
    found = external_advantages(experiences, objective)
    assert len({one.id for one in found}) == len(made)

    last: dict[int, float] = {}
    for run in range(runs):
        of_run = [one for one in made if one.eid.run == run]
        final = max(one.eid.step for one in of_run)
        candidates = [one.reward for one in shuffled if (one.eid.run, one.eid.step) == (run, final)]
        last[run] = candidates[-1]
    mean, deviation = np.mean(list(last.values())), np.std(list(last.values()), ddof=1)
    for one in found:
        count = sum(other.eid.run == one.run for other in made) if enable_step_norm else 1
        expected = (last[one.run] - mean) / (deviation + 1e-6) / count
        assert one.advantages is not None
        np.testing.assert_allclose(one.advantages, expected, rtol=1e-9)


def test_runs_and_steps_that_nobody_said() -> None:
    """Experiences of one run are its steps in their order; as many as runs are one a run."""
    made = [experience(0, 0, float(place)) for place in range(3)]
    assert by_run(made, [4]) == {4: [(0, made[0]), (1, made[1]), (2, made[2])]}
    assert by_run(made, [2, 3, 4]) == {2: [(0, made[0])], 3: [(0, made[1])], 4: [(0, made[2])]}
    assert by_run(made, [0, 1]) == {0: [(0, made[0]), (1, made[1]), (2, made[2])]}
    with pytest.raises(ValueError, match=r"eid\.run is 0; this call made runs 1 to 2"):
        by_run(made, [1, 2])
    with pytest.raises(TypeError, match="a run returned str"):
        by_run(["no"], [0])


def test_kinds_of_experiences_are_compared_apart() -> None:
    """A student that also judges: naively, answers are compared with answers, and judgements with judgements."""
    prompt, runs = Prompt("p#1", 0, "t", np.array([1]), None, {}), range(3)
    answers, judgements = [1.0, 0.0, 0.0], [0.2, 0.4, 0.9]
    made = [
        Experience(tokens=[1, 2], logprobs=[-0.5], reward=reward, eid=EID(run=run, task=kind))
        for kind, rewards in (("p#1", answers), ("p#1-judge", judgements))
        for run, reward in enumerate(rewards)
    ]
    found = [
        trained(one, TokenLimits(10, 5), prompt, 4, run, place, step)
        for run, of_run in by_run(made, runs).items()
        for place, (step, one) in enumerate(of_run)
    ]
    assert len({one.id for one in found}) == len(made) and {one.step for one in found} == {0}
    assert {one.id.rpartition("#")[0] for one in found} == {prompt.id}
    groups = {one.group_id for one in found}
    assert len(groups) == 2 and "p#1#4" in groups
    assert len(one_a_run(found)) == len(made) and opd_metrics(found)["critic/score/max"] == 1.0
    objective = ObjectivePlan(adv_estimator="grpo", init_kl_coef=0.0)
    for one in external_advantages(found, objective):
        rewards = answers if one.group_id == "p#1#4" else judgements
        expected = (rewards[one.run] - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6)
        assert one.advantages is not None
        np.testing.assert_allclose(one.advantages, expected, rtol=1e-9)


def test_a_wrong_answer_is_tried_again(tokenizer: Any) -> None:
    row = {"question": "12+34=", "answer": "46", "note": "x"}
    task = Task(raw_task=row, format_args=FormatConfig("question", "answer"), workflow_args={"max_steps": 3})
    engine = Sampled(tokenizer, ["45<|end|>", "46<|end|>", "47<|end|>"])
    made = done(TryAgainWorkflow, engine, tokenizer, task)
    assert [(one.eid.step, one.reward, one.response_text) for one in made] == [(0, 0.0, "45"), (1, 1.0, "46")]
    assert [message["role"] for message in made[1].messages or []] == ["user", "assistant", "user"]
    assert (made[1].messages or [])[-1]["content"] == FEEDBACK
    prompt = made[1].tokens[: made[1].prompt_length]
    assert torch.equal(prompt[: len(made[0].tokens)], made[0].tokens)  # the very tokens of the first try


def test_a_reward_function_is_found_and_its_arguments_are_checked(tmp_path: Path) -> None:
    (tmp_path / "some_reward_functions.py").write_text(
        "from roll_opd.workflows import REWARD_FUNCTIONS, RewardFn\n\n\n"
        "@REWARD_FUNCTIONS.register_module('brief')\n"
        "class Brief(RewardFn):\n"
        "    def __init__(self, most: int = 3) -> None:\n        self.most = most\n\n"
        "    def __call__(self, response, **kwargs):\n        return {'brief': float(len(response) <= self.most)}\n\n\n"
        "def function(response, truth):\n    return {}\n"
    )
    brief = find_reward("brief", str(tmp_path), {"most": 2})
    assert brief(most=2)(response="abc", truth="x") == {"brief": 0.0}
    assert find_reward("accuracy_reward", None, {})()("#### 4", truth="2+2=4\n#### 4") == {"accuracy": 1.0}
    for name, arguments, reported in [
        ("brief", {"most": "a"}, "workflow_reward_args.most: should be a valid integer"),
        ("brief", {"least": 1}, "unknown argument"),
        ("breif", {}, "unknown reward function 'breif'; did you mean 'brief'\\? Known are accuracy_reward, brief"),
        ("some_reward_functions.function", {}, "expected a class"),
    ]:
        with pytest.raises(WorkflowError, match=reported):
            find_reward(name, str(tmp_path), arguments)


def test_a_relative_import_in_a_plugin_is_advised(tmp_path: Path) -> None:
    (tmp_path / "relative_plugin.py").write_text("from .other import something\n")
    with pytest.raises(WorkflowError, match=r"(?s)relative_plugin\.py cannot be imported.*write `from other import"):
        load_plugins(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "response", "truth", "parts"),
    [
        ("accuracy_reward", "It is \\boxed{72}.", "48/2=24\n#### 72", {"accuracy": 1}),
        ("accuracy_reward", "It is 71.", "72", {"accuracy": 0}),
        ("accuracy_reward", "", "72", {"accuracy": 0}),
        ("accuracy_reward", "72", None, {"accuracy": 0}),
        ("format_reward", "<think>\na\n</think>\n<answer>\nb\n</answer>", "", {"format_score": 0.1}),
        ("format_reward", "<think>a</think>\nb", "", {"format_score": -0.1}),
        ("math_reward", "<think>a</think> <answer>3/4</answer>", "0.75", {"accuracy": 1, "format_score": 0.1}),
        ("math_boxed_reward", "\\boxed{2}", "2", {"accuracy": 1, "format_score": 0}),
        ("countdown_reward", "<answer>(1 + 2) * 3</answer>", '{"target": 9, "numbers": [3, 2, 1]}', {"score": 1}),
        ("countdown_reward", "<answer>1/3 * 9</answer>", {"target": 3, "numbers": [1, 3, 9]}, {"score": 1}),
        ("countdown_reward", "<answer>1 + 2 * 3</answer>", {"target": 9, "numbers": [3, 2, 1]}, {"score": 0.1}),
        ("countdown_reward", "<answer>3 * 3</answer>", {"target": 9, "numbers": [3, 2, 1]}, {"score": 0.1}),
        ("countdown_reward", "9", {"target": 9, "numbers": [9]}, {"score": 0}),
        ("countdown_reward", "<answer>9 ** 9 ** 9</answer>", {"target": 9, "numbers": [9, 9, 9]}, {"score": 0.1}),
        ("countdown_reward", "<answer>1 / 0</answer>", {"target": 9, "numbers": [1, 0]}, {"score": 0.1}),
        ("countdown_reward", "<answer>exit(9)</answer>", {"target": 9, "numbers": [9]}, {"score": 0.1}),
        ("countdown_reward", f"<answer>{'-' * 900}9</answer>", {"target": 9, "numbers": [9]}, {"score": 1}),
        ("countdown_reward", f"<answer>{'-' * 9000}9</answer>", {"target": 9, "numbers": [9]}, {"score": 0.1}),
    ],
)
def test_reward_functions(name: str, response: str, truth: Any, parts: dict[str, float]) -> None:
    found = find_reward(name, None, {})()(response=response, truth=truth)
    assert found == pytest.approx(parts)


def test_a_thought_is_missed() -> None:
    boxed = find_reward("math_boxed_reward", None, {})()
    given = {"truth": "2", "with_think": True, "format_score_coef": 0.3}
    assert boxed(response="\\boxed{2}", **given) == {"accuracy": 1.0, "format_score": -0.3}
    for response, missed in [
        ("<think>1+1</think> \\boxed{2}", False),
        ("Well. <think>1+1</think>", False),
        ("<think>1</think><think>1</think>", True),
        ("</think>1<think>", True),
        ("<think>1", True),
    ]:
        assert boxed(response=response, **given)["format_score"] == (-0.3 if missed else 0)


def test_reward_functions_take_what_trinitys_workflows_give() -> None:
    """By place as in Trinity-RFT, and with keywords that they do not know."""
    more = {"response_token": [1], "info": {}, "tool": None}
    assert MathBoxedRewardFn()("\\boxed{2}", "2", True, 0.5, **more) == {"accuracy": 1.0, "format_score": -0.5}
    for kind in (AccuracyReward, MathRewardFn):
        assert kind()("\\boxed{2}", "1+1=", "2", **more)["accuracy"] == 1.0
    assert FormatReward()("x", **more, truth="2", prompt="1+1=") == {"format_score": -0.1}
    wanted = {"target": 9, "numbers": [9]}
    assert CountDownRewardFn()("<answer>9</answer>", None, wanted, **more) == {"score": 1.0}
