"""The student's half of a transfer between GPUs, as far as it goes without one: its agreement with vLLM's senders.

Tests import vLLM themselves: that takes seconds in each process that collects this file.
"""

import inspect
from types import SimpleNamespace
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_vllm_accepts_the_placements_of_all_kinds_of_parts(ranks: int) -> None:
    """Of two ranks, kinds with padded or fused rows have none."""
    from vllm.distributed.weight_transfer.m2n_common import M2NMesh, check_transferable, resolve_layout, validate_layout

    from roll_opd.megatron.weights.sync_plan import FullTensor, Owner
    from roll_opd.megatron.weights.tensor_slices import SLICINGS, SliceSizes
    from roll_opd.models.families.qwen_hybrid import DeltaSizes
    from roll_opd.weight_sync.m2n_sender import placements

    delta = DeltaSizes(key_heads=4, value_heads=12, key_width=2, value_width=5, taps=3)
    sizes, lacking = SliceSizes(heads=8, kv_heads=4, vocab=31, padded_vocab=32, delta=delta), set()
    rows = {
        "qkv": 48,
        "fused_qkv": 48,
        "gated_qkv": 96,
        "delta_channels": 76,
        "delta_parts": 160,
        "delta_key_heads": 160,
    }
    for kind, slicing in SLICINGS.items():
        parameter = torch.empty(rows.get(kind, 32) // ranks, 6, device="meta")
        if slicing.form == "transposed":
            parameter = torch.empty(32, 32 // ranks, device="meta") if slicing.dim == 0 else parameter
        tensors = slicing.join([parameter] * ranks, sizes)
        for split, tensor in zip(slicing.splits(parameter.shape, ranks, sizes), tensors, strict=True):
            full = FullTensor(kind, torch.bfloat16, tuple(tensor.shape), Owner(0, None), split)
            check_transferable(full.name, full.dtype, full.shape)
            mesh, resolved = resolve_layout(M2NMesh((3, ranks), 0), placements(full))
            validate_layout(mesh, resolved, full.shape, "source")
            lacking |= set() if placements(full) else {kind}
    fused = {"vocabulary", "fused_qkv", "fused_gate_up", "delta_parts", "delta_channels"}
    assert lacking == ({"replicated", *fused} if ranks == 2 else set(SLICINGS))


def test_engines_read_what_each_sender_of_parts_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages of vLLM's trainer for two senders and two engines: only the first starts, only the last ends."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.m2n_common import M2NMesh, M2NParamMeta
    from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo, M2NTrainerWeightTransferEngine

    from roll_opd.weight_sync import cuda_sender, m2n_sender
    from roll_opd.weight_sync.m2n_receiver import SenderInitInfo, SenderUpdateInfo

    calls: list[tuple[int, str, Any, Any]] = []

    class Handle:
        def __init__(self, number: int) -> None:
            self.number = number

        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace(remote=lambda *a, **k: calls.append((self.number, name, *a, k.get("last"))))

    for module in (cuda_sender, m2n_sender):
        monkeypatch.setattr(module, "ray", SimpleNamespace(get=list, put=lambda value: value))
    info = M2NTrainerInitInfo(
        rank=0, master_address="h", master_port=1, world_size=8, num_trainer_ranks=4, dst_mesh_dims=(2, 2)
    )
    assert "nccl_m2n" in WeightTransferTrainerFactory._registry
    for number in range(2):
        source: Any = SimpleNamespace(entries=[{"names": ["w"], "shape": [], "fingerprint": {}}])
        client = m2n_sender.OwnerClient([Handle(0), Handle(1)], 2, source, number, 2)
        trainer = M2NTrainerWeightTransferEngine(client=client, source=source, is_controller=True, num_trainer_ranks=4)
        trainer._src_mesh = M2NMesh((2, 2), 0)
        trainer._metas = [M2NParamMeta("w", torch.bfloat16, (8, 6), (-1, 0))]
        client.init_weight_transfer_engine(trainer._worker_init_info(info))
        client.start_weight_update()
        client.update_weights({"names": ["w"]})
        client.finish_weight_update()
    connected = [SenderInitInfo(**given) for _, name, given, _ in calls if name == "init_weight_transfer"]
    assert [(each.sender, each.engine, each.rank_offset) for each in connected] == [
        (0, 0, 4),
        (0, 1, 4),
        (1, 0, 4),
        (1, 1, 4),
    ]
    assert [name for engine, name, *_ in calls if engine == 1 and name == "begin_update"] == ["begin_update"]
    loaded = [
        (SenderUpdateInfo(**given), last)
        for engine, name, given, last in calls
        if (engine, name) == (1, "load_weights")
    ]
    assert [(each.sender, each.names, each.entries is None, last) for each, last in loaded] == [
        *((0, ["w"], True, False), (0, [], False, False), (1, ["w"], True, False), (1, [], False, True)),
    ]
