"""The results of a data-parallel rank for its shard of a mini-batch have the same bits as for the full mini-batch."""

import numpy as np
import pytest

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import Layout, MegatronPlan, MicroBatchLimits, ModelPlan, ObjectivePlan, TeacherPlan
from roll_opd.objective.columns import loss_columns
from roll_opd.samples.micro_batches import Packing, shard_batch
from roll_opd.samples.sample import Sample, TargetRef, as_columns, changed, teacher_columns
from roll_opd.workers.target_refs import opened, with_targets

WORKER = MegatronPlan("", ModelPlan(""), (0,), Layout(), MicroBatchLimits())
TEACHERS = [TeacherPlan("a", WORKER, 1.0), TeacherPlan("b", WORKER, 0.5)]
OBJECTIVES = [
    ObjectivePlan(),
    ObjectivePlan(loss_agg_mode="seq-mean-token-mean", length_loss_weight=True, difficulty_loss_weight=True),
    ObjectivePlan(opd_objective="topk", loss_agg_mode="seq-mean-token-sum"),
]


def experience(rng: np.random.Generator, number: int, *, taught: bool) -> tuple[Sample, dict[str, dict]]:
    """Return one sample of any kind in a batch, and its teachers' targets."""
    length, prompt = int(rng.integers(0, 30)), int(rng.integers(1, 9))
    demonstration = bool(rng.random() < 0.2)
    names = [] if demonstration else [name for name in ("b", "a") if rng.random() < 0.6]

    def numbers() -> np.ndarray:
        return -rng.random(length, dtype=np.float32)

    made = Sample(
        id=str(number),
        group_id=str(number // 4),
        tokens=rng.integers(0, 100, prompt + length),
        prompt_length=prompt,
        finish_reason="stop",
        demonstration=demonstration,
        reward=None if demonstration else 1.0,
        extra=FrozenDict({"difficulty": float(rng.random()), "test_cases": "x" * 100}),
        columns=as_columns(
            action_mask=rng.random(length) < 0.8,
            rollout_logprobs=None if demonstration else numbers(),
            old_logprobs=None if demonstration else numbers(),
            advantages=None if demonstration else rng.random(length),
            loss_mask=rng.random(length) < 0.7 if rng.random() < 0.5 else None,
            **teacher_columns({name: numbers() for name in names}),
        ),
    )
    targets = {
        name: {"topk_ids": rng.integers(0, 9, (length, 3)).astype(np.int32), "topk_rest": numbers()}
        for name in (names if taught else [])
    }
    return made, targets


@pytest.mark.parametrize("objective", OBJECTIVES, ids=["sampled", "weighted", "topk"])
@pytest.mark.parametrize("ranks", [1, 3, 40])
def test_columns_of_a_share_are_those_of_the_batch(
    objective: ObjectivePlan, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught = objective.opd_objective != "sampled"
    rng = np.random.default_rng(ranks)
    made = [experience(rng, number, taught=taught) for number in range(24)]
    batch, targets = [one for one, _ in made], [own for _, own in made]
    held = [as_held(number, own) for number, own in enumerate(targets)]
    batch = [changed(one, teacher_targets=own) for one, own in zip(batch, held, strict=True)]
    samples = loss_columns(batch, TEACHERS, objective)
    whole = with_targets(samples, targets) if taught else samples

    packing, limits = Packing(ranks, equal=True), MicroBatchLimits(tokens=60)
    assignment = packing.assign([(one.tokens, one.prompt_length) for one in batch], limits)
    pieces = shard_batch(samples, assignment, held if taught else ())
    bundles = [list(own.values()) for own in targets]
    monkeypatch.setattr("ray.get", lambda references: [bundles[reference] for reference in references])
    seen: list[int] = []
    for shard, numbers in zip(pieces.shards, pieces.numbers, strict=True):
        columns = shard.samples._value  # type: ignore[attr-defined]  # as it arrives
        if shard.held:
            columns = with_targets(columns, opened(shard.held, shard.micro_batches))
        assert columns and all(len(one.tokens) == 1 for n, one in zip(numbers, columns, strict=True) if n == -1)
        for place in (place for part in shard.micro_batches for place in part):
            seen.append(numbers[place])
            same(columns[place], whole[numbers[place]])
        assert columns[0].columns.keys() == whole[0].columns.keys()  # what a micro-batch without a sample is made like
    assert sorted(seen) == list(range(len(batch)))
    assert [
        [[pieces.numbers[r][n] for n in part] for part in s.micro_batches] for r, s in enumerate(pieces.shards)
    ] == (assignment)


def as_held(bundle: int, targets: dict[str, dict[str, np.ndarray]]) -> dict[str, TargetRef]:
    columns = [{key: (array.dtype.str, array.shape[1:]) for key, array in own.items()} for own in targets.values()]
    return {name: TargetRef(bundle, place, columns[place]) for place, name in enumerate(targets)}


def same(found: Sample, wanted: Sample) -> None:
    assert np.array_equal(found.tokens, wanted.tokens) and found.prompt_length == wanted.prompt_length
    assert found.columns.keys() == wanted.columns.keys()
    for name, array in wanted.columns.items():
        assert found.columns[name].dtype == array.dtype and found.columns[name].tobytes() == array.tobytes(), name
