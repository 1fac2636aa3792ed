"""A thousand trajectories: every sampled token is trained on once, after exactly the tokens that preceded it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from roll_opd.config.plan import SamplingPlan
from roll_opd.extras.games.workflows.environment_workflow import EnvironmentWorkflow
from roll_opd.inference.vllm_requests import Completion
from roll_opd.workflows import Experience, ModelWrapper, Task
from tests.cover import repeats
from tests.extras.workflows.test_environment_workflow import BY_STEP, MODEL, task
from tests.workflows.sampled import Sampled
from tests.workflows.test_call_tree import play

# ChatML as Qwen3 writes it: thoughts are stripped from all turns before the last question
QWEN3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last %}{{ m.content }}{% else %}{{ said }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# as Llama 3 writes it: the text begins with a token of its own, and spaces around a message are lost
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
TEMPLATES = {
    "demo": (None, "<|end|>", ()),
    "qwen3": (QWEN3, "<|im_end|>", ("<|im_start|>", "<|im_end|>")),
    "llama3": (LLAMA3, "<|eot_id|>", ("<|bot|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
}
GAMES: dict[str, dict[str, Any]] = {
    "frozen_lake": {"size": 4, "max_steps": 6},
    "sokoban": {"dim_room": [6, 6], "num_boxes": 1, "max_steps": 6},
    "guess_number": {"max_steps": 6},
}


class Rambling(Sampled):
    """A random model: with or without thoughts and actions, arbitrary tokens; its turns end or are truncated."""

    def __init__(self, tokenizer: Any, end: str, seed: int) -> None:
        super().__init__(tokenizer, seed=seed)
        self._end = end

    async def generate(
        self, group: int, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: SamplingPlan
    ) -> list[Completion]:
        (said,) = await super().generate(group, prompts, seeds, sampling)
        kind = self._rng.integers(4)
        action = f"<answer>{self._rng.choice(['Up', 'Down', 'Left', 'Right', '7'])}</answer>"
        text = (f"<think>so  {kind}</think>\n\n{action}", f" {action} \n", action, None)[kind]
        tokens = said.tokens if text is None else np.array(self._tokenizer.encode(text, add_special_tokens=False))
        cut = self._rng.random() < 0.2
        if not cut:
            tokens = np.append(tokens, self._tokenizer.convert_tokens_to_ids(self._end))
        logprobs = -self._rng.random(len(tokens)).astype(np.float32)
        self.answered[-1] = Completion(tokens, logprobs, "length" if cut else "stop", ((3, len(tokens)),))
        return self.answered[-1:]


def learned_once(made: Sequence[Experience], engine: Rambling) -> None:
    """Compare trained with sampled tokens: every response once, complete, and after the text that it answered."""
    left = list(zip(engine.asked, engine.answered, strict=True))
    for one in made:
        tokens = one.tokens.numpy()
        mask = np.concatenate([np.zeros(one.prompt_length, bool), one.action_mask.numpy()])
        logprobs = np.concatenate([np.zeros(one.prompt_length, np.float32), one.logprobs.numpy()])
        while mask.any():
            start = int(mask.argmax())
            place = next(
                number
                for number, (asked, said) in enumerate(left)
                if np.array_equal(tokens[:start], asked)
                and np.array_equal(tokens[start : start + len(said.tokens)], said.tokens)
            )
            said = left.pop(place)[1]
            span = slice(start, start + len(said.tokens))
            assert mask[span].all() and np.array_equal(logprobs[span], said.logprobs)
            mask[span] = False
    assert not left


@pytest.mark.parametrize(
    ("name", "by_step"), [("demo", False), ("demo", True), ("qwen3", False), ("qwen3", True), ("llama3", False)]
)
@pytest.mark.parametrize("of_each_kind", repeats(45, 145))
def test_what_is_learned_is_what_was_sampled(name: str, by_step: bool, of_each_kind: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    template, end, special = TEMPLATES[name]
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    if name == "llama3":
        tokenizer.bos_token = special[0]
    branches, trajectories = 0, of_each_kind * (2 if by_step else 1)
    for seed in range(trajectories):
        game = list(GAMES)[seed % len(GAMES)]
        settings: dict[str, Any] = {"env_config": GAMES[game], "max_steps": 6}
        if by_step:
            settings |= {
                "env_manager_cls": BY_STEP,
                "history_length": 2,
                "agent_template": "{history}{current_observation}",
            }
        given = dataclasses.replace(task(game, seed=seed, **settings))
        engine = Rambling(tokenizer, end, seed)

        async def script(model: ModelWrapper, given: Task = given) -> list[Experience]:
            return await EnvironmentWorkflow(task=given, model=model).run_async()

        made = play(engine, tokenizer, script)
        learned_once(made, engine)
        branches += len(made)
    assert branches >= trajectories
    if name == "qwen3" and not by_step:
        assert branches > 1.4 * trajectories  # a quarter of the turns have thoughts, which are stripped
