"""The built-in workflow of environments: the messages of the model, the learned tokens, and errors of a game."""

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from roll_opd.config.plan import ObjectivePlan
from roll_opd.data.prompt_source import Prompt
from roll_opd.extras.games import ENVIRONMENTS, game_session
from roll_opd.extras.games.prompt_templates import CONVERSATION_FIELDS, SINGLE_TURN_FIELDS, template_problems
from roll_opd.extras.games.workflows.environment_workflow import EnvironmentWorkflow
from roll_opd.objective.external_advantages import external_advantages
from roll_opd.workflows import Experience, ModelWrapper, Task
from roll_opd.workflows.run_state import RUN
from roll_opd.workflows.workflow_experience import NoRoomError, RunFailure, TokenLimits, trained
from roll_opd.workflows.workflow_interface import GenerationConfig
from tests.workflows.sampled import Sampled
from tests.workflows.test_call_tree import THINKING, play

MODEL = Path(__file__).parents[3] / "examples" / "demo" / "models" / "student"
SETTINGS = {
    "env_config": {},
    "env_manager_cls": None,
    "max_steps": 5,
    "max_tokens_per_step": 6,
    "agent_system_template": None,
    "agent_template": "{observation}",
    "pre_step_template": None,
    "next_step_template": None,
    "history_length": None,
    "tool_wrapper": None,
    "max_env_step_concurrent": 0,
    "step_timeout": 30.0,
}
BY_STEP = "roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager"


