"""Games without the pipeline: all unfinished games take their turn together, and the engines answer one batch per turn.

A plain loop in this process plays the games, without workflows, threads or other processes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from roll_opd.config.plan import RunPlan, SamplingPlan
from roll_opd.data.templates import load_tokenizer
from roll_opd.extras.games import make
from roll_opd.extras.games.environment_interface import Environment
from roll_opd.inference.vllm_requests import Completion
from roll_opd.rollout.workflow_protocol import sample_seed
from roll_opd.samples.sample import Sample, as_columns

# (engine, tokens, settings, seed) of each request -> seconds of the slowest engine, and the completions in that order
Ask = Callable[[Sequence[tuple[int, np.ndarray, SamplingPlan, int]]], tuple[float, list[Completion]]]


@dataclass
class _Game:
    tag: str
    draw: int
    run: int
    engine: int
    environment: Environment
    settings: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)
    text: str = ""  # of `tokens`
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    starts: list[int] = field(default_factory=list)  # of the responses
    answers: list[Completion] = field(default_factory=list)
    over: bool = False


class Games:
    """The games of a plan, reused from step to step as in the pipeline."""

    def __init__(self, plan: RunPlan) -> None:
        assert plan.rollout and plan.workflow
        self._plan, self._rollout = plan, plan.rollout
        self._settings = plan.workflow.workflow_args["environments"]
        self._tokenizer = load_tokenizer(plan.rollout.model.path)
        self._idle: dict[str, list[Environment]] = {tag: [] for tag in self._settings}

    def play(self, tasks: Sequence[Any], first_draw: int, ask: Ask) -> tuple[dict[str, float], list[Sample]]:
        """Play each task `n` times; return seconds of `generate` and `environments`, and the trajectories."""
        begun = time.perf_counter()
        games = [
            self._begun(task, first_draw + place, run, place % self._rollout.engines)
            for place, task in enumerate(tasks)
            for run in range(self._rollout.sampling.n)
        ]
        generating = asking = 0.0  # seconds in the engines; the same with the transfer to and from their processes
        while playing := [game for game in games if not game.over]:
            requests = [self._request(game) for game in playing]
            asked = time.perf_counter()
            seconds, answers = ask(requests)
            generating, asking = generating + seconds, asking + time.perf_counter() - asked
            for game, answer in zip(playing, answers, strict=True):
                self._acted(game, answer)
        experiences = [self._ended(game) for game in games]
        seconds_of_games = time.perf_counter() - begun - asking
        return {"generate": generating, "environments": seconds_of_games}, experiences

    def _begun(self, task: Any, draw: int, run: int, engine: int) -> _Game:
        settings, idle = self._settings[task.tag], self._idle[task.tag]
        environment = idle.pop() if idle else make(settings["env_type"], **settings["env_config"])
        game = _Game(task.tag, draw, run, engine, environment, settings)
        observation, info = environment.reset(seed=task.extra["seed"])
        if settings["agent_system_template"]:
            game.messages.append({"role": "system", "content": settings["agent_system_template"]})
        instruction = info.get("env_instruction")
        self._observe(game, observation, f"{instruction}\n" if instruction else "")
        return game

    def _observe(self, game: _Game, observation: str, before: str = "") -> None:
        """Append an observation to the tokens; the earlier tokens do not change."""
        number, most = len(game.answers) + 1, game.settings["max_steps"]
        said = game.settings["agent_template"].format(
            observation=observation,
            turn_idx=number,
            suffix="",
            actions_left=most - number + 1,
            max_response_length=game.settings["max_tokens_per_step"],
        )
        game.messages.append({"role": "user", "content": before + said})
        text = self._tokenizer.apply_chat_template(game.messages, tokenize=False, add_generation_prompt=True)
        assert text.startswith(game.text), "the chat template rewrites the past"
        new = self._tokenizer(text[len(game.text) :], add_special_tokens=False).input_ids
        game.text, game.tokens = text, np.concatenate([game.tokens, np.array(new, np.int64)])

    def _request(self, game: _Game) -> tuple[int, np.ndarray, SamplingPlan, int]:
        sampling = self._rollout.sampling
        room = self._rollout.max_model_len - len(game.tokens)
        most = min(sampling.max_new_tokens, game.settings["max_tokens_per_step"] or room, room)
        seed = sample_seed(self._plan.seed, game.draw, game.run, len(game.answers))
        return game.engine, game.tokens, replace(sampling, n=1, max_new_tokens=most), seed

    def _acted(self, game: _Game, answer: Completion) -> None:
        written = answer.tokens
        action = self._tokenizer.decode(written, skip_special_tokens=True)
        observation, _, terminated, truncated, _ = game.environment.step(action)
        game.messages.append({"role": "assistant", "content": action})
        game.text += self._tokenizer.decode(written, skip_special_tokens=False)
        game.starts.append(len(game.tokens))
        game.tokens = np.concatenate([game.tokens, written])
        game.answers.append(answer)
        full = len(game.tokens) >= self._rollout.max_model_len
        game.over = terminated or truncated or full or len(game.answers) == game.settings["max_steps"]
        if not game.over:
            self._observe(game, observation)

    def _ended(self, game: _Game) -> Sample:
        self._idle[game.tag].append(game.environment)
        prompt = game.starts[0]
        mask = np.zeros(len(game.tokens) - prompt, bool)
        logprobs = np.zeros(len(mask), np.float32)
        for start, answer in zip(game.starts, game.answers, strict=True):
            place = slice(start - prompt, start - prompt + len(answer.tokens))
            mask[place], logprobs[place] = True, answer.logprobs
        return Sample(
            id=f"{game.draw}/{game.run}",
            group_id=str(game.draw),
            tag=game.tag,
            tokens=game.tokens,
            prompt_length=prompt,
            finish_reason=game.answers[-1].finish_reason,
            columns=as_columns(action_mask=mask, rollout_logprobs=logprobs),
        )
