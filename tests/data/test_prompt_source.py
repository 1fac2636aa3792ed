"""The prompt source: an endless sequence of permutations, from one or several streams, resumed at any position."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data_assets import write
from transformers import PreTrainedTokenizerBase

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import DataPlan, StreamPlan
from roll_opd.data.dataset import Prompt, open_prompts
from roll_opd.data.prompt_source import DrawOrder, MixedSource, PromptSource
from roll_opd.data.row_formats import DataError

NewSource = Callable[..., PromptSource]


def rows(count: int, tag: str = "t", name: str = "p") -> list[dict]:
    return [{"id": f"{name}{n}", "prompt": f"{n}+{n}=", "tag": tag} for n in range(count)]


def ids(batch: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in batch]


@pytest.fixture
def source(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> NewSource:
    """A source over a fresh file of `count` rows, or over `files`."""

    def make(count: int = 7, seed: int = 1, files: tuple[Path, ...] = (), **options: object) -> PromptSource:
        files = files or (write(tmp_path / f"{count}.jsonl", *rows(count)),)
        plan = DataPlan(**{"files": tuple(map(str, files)), "prompt_length": 64, **options})
        return PromptSource(open_prompts(plan, tokenizer)[0], seed)

    return make


@pytest.fixture
def two_files(tmp_path: Path) -> tuple[Path, Path]:
    """Two files of different sizes, with tags that cut across them."""
    first = write(tmp_path / "a.jsonl", *rows(7, "math", "a"), *rows(2, "code", "b"))
    second = write(tmp_path / "b.jsonl", *rows(3, "code", "c"), *rows(1, "math", "d"))
    return first, second


BY_TAG = (StreamPlan("math", 0.7, tags=("math",)), StreamPlan("code", 0.3, tags=("code",)))


def by_file(files: tuple[Path, ...], *weights: float) -> tuple[StreamPlan, ...]:
    return tuple(StreamPlan(f.name, w, files=(str(f),)) for f, w in zip(files, weights, strict=True))


@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_every_epoch_is_a_permutation(source: NewSource, count: int) -> None:
    prompts = source(count, seed=3)
    epochs = [ids(prompts.take(count)) for _ in range(4)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(row["id"] for row in rows(count))
    assert prompts.position == 4 * count
    if count == 30:
        assert len({tuple(epoch) for epoch in epochs}) == 4


@pytest.mark.parametrize("streams", [(), BY_TAG])
def test_the_sequence_does_not_depend_on_how_it_is_taken(
    source: NewSource, two_files: tuple[Path, Path], streams: tuple[StreamPlan, ...]
) -> None:
    whole = ids(source(files=two_files, streams=streams).take(60))
    for size in (1, 2, 5, 7, 20):
        prompts = source(files=two_files, streams=streams)
        assert [name for _ in range(60 // size) for name in ids(prompts.take(size))] == whole[: 60 // size * size]


@pytest.mark.parametrize("interleaved", ["not", "by tag", "by file"])
def test_resume_at_any_point_is_the_uninterrupted_sequence(
    source: NewSource, two_files: tuple[Path, Path], interleaved: str
) -> None:
    """Over seeds, batch sizes and cut points, most of them in the middle of an epoch of each stream."""
    streams = {"not": (), "by tag": BY_TAG, "by file": by_file(two_files, 0.4, 0.6)}[interleaved]
    for seed in (0, 1, 2**40):
        whole = ids(source(seed=seed, files=two_files, streams=streams).take(64))
        for size in (1, 4, 5):
            before = source(seed=seed, files=two_files, streams=streams)
            for stop in range(0, 40, size):
                state = json.loads(json.dumps(before.state_dict()))
                after = source(seed=seed, files=two_files, streams=streams)
                after.load_state_dict(state)
                assert after.position == stop
                assert ids(after.take(20)) == whole[stop : stop + 20]
                before.take(size)


def test_streams_give_their_share_in_epochs_of_their_own(source: NewSource, two_files: tuple[Path, Path]) -> None:
    prompts = source(files=two_files, streams=BY_TAG)
    batches = [prompts.take(10) for _ in range(16)]
    assert {Counter(prompt.tag for prompt in batch)["math"] for batch in batches} == {7}
    for tag, size in (("math", 8), ("code", 5)):
        drawn = [prompt.id for batch in batches for prompt in batch if prompt.tag == tag]
        epochs = [drawn[start : start + size] for start in range(0, len(drawn) - size + 1, size)]
        assert len(epochs) > 8
        assert all(len(set(epoch)) == size for epoch in epochs)


def test_files_give_their_share(source: NewSource, two_files: tuple[Path, Path]) -> None:
    prompts = source(files=two_files, streams=by_file(two_files, 0.25, 0.75))
    first = [name for name in ids(prompts.take(400)) if name[0] in "ab"]
    assert len(first) == 100


def test_shares_hold_in_every_run_of_draws() -> None:
    """Random weights: in no interval of draws does a stream differ from its share by two prompts or more."""
    generator = np.random.default_rng(0)
    for streams in (2, 3, 5):
        weights = generator.dirichlet(np.ones(streams))
        weights[0] = 0.0  # a stream that is switched off is never drawn
        weights /= weights.sum()
        members = [np.arange(1000 * s, 1000 * s + 3) for s in range(streams)]
        drawn = np.array(DrawOrder(members, weights, seed=0).take(500)) // 1000
        for stop in range(1, 501):
            counts = np.bincount(drawn[:stop], minlength=streams)
            assert np.abs(counts - weights * stop).max() < 2
        assert 0 not in drawn


def test_seeds_give_different_orders(source: NewSource) -> None:
    assert ids(source(30, seed=0).take(30)) != ids(source(30, seed=1).take(30))


def test_a_changed_data_set_or_seed_cannot_be_resumed(
    source: NewSource, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    state = source(5, seed=1).state_dict()
    original = tmp_path / "5.jsonl"
    retagged = [{**row, "tag": "u"} for row in rows(5)]
    reworded = [{**row, "prompt": "0"} for row in rows(5)]
    for number, (changed, why) in enumerate(
        [
            (rows(4), "5 prompts when it was saved, 4 now"),
            (rows(5)[::-1], "different ids"),
            (retagged, "different ids, tags"),
            (reworded, "tokens"),
            ([{**row, "ground_truth": "7"} for row in rows(5)], "ground truths"),
        ]
    ):
        file = write(tmp_path / f"changed{number}.jsonl", *changed)
        with pytest.raises(DataError, match="differ from those with which this run was saved") as refused:
            source(files=(file,)).load_state_dict(state)
        assert why in str(refused.value)
    with pytest.raises(DataError, match="1 files when it was saved, 2 now"):
        source(files=(original, write(tmp_path / "more.jsonl", *rows(1)))).load_state_dict(state)
    with pytest.raises(DataError, match="differ from those with which this run"):
        source(files=(original,), limit=4).load_state_dict(state)
    with pytest.raises(DataError, match="saved with seed 1 and is resumed with seed 2"):
        source(5, seed=2).load_state_dict(state)
    with pytest.raises(DataError, match="another version"):
        source(5, seed=1).load_state_dict({"position": 3, "seed": 1})
    moved = write(tmp_path / "moved.jsonl", *rows(5))
    source(files=(moved,)).load_state_dict(state)


def test_demonstrations_keep_their_own_position(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    answered = [{**row, "response": "1"} for row in rows(5, name="e")]
    files = {
        "experience": write(tmp_path / "prompts.jsonl", *rows(7)),
        "sft": write(tmp_path / "demonstrations.jsonl", *answered),
    }

    def mixed() -> MixedSource:
        plans = [DataPlan((str(file),), 64, schema=schema) for schema, file in files.items()]
        return MixedSource(*(open_prompts(plan, tokenizer)[0] for plan in plans), seed=1)

    def steps(source: MixedSource, count: int) -> list[list[str]]:
        return [ids(source.take(2)) + ids(source.demonstrations.take(3)) for _ in range(count)]

    whole, before = steps(mixed(), 9), mixed()
    assert all(name.startswith("p") for step in whole for name in step[:2])
    assert all(name.startswith("e") for step in whole for name in step[2:])
    assert steps(before, 4) == whole[:4]
    state = json.loads(json.dumps(before.state_dict()))
    after = mixed()
    after.load_state_dict(state)
    assert steps(after, 5) == whole[4:]
    assert (after.position, after.demonstrations.position) == (18, 27)

    alone = PromptSource(open_prompts(DataPlan((str(files["experience"]),), 64), tokenizer)[0], 1)
    for source, saved in ((mixed(), alone.state_dict()), (alone, state)):
        with pytest.raises(DataError, match="or a `demonstrations` section was added or removed since"):
            source.load_state_dict(saved)
    write(files["sft"], *answered[:4])
    with pytest.raises(DataError, match="demonstrations: the prompts differ from those"):
        mixed().load_state_dict(state)


def test_rows_without_ids_may_be_renamed_and_must_be_the_same(source: NewSource, tmp_path: Path) -> None:
    nameless = [{"prompt": "1" * n} for n in range(1, 4)]
    state = source(files=(write(tmp_path / "before.jsonl", *nameless),)).state_dict()
    source(files=(write(tmp_path / "after.jsonl", *nameless),)).load_state_dict(state)
    with pytest.raises(DataError, match="different ids"):
        source(files=(write(tmp_path / "other.jsonl", *nameless[::-1]),)).load_state_dict(state)


def test_changed_shares_cannot_be_resumed(source: NewSource, two_files: tuple[Path, Path]) -> None:
    state = source(files=two_files, streams=BY_TAG).state_dict()
    shifted = (replace(BY_TAG[0], weight=0.5), replace(BY_TAG[1], weight=0.5))
    regrouped = (replace(BY_TAG[0], tags=("math", "x")), BY_TAG[1])
    for streams in ((), shifted, regrouped, BY_TAG[::-1]):
        with pytest.raises(DataError, match=r"from \{math: 0.7, code: 0.3\} to "):
            source(files=two_files, streams=streams).load_state_dict(state)


def test_streams_without_prompts_and_prompts_without_a_stream(
    two_files: tuple[Path, Path], tokenizer: PreTrainedTokenizerBase
) -> None:
    plan = DataPlan(files=tuple(map(str, two_files)), prompt_length=64, streams=(replace(BY_TAG[0], weight=1.0),))
    _, report = open_prompts(plan, tokenizer)
    assert (report.streams, report.undrawn) == ({"math": 8}, {"code": 5})
    assert "never drawn" in report.summary() and "'code' (5)" in report.summary()
    with pytest.raises(DataError, match=r"no prompt to draw for 'poems'.*domain_interleave_probs"):
        open_prompts(replace(plan, streams=(*BY_TAG, StreamPlan("poems", 0.1, tags=("poem",)))), tokenizer)
    off = replace(plan, streams=(*BY_TAG, StreamPlan("poems", 0.0, tags=("poem",))))
    assert open_prompts(off, tokenizer)[1].streams == FrozenDict({"math": 8, "code": 5, "poems": 0})
