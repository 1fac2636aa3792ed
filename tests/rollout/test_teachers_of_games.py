"""Sound, permuted, shifted and truncated teachers in three games of several turns, computed with Hugging Face.

Most tokens of a game come from the environment, and neither student nor teacher can predict them. So a mean over all
tokens does not show that a teacher is wrong.
"""

import asyncio
import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from teacher_assets import logits_of, preflight_of, student_of, teacher_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from roll_opd.base.paths import REPOSITORY
from roll_opd.data.templates import load_tokenizer
from roll_opd.extras.games import make
from roll_opd.samples.sample import Sample, as_columns, teacher_columns
from roll_opd.teachers.logprob_checks import FEW, Check
from roll_opd.teachers.teacher_preflight import (
    FEWEST,
    MAX_TOKENS,
    MIN_ACTIONS,
    PREFLIGHT_SAMPLES,
    _chosen,
)
from tests.cover import tiered

pytestmark = pytest.mark.slow
EXAMPLES = REPOSITORY / "examples"
WHOLE = {"action_pattern": "^(.*)$", "env_instruction": ""}  # the whole answer is the action
GAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "frozen_lake": ("games/models/frozen_lake_{}", {"size": 4, "is_slippery": False, "max_steps": 8, **WHOLE}),
    "sokoban": ("games/models/sokoban_{}", {"dim_room": [6, 6], "num_boxes": 1, "search_depth": 6, **WHOLE}),
    "number_sum": ("demo/models/{}", {"turns": 4, **WHOLE}),
}
MOST_TURNS, NEW_TOKENS = 6, 8


@torch.no_grad()
def played(name: str, student: PreTrainedModel, path: Any, games: int = 10) -> list[Sample]:
    """Return games as in a run: one sequence per game, with masked observations."""
    tokenizer = load_tokenizer(str(path))
    found = []
    for seed in range(games):
        torch.manual_seed(seed)
        game = make(name, **GAMES[name][1])
        observation, _ = game.reset(seed)

        def asked(text: str) -> list[int]:
            message = [{"role": "user", "content": text}]
            return tokenizer(
                tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            ).input_ids

        tokens = asked(observation)
        prompt, mask, total = len(tokens), [], 0.0
        for turn in range(MOST_TURNS):
            whole = student.generate(torch.tensor([tokens]), do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS)
            action = whole[0, len(tokens) :].tolist()
            tokens, mask = tokens + action, mask + [True] * len(action)
            observation, reward, ended, truncated, _ = game.step(tokenizer.decode(action, skip_special_tokens=True))
            total += float(reward)
            if ended or truncated or turn == MOST_TURNS - 1:
                break
            said = asked(observation)
            tokens, mask = tokens + said, mask + [False] * len(said)
        stopped = tokens[-1] == tokenizer.eos_token_id
        found.append(
            Sample(
                id=f"{name}/{seed}",
                group_id=str(seed),
                tag=name,
                tokens=np.array(tokens),
                prompt_length=prompt,
                finish_reason="stop" if stopped else "length",
                reward=total,
                columns=as_columns(action_mask=np.array(mask)),
            )
        )
    return found