@ENVIRONMENTS.register("counting")
class Counting:
    """Ends after `wanted` actions; every action is worth its place, and its length in characters is a metric."""

    made = 0

    def __init__(self, wanted: int = 3) -> None:
        Counting.made += 1
        self.wanted = wanted

    def reset(self, seed: int | None = None) -> tuple[str, dict]:
        self.seed, self.turn = seed, 0
        return f"{seed}+0=", {"env_instruction": "add"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.turn += 1
        metrics = {"action_is_valid": action != "bad", "size": len(action), "success": self.turn == self.wanted}
        info = {"metrics": metrics, "metrics_agg_mode": {"size": "sum", "success": "last"}, "suffix": f"s{self.turn}"}
        return f"{self.seed}+{self.turn}=", float(self.turn), self.turn == self.wanted, False, info


@ENVIRONMENTS.register("faulty")
class Faulty(Counting):
    """Executes `what` in its second step."""

    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.what = what

    def step(self, action: str) -> Any:
        good = super().step(action)
        if self.turn < 2:
            return good
        wrong = {
            "a number": 3,
            "observation": (5, *good[1:]),
            "reward": ("o", "much", *good[2:]),
            "nan": (good[0], math.nan, *good[2:]),
            "info": (*good[:4], [1]),
            "metrics": (*good[:4], {"metrics": [1]}),
            "a metric": (*good[:4], {"metrics": {"success": "yes"}}),
            "a mode": (*good[:4], {"metrics": {"size": 1}, "metrics_agg_mode": {"size": "summ"}}),
            "short": good[:4],
        }
        if self.what == "raise":
            raise KeyError("lost")
        if self.what == "exit":
            raise SystemExit(3)
        if self.what == "hang":
            time.sleep(1.5)
        return wrong.get(self.what, good)


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(autouse=True)
def _no_games_of_others() -> None:
    game_session._idle.clear()
    game_session._limits.clear()
    Counting.made = 0


def task(env_type: str = "counting", seed: int = 7, **settings: Any) -> Task:
    environments = {"game": {**SETTINGS, "env_type": env_type, **settings}}
    return Task(
        raw_task={"tag": "game", "seed": seed},
        workflow_args={"environments": environments},
        rollout_args=GenerationConfig(n=4, max_tokens=9),
    )


def run(engine: Sampled, tokenizer: Any, given: Task) -> list[Experience]:
    async def script(model: ModelWrapper) -> list[Experience]:
        return await EnvironmentWorkflow(task=given, model=model).run_async()

    return play(engine, tokenizer, script)


def test_a_trajectory_is_one_experience_of_the_tokens_that_were_sampled(tokenizer: Any) -> None:
    engine = Sampled(tokenizer, ["12<|end|>", "bad<|end|>", "3<|end|>"])
    (made,) = run(engine, tokenizer, task())
    whole = tokenizer.decode(made.tokens)
    assert whole == (
        "<|user|>add\n7+0=<|end|><|assistant|>12<|end|><|user|>7+1=<|end|><|assistant|>bad<|end|>"
        "<|user|>7+2=<|end|><|assistant|>3<|end|>"
    )
    learned = made.tokens[made.prompt_length :][made.action_mask].numpy()
    assert np.array_equal(learned, np.concatenate([answer.tokens for answer in engine.answered]))
    reported = np.concatenate([answer.logprobs for answer in engine.answered])
    assert np.array_equal(made.logprobs[made.action_mask].numpy(), reported)
    assert (made.reward, made.finish_reason) == (1 + 2 + 3, "stop")
    row = Prompt("game/7", 7, "game", np.array([1]), None, {})
    assert trained(made, TokenLimits(1000, 1000), row, 0, 0, 0).turn_rewards == (1.0, 2.0, 3.0)
    metrics = {name.removeprefix("env/game/"): value for name, value in made.metrics.items()}
    assert metrics.pop("environment_seconds") >= 0 and metrics.pop("model_seconds") >= 0
    assert metrics == {
        "action_is_valid": pytest.approx(2 / 3),
        "size": 2 + 3 + 1,
        "success": 1.0,
        "invalid_actions": pytest.approx(1 / 3),
        "return": 6.0,
        "turns": 3.0,
        "truncated": 0.0,
    }


def test_numbers_of_numpy_are_metrics(tokenizer: Any) -> None:
    @ENVIRONMENTS.register("of_numpy")
    class OfNumpy(Counting):
        def step(self, action: str) -> Any:
            *four, _ = super().step(action)
            found = {"success": np.bool_(False), "score": np.float32(0.25), "count": np.array(3), "valid": np.int64(1)}
            return *four, {"metrics": found, "metrics_agg_mode": {"count": "sum"}}

    (made,) = run(Sampled(tokenizer, ["1<|end|>"] * 3), tokenizer, task("of_numpy"))
    found = {name: made.metrics[f"env/game/{name}"] for name in ("success", "score", "count", "valid", "return")}
    assert found == {"success": 0.0, "score": 0.25, "count": 9.0, "valid": 1.0, "return": 6.0}


@pytest.mark.parametrize(("manager", "known"), [(None, CONVERSATION_FIELDS), (BY_STEP, SINGLE_TURN_FIELDS)])
def test_every_field_of_a_template_is_filled_in(tokenizer: Any, manager: str | None, known: dict[str, Any]) -> None:
    template = "|".join(f"{{{name}}}" for name in known)
    settings = {"env_manager_cls": manager, "agent_template": template, "history_length": 2}
    made = run(Sampled(tokenizer, ["1<|end|>"] * 3), tokenizer, task(**settings))
    assert "|" in tokenizer.decode(made[0].tokens)
    assert not list(template_problems({**SETTINGS, **settings}))
    others = (CONVERSATION_FIELDS if manager else SINGLE_TURN_FIELDS).keys() - known.keys()
    wrong = [list(template_problems({**SETTINGS, **settings, "agent_template": f"{{{name}}}"})) for name in others]
    assert others and all(found for found in wrong)


def test_templates_say_what_rolls_do(tokenizer: Any) -> None:
    engine = Sampled(tokenizer, ["1<|end|>"] * 3)
    template = "T{turn_idx} {observation} {suffix}|{actions_left}|{max_response_length}"
    (made,) = run(engine, tokenizer, task(agent_system_template="S", agent_template=template))
    text = tokenizer.decode(made.tokens)
    assert text.startswith("<|system|>S<|end|><|user|>add\nT1 7+0= |5|6<|end|>")
    assert "<|user|>T2 7+1= s1|4|6<|end|>" in text and "<|user|>T3 7+2= s2|3|6<|end|>" in text
    (made,) = run(Sampled(tokenizer, ["1<|end|>"] * 3), tokenizer, task(pre_step_template="<", next_step_template=">"))
    assert "<|user|><7+1=><|end|>" in tokenizer.decode(made.tokens)


def test_step_by_step_each_action_is_an_experience_with_its_own_reward(tokenizer: Any) -> None:
    engine = Sampled(tokenizer, ["1<|end|>", "bad<|end|>", "3<|end|>"])
    template = "{env_instruction}#{step_count}#{history_length}[{history}]#{current_step}#{current_observation}"
    made = run(engine, tokenizer, task(env_manager_cls=BY_STEP, history_length=2, agent_template=template))
    assert [one.reward for one in made] == [1.0, 2.0, 3.0] and [one.eid.step for one in made] == [0, 1, 2]
    texts = [tokenizer.decode(one.tokens) for one in made]
    assert texts[0] == "<|user|>add#0#0[]#1#7+0=<|end|><|assistant|>1<|end|>"
    assert "add#1#1[(step: 1, observation: 7+0=, action: 1, reward: 1.0)]#2#7+1=" in texts[1]
    assert "(step: 2, observation: 7+1=, action: bad (this action is not valid" in texts[2]
    assert all(one.action_mask.all() and one.prompt_length for one in made)
    assert "env/game/turns" in made[0].metrics and not made[1].metrics


def test_steps_of_a_real_game_have_its_states_and_rewards(tokenizer: Any) -> None:
    """Frozen lake as examples/config/step_envs.yaml has it, played twice: to the goal, and to and fro."""
    config = OmegaConf.load(MODEL.parents[2] / "config" / "step_envs.yaml")
    reported = OmegaConf.to_container(config, resolve=True)["custom_env"]["FrozenLake"]
    settings = {key: value for key, value in reported.items() if key in SETTINGS}
    settings |= {"max_tokens_per_step": None, "max_steps": 4}
    settings["env_config"] |= {"size": 2, "p": 1.0, "format_penalty": -0.25}

    def answered(*actions: str) -> list[Experience]:
        engine = Sampled(tokenizer, [f"<answer>{action}</answer><|end|>" for action in actions])
        return run(engine, tokenizer, task("frozen_lake", seed=13, **settings))

    shortest, longer = answered("Right", "Down"), answered("Right", "Left", "dance", "Down")
    assert [one.reward for one in shortest] == [0.0, 1.0]
    assert [one.reward for one in longer] == [0.0, 0.0, -0.25, 0.0]
    assert (shortest[-1].finish_reason, longer[-1].finish_reason) == ("stop", "length")
    states = [one.info["state_hash"] for one in (*shortest, *longer)]
    begin, right = states[:2]
    assert states == [begin, right, begin, right, begin, begin] and begin != right
    history = "[(step: 1, observation: P_\n_G, action: Right, reward: 0.0), (step: 2, observation: _P\n_G, action: Left"
    assert f"You have taken 2 actions. The last 2 of them: {history}" in tokenizer.decode(longer[2].tokens)

    prompt = Prompt("p", 0, "game", np.array([1]), None, {})
    limits = TokenLimits(4096, len(tokenizer))
    steps = [
        trained(one, limits, prompt, 0, number, place, one.eid.step)
        for number, made in enumerate((shortest, longer))
        for place, one in enumerate(made)
    ]
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert [((one.run, one.step), one.state) for one in steps] == list(zip(places, states, strict=True))
    arguments = {"mean_cal_level": "group", "std_cal_level": None, "step_reward_gamma": 0.5}
    found = external_advantages(steps, ObjectivePlan(adv_estimator="gigpo", advantage_args=arguments))
    returns = [0.5, 1.0, -0.0625, -0.125, -0.25, 0.0]
    at_begin = (0.5 - 0.0625 - 0.25 + 0.0) / 4
    at_right = (1.0 - 0.125) / 2
    means = np.array([at_begin, at_right, at_begin, at_right, at_begin, at_begin])
    sums = np.array([1.0, 1.0, -0.25, -0.25, -0.25, -0.25])
    expected = (sums - 0.375) + (np.array(returns) - means)
    assert [float(one.advantages[0]) for one in found] == pytest.approx(expected)


def test_where_a_template_rewrites_the_past_there_are_branches_and_every_token_is_learned_once(tokenizer: Any) -> None:
    tokenizer.chat_template = THINKING
    engine = Sampled(tokenizer, ["thought=1<|end|>", "more=2<|end|>", "most=3<|end|>"])
    made = run(engine, tokenizer, task())
    assert len(made) == 3 and {one.reward for one in made} == {6.0}
    learned = np.concatenate([one.tokens[one.prompt_length :][one.action_mask].numpy() for one in made])
    assert np.array_equal(learned, np.concatenate([answer.tokens for answer in engine.answered]))


def test_actions_and_tokens_run_out(tokenizer: Any) -> None:
    (made,) = run(Sampled(tokenizer, ["1<|end|>"] * 2), tokenizer, task(max_steps=2))
    assert (made.reward, made.finish_reason, made.metrics["env/game/truncated"]) == (3.0, "length", 1.0)
    engine = Sampled(tokenizer, ["1" * 1990 + "<|end|>", "never"])
    (made,) = run(engine, tokenizer, task())
    assert (made.reward, made.finish_reason, made.metrics["env/game/turns"]) == (1.0, "length", 1.0)
    with pytest.raises(NoRoomError, match="raise sequence_length where it is written, else prompt_length or"):
        run(Sampled(tokenizer), tokenizer, task(agent_system_template="x" * 2000))


def test_a_game_that_came_to_its_end_begins_the_next_trajectory(tokenizer: Any) -> None:
    for seed in (1, 2, 3):
        (made,) = run(Sampled(tokenizer, ["1<|end|>"] * 3), tokenizer, task(seed=seed))
        assert f"{seed}+2=" in tokenizer.decode(made.tokens)
    assert Counting.made == 1


FAULTS = {
    "raise": ("environment_raised", "step raised KeyError: 'lost'"),
    "exit": ("environment_raised", "step raised SystemExit: 3"),
    "hang": ("environment_timeout", "step did not finish within step_timeout, 0.5 s"),
    "a number": ("environment_invalid", "step returned int; return (observation, reward"),
    "observation": ("environment_invalid", "step returned the observation int; return a string"),
    "reward": ("environment_invalid", "step returned the reward 'much'; return a number or a bool"),
    "nan": ("environment_invalid", "step returned the reward nan; return a finite number"),
    "info": ("environment_invalid", "returned info as list of 1; return a dict"),
    "short": ("environment_invalid", "step returned tuple of 4"),
    "metrics": ("environment_invalid", "step returned info['metrics'] as list of 1; return a dict"),
    "a metric": ("environment_invalid", "info['metrics']['success'] as 'yes'; return a number or a bool"),
    "a mode": (
        "environment_invalid",
        "['metrics_agg_mode']['size'] as 'summ'; return one of mean, sum, last, max, min",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_a_game_does_wrong_has_a_kind_and_the_game_is_not_used_again(tokenizer: Any, what: str) -> None:
    engine, stuck = Sampled(tokenizer, ["1<|end|>"] * 5), []

    async def script(model: ModelWrapper) -> None:
        try:
            given = task("faulty", env_config={"what": what}, step_timeout=0.5)
            await EnvironmentWorkflow(task=given, model=model).run_async()
        finally:
            stuck.append(RUN.get().stuck)

    with pytest.raises(RunFailure) as raised:
        play(engine, tokenizer, script)
    kind, text = FAULTS[what]
    assert raised.value.kind == kind and text in str(raised.value) and "environment game (faulty)" in str(raised.value)
    assert stuck == [what == "hang"] and not game_session._idle["game"]


def test_no_more_steps_are_under_way_than_the_game_allows(tokenizer: Any) -> None:
    under_way, most = [0], [0]

    @ENVIRONMENTS.register("crowded")
    class Crowded(Counting):
        def step(self, action: str) -> Any:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
            time.sleep(0.01)
            under_way[0] -= 1
            return super().step(action)

    async def script(model: ModelWrapper) -> None:
        given = task("crowded", max_env_step_concurrent=2)
        await asyncio.gather(*[EnvironmentWorkflow(task=given, model=model).run_async() for _ in range(8)])

    play(Sampled(tokenizer, ["1<|end|>"] * 24), tokenizer, script)
    assert 1 <= most[0] <= 2
