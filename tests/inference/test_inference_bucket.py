"""Shared-memory buckets: what is mapped is what was written, and nothing is left behind."""

import multiprocessing
import os

import numpy as np
import pytest
import torch

from roll_opd.inference.bucket import fingerprint, map_bucket, row_checksums, sampled_rows, shared_bucket


def random_tensors() -> dict[str, torch.Tensor | np.ndarray]:
    torch.manual_seed(0)
    return {
        "norm": torch.randn(7),
        "matrix": torch.randn(5, 3).bfloat16(),
        "transposed": torch.randn(4, 6).t(),
        "experts": torch.randn(2, 3, 4).half(),
        "numpy": np.linspace(0, 1, 11, dtype=np.float32),
    }


def checksum_in_another_process(description: dict) -> float:
    return sum(float(tensor.double().sum()) for _, tensor in map_bucket(**description))


def test_another_process_maps_what_was_written() -> None:
    tensors = random_tensors()
    with shared_bucket(tensors, torch.float32) as description:
        mapped = dict(map_bucket(**description))
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            elsewhere = pool.apply(checksum_in_another_process, (description,))
    for name, tensor in tensors.items():  # the mapping outlives the writer's
        expected = torch.as_tensor(tensor)
        assert mapped[name].dtype == expected.dtype
        assert torch.equal(mapped[name], expected)
    assert elsewhere == pytest.approx(sum(float(torch.as_tensor(t).double().sum()) for t in tensors.values()))


def test_memory_is_gone_with_the_writer() -> None:
    before = set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    with shared_bucket(random_tensors(), torch.float32) as description:
        pass
    assert (set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))) == before
    with pytest.raises(FileNotFoundError):
        map_bucket(**description)


def test_a_reader_cannot_change_another_readers_weights() -> None:
    with shared_bucket({"norm": torch.ones(4)}, torch.float32) as description:
        dict(map_bucket(**description))["norm"].zero_()
        assert dict(map_bucket(**description))["norm"].sum() == 4


def test_a_fingerprint_sees_one_bit_and_the_models_precision() -> None:
    vector = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    expected = fingerprint(vector, torch.bfloat16)
    assert expected["bfloat16"] == row_checksums(vector.bfloat16()[None], [0])
    changed = vector.clone()
    changed.view(torch.int32)[500] ^= 1
    assert fingerprint(changed, torch.bfloat16)["float32"] != expected["float32"]


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
    with pytest.raises(ValueError, match=message), shared_bucket(tensors, torch.float32):
        pass
