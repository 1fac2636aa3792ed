"""`environment_workflow`: the model and an environment take turns until the game ends or a limit is reached."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

from roll_opd.extras.games.environment_interface import AGGREGATIONS
from roll_opd.extras.games.game_session import GameSession, lent_game
from roll_opd.extras.games.prompt_templates import filled, makes_steps
from roll_opd.workflows.workflow_experience import STATE, TURN_REWARDS, Experience, NoRoomError
from roll_opd.workflows.workflow_interface import WORKFLOWS, Task, Workflow

INVALID_ACTION_NOTE = " (this action is not valid: keep to the form that is asked for)"


@dataclass
class ModelTurn:
    """One turn: an observation, the model's action after the observation, and the reward of the action."""

    observation: str
    info: dict[str, Any]
    action: str = ""
    reward: float = 0.0
    response: Experience | None = None


@dataclass
class Trajectory:
    """The turns and messages of one game."""

    turns: list[ModelTurn]
    terminated: bool = False
    truncated: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def answered_turns(self) -> list[ModelTurn]:
        """The turns in which the model has taken an action."""
        return [turn for turn in self.turns if turn.response is not None]

    @property
    def episode_reward(self) -> float:
        """Sum of the rewards of all turns."""
        return sum(turn.reward for turn in self.turns)


