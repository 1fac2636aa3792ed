"""Teachers' targets are sent directly from the rank that computed them to the rank that reads them."""

from typing import Any

import numpy as np
import pytest
import ray

from roll_opd.samples.micro_batches import DPShard
from roll_opd.workers import target_refs
from roll_opd.workers.target_refs import bundled, bundles_of, opened, references


def arrays(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    tokens = int(rng.integers(0, 40))
    hidden = rng.integers(-9, 9, (tokens, 5)).astype(np.int16)
    return {"hidden": hidden, "rest": rng.random(tokens, dtype=np.float32)}


@ray.remote
class Teacher:
    def compute(self, numbers: list[int], bundles: list[list[int]]) -> Any:
        columns, objects = bundled({number: arrays(number) for number in numbers}, bundles)
        return columns, *objects


@ray.remote
class Student:
    def read(self, shard: DPShard) -> list[dict[str, dict[str, np.ndarray]]]:
        return opened(shard.held, shard.micro_batches)


@pytest.mark.parametrize("bundle_tokens", [1, 60, 2048])
def test_a_rank_opens_what_its_share_needs(
    warm_options: dict[str, Any], bundle_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_refs, "BUNDLE_TOKENS", bundle_tokens)
    numbers = list(range(3, 23))
    teacher: Any = Teacher.options(**warm_options).remote()
    student: Any = Student.options(**warm_options).remote()
    bundles = bundles_of([len(arrays(number)["rest"]) for number in range(25)])
    assert [number for bundle in bundles for number in bundle] == list(range(25))
    columns, *objects = teacher.compute.options(num_returns=1 + len(bundles)).remote(numbers, bundles)
    kept = references(bundles, ray.get(columns), objects)
    ray.kill(teacher)  # the driver owns the arrays, so they are there when the teacher has ended
    assert list(kept) == numbers and 1 <= len({one.bundle for one in kept.values()}) <= len(numbers)
    own = [{"a": kept[number]} for number in numbers[:8]]
    shard = ray.put(
        DPShard(
            samples=[],
            micro_batches=[[2, 1], [], [7]],
            held=[{name: ref.for_ranks() for name, ref in one.items()} for one in own],
        )
    )
    found = ray.get(student.read.remote(shard))
    for place, by_teacher in enumerate(found):
        wanted = arrays(numbers[place])
        for name, array in by_teacher["a"].items():
            whole = wanted[name] if place in (1, 2, 7) else wanted[name][:0]
            assert array.dtype == whole.dtype and np.array_equal(array, whole) and array.shape == whole.shape
    ray.kill(student)
