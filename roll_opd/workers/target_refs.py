"""References to teacher targets, whose arrays stay in the object store of the host that computed them.

The driver owns the arrays, so they outlive the rank that computed them. It passes references to the student, and each
rank of the student fetches the targets of its shard. After the last update of the step, the driver releases the arrays.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import ray

from roll_opd.samples.sample import Sample, TargetRef
from roll_opd.samples.transport import Compact

BUNDLE_TOKENS = 2048  # the targets of short responses are stored in one object, since each object costs time


Columns = dict[str, tuple[str, tuple[int, ...]]]  # name of an array -> (dtype, shape) of one token's entry


def bundles_of(lengths: Sequence[int]) -> list[list[int]]:
    """Return the numbers of the samples whose targets are stored in one object, for each of at least one object.

    Args:
        lengths: number of response tokens of each sample.
    """
    bundles: list[list[int]] = [[]]
    tokens = 0
    for number, length in enumerate(lengths):
        if tokens >= BUNDLE_TOKENS:
            bundles.append([])
            tokens = 0
        bundles[-1].append(number)
        tokens += length
    return bundles


def bundled(
    targets: Mapping[int, dict[str, np.ndarray]], bundles: Sequence[Sequence[int]]
) -> tuple[dict[int, Columns], list[Compact]]:
    """Return (columns, objects): the columns of each sample's arrays, and the arrays of each bundle as one object.

    Args:
        targets: map from the index of a sample to its arrays, by name.
        bundles: see `bundles_of`. Samples without targets are left out.
    """
    columns = {
        number: {name: (array.dtype.str, array.shape[1:]) for name, array in arrays.items()}
        for number, arrays in targets.items()
    }
    return columns, [Compact([targets.get(number) for number in bundle]) for bundle in bundles]


def references(
    bundles: Sequence[Sequence[int]], columns: Mapping[int, Columns], objects: Sequence[ray.ObjectRef]
) -> dict[int, TargetRef]:
    """Return the reference of each sample with targets. `objects` are references to those of `bundled`."""
    return {
        number: TargetRef(held, place, columns[number])
        for bundle, held in zip(bundles, objects, strict=True)
        for place, number in enumerate(bundle)
        if number in columns
    }


def hold(targets: Mapping[int, dict[str, np.ndarray]]) -> dict[int, TargetRef]:
    """Put the targets of samples into the object store of this node, and return a reference for each sample."""
    columns, objects = bundled(targets, bundles := [[number] for number in targets])
    return references(bundles, columns, [ray.put(each) for each in objects])


def opened(
    held: Sequence[Mapping[str, TargetRef]], needed: Sequence[Sequence[int]]
) -> list[dict[str, dict[str, np.ndarray]]]:
    """Return the arrays of each sample: a map from the name of its targets to their arrays.

    Args:
        held: references of each sample, by the name of the targets.
        needed: micro-batches of sample indices. Samples outside these micro-batches get empty arrays.
    """
    numbers = {number for part in needed for number in part}
    wanted = {id(one): one for number in numbers for one in held[number].values()}.values()
    references = list({one.bundle: None for one in wanted})
    bundles = dict(zip(references, ray.get(references), strict=True))

    def arrays(number: int, one: TargetRef) -> dict[str, np.ndarray]:
        if number in numbers:
            return bundles[one.bundle][one.place]
        return {name: np.zeros((0, *shape), dtype) for name, (dtype, shape) in one.columns.items()}

    return [{name: arrays(number, one) for name, one in by.items()} for number, by in enumerate(held)]


def with_targets(samples: Sequence[Sample], targets: Sequence[Mapping[str, Mapping[str, np.ndarray]]]) -> list[Sample]:
    """Return the samples of a shard with the targets of every teacher as columns `TEACHER/ARRAY`.

    If a sample has no targets of a teacher, its columns for this teacher are zeros. The zeros do not enter the loss,
    because the sample's column `TEACHER/share` is 0.
    """
    teachers = {name: arrays for own in targets for name, arrays in own.items()}
    result = []
    for sample, own in zip(samples, targets, strict=True):
        length = len(sample.columns["mask"])
        columns = {
            f"{name}/{key}": own[name][key] if name in own else _zeros(length, like)
            for name, arrays in teachers.items()
            for key, like in arrays.items()
        }
        result.append(replace(sample, columns={**sample.columns, **columns}))
    return result


def _zeros(length: int, like: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.zeros((), like.dtype), (length, *like.shape[1:]))


def release(samples: Iterable[Sample]) -> None:
    """Release the arrays of the samples' targets."""
    for sample in samples:
        for held in sample.teacher_targets.values():
            held.released()
