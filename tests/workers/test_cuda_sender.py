"""The student's half of a transfer between GPUs, as far as it goes without one: its agreement with vLLM's senders.

Tests import vLLM themselves: that takes seconds in each process that collects this file.
"""

import inspect
from typing import Any

import pytest
import torch

CALLED = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


def test_engines_are_what_vllms_senders_call() -> None:
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient

    from roll_opd.weight_sync.cuda_sender import StudentSource, WeightSyncClient

    client: Any = WeightSyncClient([], 1, StudentSource(None, torch.float32, everywhere=False), sends_handles=False)
    assert isinstance(client, VLLMWeightSyncClient)
    for name in CALLED:
        wanted, found = (inspect.signature(getattr(kind, name)) for kind in (VLLMWeightSyncClient, WeightSyncClient))
        assert list(found.parameters) == list(wanted.parameters), name


def test_the_student_is_a_source_as_vllm_declares_it() -> None:
    from vllm.distributed.weight_transfer.base import WeightSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    from roll_opd.weight_sync.cuda_sender import StudentSource

    assert issubclass(StudentSource, WeightSource) and not inspect.isabstract(StudentSource)
    wanted, found = (inspect.signature(kind.metadata) for kind in (WeightSource, StudentSource))
    assert list(found.parameters) == list(wanted.parameters)
    assert list(inspect.signature(WeightTransferTrainerFactory.trainer_init).parameters) == [
        "init_info",
        "client",
        "source",
    ]
    assert {IPCTrainerInitInfo.backend, NCCLTrainerInitInfo.backend} == {"ipc", "nccl"}
    assert IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=1).is_sender


@pytest.mark.parametrize(("engines", "ranks"), [(1, 1), (3, 1), (2, 4)])
def test_every_rank_of_every_engine_has_a_place_of_its_own_in_the_group(engines: int, ranks: int) -> None:
    """vLLM gives a worker the place `rank_offset` + its rank in its engine; the student's first rank has place 0."""
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload

    from roll_opd.weight_sync.cuda_sender import init_info_of

    whole = 1 + engines * ranks
    info = NCCLWeightTransferInitInfo(master_address="10.0.0.1", master_port=1, rank_offset=1, world_size=whole)
    reported = [init_info_of(worker_init_payload(info), number, ranks) for number in range(engines)]
    places = [NCCLWeightTransferInitInfo(**each).rank_offset + rank for each in reported for rank in range(ranks)]
    assert places == list(range(1, whole))


def test_handles_need_no_group_and_a_buffer_holds_any_tensor() -> None:
    from vllm.distributed.weight_transfer.base import ParamMeta

    from roll_opd.weight_sync.cuda_sender import BUFFER_BYTES, buffer_size, init_info_of

    assert init_info_of({"packed": True}, 3, 2) == {"packed": True}
    small, large = ParamMeta("norm", torch.float32, (8,)), ParamMeta("head", torch.bfloat16, (2**17, 2**12))
    assert buffer_size([small]) == BUFFER_BYTES and buffer_size([small, large]) == 2**30