@WORKFLOWS.register_module("environment_workflow", arguments=("environments",))
class EnvironmentWorkflow(Workflow):
    """Built-in workflow for environments.

    `workflow_args.environments` maps each tag to the settings of its environment.

    By default, a conversation becomes one experience, and its reward is the total reward of the game. If the chat
    template rewrites earlier turns, the conversation is split into several branches, with one experience per branch.

    With a StepEnvManager, each action becomes a separate experience. It stores the reward of the action and a hash of
    the state before the action.
    """

    is_async = can_reset = True

    def __init__(self, *, task: Task, model: Any, auxiliary_models: list | None = None) -> None:
        super().__init__(model, task, auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        """Prepare for the next task."""
        self.task = task
        self.tag = task.raw_task["tag"]
        self.settings = task.workflow_args["environments"][self.tag]
        self.by_step = makes_steps(self.settings["env_manager_cls"])
        self.sampling = asdict(task.rollout_args) | {"n": 1}
        if most := self.settings["max_tokens_per_step"]:
            self.sampling["max_tokens"] = min(most, self.sampling["max_tokens"] or most)

    async def run_async(self) -> list[Experience]:
        """Play one game and return its experiences. Raises RunFailure if the environment fails."""
        start = time.monotonic()
        async with lent_game(self.tag, self.settings) as game:
            trajectory = await self._play(game)
        made = self._experiences(trajectory)
        made[0].metrics |= self._metrics(trajectory, game.seconds, time.monotonic() - start - game.seconds)
        return made

    async def _play(self, game: GameSession) -> Trajectory:
        trajectory = Trajectory([ModelTurn(*await game.reset(self.task.raw_task["seed"]))])
        for _ in range(self.settings["max_steps"]):
            turn = trajectory.turns[-1]
            try:
                turn.response = await self._answer(trajectory)
            except NoRoomError:
                if not trajectory.answered_turns:
                    raise
                trajectory.truncated = True
                break
            turn.action = turn.response.response_text or ""
            observation, turn.reward, trajectory.terminated, trajectory.truncated, info = await game.step(turn.action)
            turn.info |= info
            trajectory.turns.append(
                ModelTurn(observation, {"suffix": info.get("suffix"), "use_tool": info.get("use_tool")})
            )
            if trajectory.terminated or trajectory.truncated:
                break
        else:
            trajectory.truncated = True
        return trajectory

    async def _answer(self, trajectory: Trajectory) -> Experience:
        """Sample the model's next action."""
        if self.by_step:
            messages = self._single_turn_prompt(trajectory)
        else:
            trajectory.messages += self._next_messages(trajectory)
            messages = trajectory.messages
        (response,) = await self.model.chat_async(messages, **self.sampling)
        if not self.by_step:
            trajectory.messages.append({"role": "assistant", "content": response.response_text or ""})
        return response

    def _next_messages(self, trajectory: Trajectory) -> list[dict[str, str]]:
        """Return the messages that the latest observation adds to the conversation."""
        settings, turn, number = self.settings, trajectory.turns[-1], len(trajectory.turns)
        if turn.info.get("use_tool"):
            return [{"role": "tool", "content": turn.observation}]
        text = filled(
            self.settings,
            observation=turn.observation,
            turn_idx=number,
            suffix=turn.info.get("suffix") or "",
            actions_left=settings["max_steps"] - number + 1,
            max_response_length=settings["max_tokens_per_step"],
        )
        if number > 1:
            return [{"role": "user", "content": text}]
        instruction = turn.info.get("env_instruction")
        return [*_system(settings), {"role": "user", "content": f"{instruction}\n{text}" if instruction else text}]

    def _single_turn_prompt(self, trajectory: Trajectory) -> list[dict[str, str]]:
        """Return a single-turn prompt with the latest observation and the last turns before it."""
        settings, turns = self.settings, trajectory.turns
        past = turns[-settings["history_length"] : -1] if settings["history_length"] else []
        first = len(turns) - len(past)
        text = filled(
            settings,
            env_instruction=turns[0].info.get("env_instruction") or "",
            history=", ".join(_line(number, turn) for number, turn in enumerate(past, first)),
            history_length=len(past),
            step_count=len(turns) - 1,
            current_step=len(turns),
            current_observation=turns[-1].observation,
            max_response_length=settings["max_tokens_per_step"],
        )
        return [*_system(settings), {"role": "user", "content": text}]

    def _experiences(self, trajectory: Trajectory) -> list[Experience]:
        if not self.by_step:
            made = self.model.branches()
            for one in made:
                one.reward = trajectory.episode_reward
            if len(made) == 1:
                made[0].info[TURN_REWARDS] = [turn.reward for turn in trajectory.answered_turns]
        else:
            made = []
            for step, turn in enumerate(trajectory.answered_turns):
                assert turn.response is not None
                turn.response.eid.step, turn.response.reward = step, turn.reward
                turn.response.info[STATE] = _state(turn.observation)
                made.append(turn.response)
        for one in made:
            one.finish_reason = "length" if trajectory.truncated else "stop"
        return made

    def _metrics(self, trajectory: Trajectory, environment: float, model: float) -> dict[str, float]:
        turns = trajectory.answered_turns
        found = _aggregated(turns)
        invalid = [
            not turn.info["metrics"]["action_is_valid"] for turn in turns if "action_is_valid" in _turn_metrics(turn)
        ]
        found |= {"invalid_actions": sum(invalid) / len(invalid)} if invalid else {}
        found |= {
            "return": trajectory.episode_reward,
            "turns": float(len(turns)),
            "truncated": float(trajectory.truncated),
            "environment_seconds": environment,
            "model_seconds": model,
        }
        found.setdefault("success", float(trajectory.episode_reward > 0))
        return {f"env/{self.tag}/{name}": value for name, value in found.items()}


def _state(observation: str) -> str:
    """Return a hash of the observation.

    The hash does not depend on the text that the prompt template adds.
    """
    return blake2b(observation.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _system(settings: Mapping[str, Any]) -> list[dict[str, str]]:
    system = settings["agent_system_template"]
    return [{"role": "system", "content": system}] if system else []


def _line(step: int, turn: ModelTurn) -> str:
    action = str(turn.info.get("action_content") or turn.action)
    action += "" if _turn_metrics(turn).get("action_is_valid", True) else INVALID_ACTION_NOTE
    return f"(step: {step}, observation: {turn.observation}, action: {action}, reward: {turn.reward})"


def _turn_metrics(turn: ModelTurn) -> Mapping[str, float]:
    return turn.info.get("metrics") or {}


def _aggregated(turns: Sequence[ModelTurn]) -> dict[str, float]:
    """Return the metrics of the environment, aggregated over all turns.

    The environment's `metrics_agg_mode` sets the aggregation of each metric. The default is the mean.
    """
    values: dict[str, list[float]] = {}
    modes: dict[str, str] = {}
    for turn in turns:
        modes |= turn.info.get("metrics_agg_mode") or {}
        for name, value in _turn_metrics(turn).items():
            values.setdefault(name, []).append(value)
    return {name: AGGREGATIONS[modes.get(name, "mean")](found) for name, found in values.items()}
