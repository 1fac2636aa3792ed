"""The prompt source: an endless sequence of permutations that resumes anywhere."""

import json
from dataclasses import replace

import numpy as np
import pytest

from roll_opd.data.rows import DataError
from roll_opd.data.source import Prompt, PromptSource


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{n}", n, "t", np.array([n, n + 1], dtype=np.int64)) for n in range(count)]


def ids(batch: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in batch]


@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_every_epoch_is_a_permutation(count: int) -> None:
    source = PromptSource(prompts(count), seed=3)
    epochs = [ids(source.take(count)) for _ in range(4)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(ids(prompts(count)))
    assert source.epoch == 4
    if count == 30:
        assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_sequence_does_not_depend_on_how_it_is_taken() -> None:
    whole = ids(PromptSource(prompts(7), seed=1).take(60))
    for size in (1, 2, 5, 7, 20):
        source = PromptSource(prompts(7), seed=1)
        assert [name for _ in range(60 // size) for name in ids(source.take(size))] == whole[: 60 // size * size]


def test_resume_at_any_point_is_the_uninterrupted_sequence() -> None:
    whole = ids(PromptSource(prompts(7), seed=1).take(40))
    for stop in range(30):
        before = PromptSource(prompts(7), seed=1)
        before.take(stop)
        state = json.loads(json.dumps(before.state_dict()))
        after = PromptSource(prompts(7), seed=1)
        after.load_state_dict(state)
        assert after.position == stop
        assert ids(after.take(10)) == whole[stop : stop + 10]


def test_seeds_give_different_orders() -> None:
    assert ids(PromptSource(prompts(30), 0).take(30)) != ids(PromptSource(prompts(30), 1).take(30))


def test_a_changed_data_set_or_seed_cannot_be_resumed() -> None:
    state = PromptSource(prompts(5), seed=1).state_dict()
    other_tokens = [replace(prompt, tokens=prompt.tokens + 1) for prompt in prompts(5)]
    for changed in (prompts(4), prompts(5)[::-1], other_tokens):
        with pytest.raises(DataError, match="not the ones this run was saved with"):
            PromptSource(changed, seed=1).load_state_dict(state)
    with pytest.raises(DataError, match="saved with seed 1 and is resumed with seed 2"):
        PromptSource(prompts(5), seed=2).load_state_dict(state)
    with pytest.raises(DataError, match="at least one"):
        PromptSource([], seed=1)
