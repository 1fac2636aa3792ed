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

    from roll_opd.megatron.weights.sync_plan import Receivers
    from roll_opd.weight_sync.cuda_sender import StudentSource, WeightSyncClient

    source = StudentSource(None, Any, torch.float32, Receivers.FIRST)
    client: Any = WeightSyncClient([], 1, source, sends_handles=False)
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
    for method in ("metadata", "held_names", "groups", "iter_groups"):
        wanted, found = (inspect.signature(getattr(kind, method)) for kind in (WeightSource, StudentSource))
        assert list(found.parameters) == list(wanted.parameters), method
    assert list(inspect.signature(WeightTransferTrainerFactory.trainer_init).parameters) == [
        "init_info",
        "client",
        "source",
    ]
    assert {IPCTrainerInitInfo.backend, NCCLTrainerInitInfo.backend} == {"ipc", "nccl"}
    assert IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=1).is_sender


@pytest.mark.parametrize("limit", [1, 2**40])
def test_groups_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Two stages with two parts of the model each; experts on two ranks, and a router in another dtype."""
    from vllm.distributed.weight_transfer.base import layerwise_groups

    from roll_opd.megatron.weights import sync_plan
    from roll_opd.megatron.weights.tensor_slices import SLICINGS

    def shards(*names: str | tuple[str, str]) -> list[sync_plan.ParameterShard]:
        of_ranks = [((name,),) if isinstance(name, str) else tuple((one,) for one in name) for name in names]
        dtypes = [torch.float32 if "router" in str(name) else torch.bfloat16 for name in names]
        return [
            sync_plan.ParameterShard(of, SLICINGS["replicated"], torch.Size([2, 3]), dtype, len(of) > 1)
            for of, dtype in zip(of_ranks, dtypes, strict=True)
        ]

    def layers(*numbers: int) -> list[str | tuple[str, str]]:
        of = "model.layers.{}.".format
        experts = {n: (of(n) + "mlp.experts.0.up", of(n) + "mlp.experts.2.up") for n in numbers}
        return [name for n in numbers for name in (of(n) + "norm", of(n) + "mlp.router", experts[n], of(n) + "o")]

    monkeypatch.setattr(sync_plan, "CHUNK_BYTES", limit)
    stages = [
        shards("model.embed_tokens.weight", *layers(0, 1, 10, 11)),
        shards(*layers(4, 5, 14, 15), "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"),
    ]
    groups = sync_plan.grouped(stages, 2, 4)
    names = [[n for c in group for s in c.shards for one in s.names for n in one] for group in groups]
    assert names == layerwise_groups([name for group in names for name in group]) and len(names) == 10
    assert sum(map(len, names)) == len({name for group in names for name in group}) == 8 * 5 + 3
    assert {len(group) for group in groups[1:-1]} == ({4} if limit == 1 else {3})
    for chunk in (chunk for group in groups for chunk in group):
        assert [stages[chunk.kind.stage][n] for n in chunk.numbers] == list(chunk.shards)


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