def _of_ids(model: PreTrainedModel, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weights = {id(layer.weight): layer.weight for layer in (model.get_input_embeddings(), model.lm_head)}
    for weight in weights.values():
        weight.copy_(change(weight).clone())


def permuted(model: PreTrainedModel) -> None:
    order = torch.randperm(model.config.vocab_size, generator=torch.Generator().manual_seed(0))
    _of_ids(model, lambda weight: weight[order])


def shifted(model: PreTrainedModel) -> None:
    _of_ids(model, lambda weight: weight.roll(1, 0))


def truncated(model: PreTrainedModel) -> None:
    del model.model.layers[0]


def cut_context(visible: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[PreTrainedModel], None]:
    """Return a fault: a token at place i attends to one at place j only if `visible(i, j)`."""

    def change(model: PreTrainedModel) -> None:
        whole = model.forward

        def forward(ids: torch.Tensor) -> Any:
            places = torch.arange(ids.shape[1])
            i, j = places[:, None], places[None]
            mask = torch.where((j <= i) & visible(i, j), 0.0, torch.finfo(torch.float32).min)
            return whole(ids, attention_mask=mask[None, None])

        model.forward = forward

    return change


CONTEXT = 16  # tokens
CUTS = {
    "a window": cut_context(lambda i, j: i - j < CONTEXT),  # of each layer: the context is four times as long
    "blocks": cut_context(lambda i, j: i // CONTEXT == j // CONTEXT),
    "the first tokens": cut_context(lambda i, j: (j < CONTEXT) | (i - j < 2)),
}


@dataclass
class Played:
    student: PreTrainedModel
    teacher: PreTrainedModel
    samples: list[Sample]
    paths: tuple[Any, Any]

    def check(self, change: Callable[[PreTrainedModel], None] | None = None) -> dict[str, Check]:
        teacher = copy.deepcopy(self.teacher)
        if change:
            with torch.no_grad():
                change(teacher)
        rows: dict[str, Check] = {}
        roles = student_of(self.student, self.paths[0]), teacher_of(teacher, self.paths[1])
        preflight = preflight_of(*roles, lambda _, found: rows.update({row.check: row for row in found}))
        scored = [e.with_columns(**teacher_columns({"teacher": read(teacher, e)})) for e in self.samples]
        asyncio.run(preflight.check(scored, 1.0))
        return rows


def read(model: PreTrainedModel, sample: Sample) -> np.ndarray:
    logprobs = logits_of(model, sample.tokens)[sample.prompt_length - 1 :].log_softmax(-1)
    return logprobs.gather(1, torch.from_numpy(sample.response_tokens)[:, None])[:, 0].numpy()


@pytest.fixture(scope="module", params=tiered(GAMES, ["sokoban"]))
def game(request: pytest.FixtureRequest) -> Played:
    student_path, teacher_path = (EXAMPLES / GAMES[request.param][0].format(role) for role in ("student", "teacher"))
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (student_path, teacher_path)
    )
    samples = [e.with_columns(rollout_logprobs=read(student, e)) for e in played(request.param, student, student_path)]
    return Played(student, teacher, samples, (student_path, teacher_path))


def test_a_sound_teacher_passes(game: Played) -> None:
    rows = game.check()
    assert all(row.verdict != "failed" for row in rows.values())
    assert "action tokens" not in rows
    acted = [(e.acted(read(game.teacher, e)), e.acted(read(game.student, e))) for e in game.samples]
    teacher, student = (float(np.concatenate(column).mean()) for column in zip(*acted, strict=True))
    assert rows["mean log-prob, samples"].value.startswith(f"{teacher:.2f}, student {student:.2f}")


@pytest.mark.parametrize("change", [permuted, shifted])
def test_other_ids_end_the_run(game: Played, change: Callable[[PreTrainedModel], None]) -> None:
    rows = game.check(change)
    assert rows["mean log-prob, samples"].verdict == "failed" and rows["top-16 overlap"].verdict == "warning"


def test_a_lost_layer_is_noticed(game: Played) -> None:
    assert game.check(truncated)["mean log-prob, samples"].verdict != "ok"


@pytest.mark.parametrize("cut", CUTS)
def test_a_truncated_context_ends_the_run(game: Played, cut: str) -> None:
    row = game.check(CUTS[cut])["reach of its context"]
    assert row.verdict == "failed" and "context is truncated" in row.meaning


def test_a_sound_teacher_reads_the_whole_text(game: Played) -> None:
    row = game.check()["reach of its context"]
    seen, tested = map(int, re.findall(r"\d+", row.value))
    assert row.verdict == "ok" and seen == tested > 4 * CONTEXT


def test_the_size_of_the_teacher_is_stated(game: Played) -> None:
    layers = (len(game.teacher.model.layers), len(game.student.model.layers))
    row = game.check()["size"]
    assert row.verdict == "ok" and row.value.startswith(f"{layers[0]} layers ")
    assert f"; student {layers[1]} layers " in row.value


def test_rewards_of_games_are_compared_with_the_teacher(game: Played) -> None:
    row = game.check()["agrees with the reward"]
    assert row.verdict == "ok"
    assert (row.value == "all rewards are 0") == ("number_sum" in game.samples[0].id)


def test_short_turns_take_more_samples(game: Played) -> None:
    """Turns of one token: samples are added until there are enough of those, and too few of them are a warning."""
    (one, *_) = game.samples
    length = 60
    mask = np.arange(length) % 30 == 0
    brief = replace(one, tokens=np.resize(one.tokens, 10 + length), prompt_length=10).with_columns(
        action_mask=mask, rollout_logprobs=np.full(length, -1, np.float32)
    )
    many = _chosen([replace(brief, id=str(number)) for number in range(500)])
    assert len(many) > PREFLIGHT_SAMPLES and sum(e.action_tokens for e in many) >= MIN_ACTIONS
    assert len({e.id for e in many}) == len(many) and all(e.action_mask[-1] for e in many)
    silent = replace(brief, tokens=np.resize(one.tokens, 3000), prompt_length=2940).with_columns(
        action_mask=np.arange(length) == 0
    )
    few = _chosen([silent] * 500)
    assert FEWEST <= len(few) < 10 and sum(len(e.tokens) for e in few) <= MAX_TOKENS
    rows = replace(game, samples=[replace(brief, id=str(n)) for n in range(FEW // 2 - 1)]).check()
    assert rows["action tokens"].verdict == "warning"
