"""Shared-memory buckets: readers get the written values, and no memory remains."""

import itertools
import mmap
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from roll_opd.samples.weight_bucket import (
    BucketMemory,
    bucketed,
    entry_of,
    map_bucket,
    row_checksums,
    sampled_rows,
    sent_checksums,
    sent_tensors,
)


def random_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "norm": torch.randn(7),
        "matrix": torch.randn(5, 3).bfloat16(),
        "transposed": torch.randn(4, 6).t(),
        "experts": torch.randn(2, 3, 4).half(),
        "large": torch.randn(40, 30),
    }


def stacks(tensors: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Yield tensors of one dtype and shape together."""
    for _, run in itertools.groupby(tensors, lambda pair: (pair[1].dtype, pair[1].shape)):
        names, of_run = zip(*run, strict=True)
        yield list(names), torch.stack(of_run)


@contextmanager
def shared_bucket(tensors: dict[str, torch.Tensor]) -> Iterator[dict]:
    memory = BucketMemory()
    for name, tensor in tensors.items():
        memory.add(name, tensor, torch.float32)
    yield memory.describe()
    memory.close()


def checksum_in_another_process(description: dict) -> float:
    return sum(float(tensor.double().sum()) for _, tensor in map_bucket(**description)[1])


def test_another_process_maps_what_was_written() -> None:
    tensors = random_tensors()
    with shared_bucket(tensors) as description:
        mapped = dict(map_bucket(**description)[1])
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            elsewhere = pool.apply(checksum_in_another_process, (description,))
    for name, tensor in tensors.items():  # the mapping outlives the writer's
        assert mapped[name].dtype == tensor.dtype
        assert torch.equal(mapped[name], tensor)
    assert elsewhere == pytest.approx(sum(float(tensor.double().sum()) for tensor in tensors.values()))


def test_a_bucket_goes_to_another_host_byte_for_byte() -> None:
    memory, tensors = BucketMemory(), random_tensors()
    memory.fill(np.zeros(9_999, np.uint8), {"stacks": []})  # a longer bucket was there before
    with shared_bucket(tensors) as description:
        content = map_bucket(**description)[0].numpy()
        memory.fill(content, description)
    there = dict(map_bucket(**memory.describe())[1])
    assert all(torch.equal(there[name], tensor) for name, tensor in tensors.items())
    memory.close()


def test_memory_is_gone_with_the_writer() -> None:
    before = set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    with shared_bucket(random_tensors()) as description:
        pass
    assert (set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))) == before
    with pytest.raises(FileNotFoundError):
        map_bucket(**description)


def test_a_reader_cannot_change_another_readers_weights() -> None:
    with shared_bucket({"norm": torch.ones(4)}) as description:
        dict(map_bucket(**description)[1])["norm"].zero_()
        assert dict(map_bucket(**description)[1])["norm"].sum() == 4


@pytest.mark.parametrize("limit", [1, 150, 1_000, 10**6])
def test_buckets_keep_to_their_limit_and_their_order(limit: int) -> None:
    tensors = list(random_tensors().items())
    tensors += [(f"expert.{number}", torch.randn(3, 5)) for number in range(7)]
    memories = [BucketMemory(), BucketMemory()]
    arrived, lasts, used = [], [], []
    for memory, last in bucketed(stacks(tensors), memories, torch.float32, limit):
        _, mapped = map_bucket(**memory.describe())
        assert len(mapped) == 1 or sum(tensor.nbytes for _, tensor in mapped) <= limit
        arrived += [(name, tensor.clone()) for name, tensor in mapped]
        lasts.append(last)
        used.append(memories.index(memory))
    for (name, tensor), (wanted, expected) in zip(arrived, tensors, strict=True):
        assert name == wanted and torch.equal(tensor, expected)
    assert lasts == [False] * (len(lasts) - 1) + [True] and (len(lasts) == 1) == (limit == 10**6)
    assert used == [number % 2 for number in range(len(used))]  # while one is read, the other one is written
    assert not list(bucketed([], memories, torch.float32, limit))
    pages = max(limit, *(tensor.nbytes for _, tensor in tensors)) // mmap.PAGESIZE + 1
    written = [os.fstat(memory._descriptor).st_blocks * 512 for memory in memories]
    assert limit == 10**6 or sum(written) <= 2 * pages * mmap.PAGESIZE
    for memory in memories:
        memory.close()


def test_a_fingerprint_sees_one_bit_and_the_models_precision() -> None:
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    changed, swapped = vector.clone(), vector.clone()
    changed.view(torch.int32)[500] ^= 1
    swapped[[3, 4]] = vector[[4, 3]]
    names = ["vector", "changed", "swapped"]
    sent = sent_tensors([entry_of(names, torch.stack([vector, changed, swapped]), torch.bfloat16)])
    assert sent_checksums(sent["vector"], "bfloat16") == row_checksums(vector.bfloat16()[None], [0])
    expected, *others = (sent_checksums(sent[name], "float32") for name in names)
    assert expected not in others and sent_checksums(sent["vector"], "float16") is None


def test_a_stack_has_the_fingerprints_of_its_tensors() -> None:
    """Against a loop over values, in integers of any size."""
    tensors = torch.randn(3, 9, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    factors = (torch.randint(-(2**63), 2**63 - 1, (5,), generator=torch.Generator().manual_seed(0)) | 1).tolist()
    sent = sent_tensors([entry_of("abc", tensors, torch.bfloat16)])
    for matrix, name in zip(tensors, "abc", strict=True):
        rows = matrix[sampled_rows(9)].view(torch.int16).tolist()
        sums = [sum(bits * factor for bits, factor in zip(row, factors, strict=True)) for row in rows]
        assert sent_checksums(sent[name], "bfloat16") == [(value + 2**63) % 2**64 - 2**63 for value in sums]


def test_a_stack_needs_a_name_for_each_tensor() -> None:
    with pytest.raises(ValueError, match="2 names for 1 tensors"):
        entry_of(["one", "other"], torch.ones(1, 3), torch.float32)


def test_a_cut_bucket_is_not_read() -> None:
    with shared_bucket({"one": torch.ones(1)}) as description, pytest.raises(RuntimeError):
        map_bucket(**description | {"size": description["size"] - 4})


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 1000])
def test_sampled_rows_are_rows_with_both_ends(rows: int) -> None:
    picked = sampled_rows(rows)
    assert picked[0] == 0 and picked[-1] == rows - 1 and picked == sorted(set(picked))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "empty weight bucket"),
        ({"ids": torch.ones(2, dtype=torch.int64)}, "dtype int64 cannot be transferred"),
        ({"scalar": torch.tensor(1.0)}, "'scalar' has shape"),
    ],
)
def test_what_cannot_be_sent_is_refused(tensors: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message), shared_bucket(tensors):
        pass
