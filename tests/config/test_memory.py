"""The memory estimate per rank against sums computed by hand, for shapes of published models; GiB, within 5 %."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import (
    Layout,
    MegatronPlan,
    MicroBatchLimits,
    ModelPlan,
    OptimizerPlan,
    RolloutPlan,
    RunPlan,
    SamplingPlan,
    TrainPlan,
)
from roll_opd.models.memory import (
    ModelShard,
    device_memory,
    fullest,
    logprob_memory,
    rollout_memory,
    shard_of,
    train_memory,
    window_tokens,
)
from roll_opd.models.model_info import ModelInfo, read_model

GIB = 2**30
SHAPES: dict[str, dict[str, Any]] = {  # as in the models' own config.json
    "8B": {"num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 12288},
    "32B": {"num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 64, "intermediate_size": 25600},
    "0.6B": {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "30B-A3B": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "235B-A22B": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "intermediate_size": 12288,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
    },
}
BASE = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
TOKENS = 16384


@pytest.fixture
def model(tmp_path: Path) -> Callable[[str], ModelInfo]:
    def read(name: str) -> ModelInfo:
        values = {**BASE, "max_position_embeddings": 40960, **SHAPES[name]}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return read_model(tmp_path)

    return read


def train_role(layout: Layout, **args: Any) -> TrainPlan:
    limits = MicroBatchLimits(tokens=TOKENS)
    return TrainPlan(
        name="student_train",
        model=ModelPlan("student", "bf16"),
        devices=tuple(range(layout.world_size)),
        layout=layout,
        forward_limits=limits,
        train_limits=limits,
        mini_batch_sequences=4096,
        optimizer=OptimizerPlan(),
        megatron_args=FrozenDict(args),
    )


def gib(info: ModelInfo, role: TrainPlan, stage: int = 0) -> dict[str, float]:
    return {part: size / GIB for part, size in train_memory(shard_of(info, role), role, TOKENS, stage).items()}


TP4 = Layout(tp=4, dp=8, sequence_parallel=True)
MOE = Layout(tp=2, ep=8, dp=16, sequence_parallel=True)


@pytest.mark.parametrize(
    ("name", "layout", "args", "stage", "expected"),
    [
        # 8.19 G parameters: 2, 4 and 12/8 bytes each over 4 ranks; 16.75 elements of hidden a token and layer
        ("8B", TP4, {}, 0, {"weights": 3.81, "gradients": 7.63, "optimizer": 2.86, "activations": 18.84}),
        # one hidden state a layer, and one layer at work
        ("8B", TP4, {"recompute_granularity": "full"}, 0, {"activations": 1.65}),
        # 9 layers of 193 M, and the embedding or the head of 622 M
        ("8B", Layout(pp=4, dp=8), {}, 0, {"weights": 4.39, "gradients": 8.79, "optimizer": 3.29}),
        ("8B", Layout(pp=4, dp=8), {}, 1, {"weights": 3.23, "gradients": 6.47, "optimizer": 2.43}),
        ("8B", Layout(pp=4, dp=8), {}, 3, {"weights": 4.39, "gradients": 8.79, "optimizer": 3.29}),
        # 4, 3 and 1 micro-batches under way: 9 layers of 16.75 * 4096 elements each
        ("8B", Layout(pp=4, dp=8), {}, 0, {"activations": 4 * 9 * 16.75 * 4096 * TOKENS * 2 / GIB}),
        ("8B", Layout(pp=4, dp=8), {}, 3, {"activations": 1 * 9 * 16.75 * 4096 * TOKENS * 2 / GIB}),
        ("8B", Layout(pp=4, dp=8, vpp=3), {}, 0, {"activations": 36 * (1 + 3 / 12) * 16.75 * 4096 * TOKENS * 2 / GIB}),
        ("32B", Layout(tp=8, dp=1, sequence_parallel=True), {}, 0, {"activations": 64 * 24.4 / 8 * 5120 * 2**15 / GIB}),
        ("0.6B", Layout(), {}, 0, {"activations": 28 * 22.0 * 1024 * 2**15 / GIB}),
        # tied: on two stages each holds the embedding of 156 M beside half of 440 M
        ("0.6B", Layout(pp=2), {}, 1, {"weights": 2 * (155.6e6 + 220.2e6) / GIB}),
        # 29.0 G in experts, 1.5 G beside them; expert-dp = 16 * 2 / (2 * 8) = 2
        ("30B-A3B", MOE, {}, 0, {"optimizer": 12 * (1.54e9 / 2 / 16 + 29.0e9 / 16 / 2) / GIB}),
        # a token's 8 copies, of 2048 + 3 * 384 elements, over 2 ranks that hold half of each expert
        ("30B-A3B", MOE, {}, 0, {"activations": 48 * (5.375 * 2048 + 8 * (2048 + 3 * 384)) * 2**15 / GIB}),
        ("30B-A3B", replace(MOE, etp=1), {}, 0, {"weights": 2 * (1.54e9 / 2 + 29.0e9 / 8) / GIB}),
    ],
)
def test_a_training_rank(
    model: Callable[[str], ModelInfo],
    name: str,
    layout: Layout,
    args: dict[str, Any],
    stage: int,
    expected: dict[str, float],
) -> None:
    found = gib(model(name), train_role(layout, **args), stage)
    assert {part: found[part] for part in expected} == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("device", "logits"), [("cpu", 64), ("cuda", 512)])
def test_the_heads_chunk_is_the_devices(model: Callable[[str], ModelInfo], device: str, logits: int) -> None:
    """In addition to the hidden states before and after the norm."""
    info, role = model("8B"), train_role(Layout(pp=4, dp=8))
    parts = train_memory(shard_of(info, role, device), role, TOKENS, 3)
    assert parts["head"] == 2 * TOKENS * 4096 * 2 + logits * 2**20


def test_a_plan_for_gpus_counts_theirs(plan: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll_opd.models.memory.CHUNK_BYTES", {"cpu": 0, "cuda": 1000})
    without, known = (plan(known).memory["student_train"][-1]["head"] for known in ({}, {"device_memory_gb": 80}))
    assert known - without == 1000


def test_a_block_of_recomputed_layers_is_between_none_and_all(model: Callable[[str], ModelInfo]) -> None:
    info = model("8B")
    block = {"recompute_granularity": "full", "recompute_method": "block"}
    sizes = [gib(info, train_role(TP4, **block, recompute_num_layers=n))["activations"] for n in (0, 12, 36)]
    none = gib(info, train_role(TP4))["activations"]
    assert none < sizes[0] < none * 1.05  # one layer more than none: the one at work
    assert sizes[0] > sizes[1] > sizes[2]


def test_stages_hold_the_whole_model_together(model: Callable[[str], ModelInfo]) -> None:
    """Untied and without copies, the parts of all ranks add up to the model."""
    info = model("30B-A3B")
    layout = Layout(tp=2, pp=4, ep=4, dp=4)
    shard = ModelShard(info, layout)
    dense, experts = (sum(counts) for counts in zip(*map(shard.parameters, range(4)), strict=True))
    routers = info.expert_layers * info.experts * info.hidden  # which both tensor ranks have the whole of
    assert dense * 2 - routers + experts * 2 * 4 == pytest.approx(info.parameters, rel=1e-6)


def test_frozen_experts(model: Callable[[str], ModelInfo]) -> None:
    """235B over tp4 pp2 ep4: 227 G in experts. An expert is split over tp by default."""
    role = MegatronPlan(
        name="teacher",
        model=ModelPlan("teacher", "bf16"),
        devices=tuple(range(32)),
        layout=Layout(tp=4, pp=2, ep=4, dp=4, sequence_parallel=True),
        forward_limits=MicroBatchLimits(tokens=TOKENS),
    )
    info = model("235B-A22B")
    whole = [logprob_memory(shard_of(info, role), role, TOKENS, stage)["weights"] / GIB for stage in range(2)]
    assert whole == pytest.approx([15.1, 15.1], rel=0.05)
    alone = replace(role, layout=replace(role.layout, etp=1))
    assert logprob_memory(shard_of(info, alone), alone, TOKENS, 0)["weights"] / GIB == pytest.approx(54.8, rel=0.05)


@pytest.mark.parametrize(
    ("name", "tp", "sequences", "expected"),
    [
        ("8B", 2, 64, 72.0),  # 36 * 2 * 8 heads of 128: 144 KiB a token, over two ranks
        ("30B-A3B", 8, 256, 96.0),  # 4 heads on 8 ranks: each rank holds a copy of one
    ],
)
def test_keys_and_values_take_the_planned_bytes(
    model: Callable[[str], ModelInfo], name: str, tp: int, sequences: int, expected: float
) -> None:
    engines = RolloutPlan("student_infer", ModelPlan("m", "bf16"), tuple(range(tp)), tp, 1, SamplingPlan(), 16384)
    assert rollout_memory(model(name), engines, sequences)["kv_cache"] / GIB == pytest.approx(expected, rel=0.05)


def test_layers_with_windows_store_a_window_of_each_sequence(tmp_path: Path) -> None:
    """Gemma 3 of 1B: 22 of 26 layers see 512 tokens, which with two tokens in flight are in at most 34 blocks."""
    sizes = {"num_hidden_layers": 26, "hidden_size": 1152, "num_attention_heads": 4, "num_key_value_heads": 1}
    sizes |= {"head_dim": 256, "intermediate_size": 6912, "vocab_size": 262144, "max_position_embeddings": 32768}
    config = {"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 6, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    info = read_model(tmp_path)
    assert len(info.windows) == 26 and info.windows.count(512) == 22
    assert info.parameters == pytest.approx(999_885_952, rel=2e-5)  # of the release; without norms of queries and keys
    inputs = 4 * 2 + 2  # of norms, which copy them to f32, and of attention and MLP
    elements = inputs * 1152 + 3 * 256 * (4 + 1) + 3 * 6912
    assert ModelShard(info, Layout()).layer_elements() == elements
    engines = RolloutPlan("student_infer", ModelPlan("m", "bf16"), (0,), 1, 1, SamplingPlan(), 16384)
    each_token = 2 * 256 * 2  # keys and values of one head, in bytes
    wanted = 8 * each_token * (4 * 16384 + 22 * (33 + 1) * 16)
    assert rollout_memory(info, engines, 8)["kv_cache"] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.nightly
@pytest.mark.parametrize("in_flight", [1, 2, 300])
@pytest.mark.parametrize("block", [1, 16, 128])
def test_tokens_of_a_window_are_those_of_vllm(block: int, in_flight: int) -> None:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    for window in (1, 7, 16, 17, 512, 4096):
        spec = SlidingWindowSpec(
            block_size=block, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, sliding_window=window
        )
        for length in (1, 15, 16, 100, 5000):
            blocks = spec.max_admission_blocks_per_request(in_flight, length)
            assert window_tokens(window, length, block, in_flight) == blocks * block


def test_devices_sum_what_stays_and_the_largest_of_what_passes(plan: Callable[..., RunPlan]) -> None:
    run = plan({"is_offload_states": False})
    needs = device_memory(run)
    by_hand: dict[int, list[list[int]]] = {}
    for name, role in run.roles().items():
        for rank, device in enumerate(role.devices):
            stages = run.memory[name]
            parts = stages[rank // (len(role.devices) // len(stages))]
            passing = parts.get("activations", 0) + parts.get("head", 0)
            by_hand.setdefault(device, []).append([sum(parts.values()) - passing, passing])
    assert needs == {
        device: sum(stay for stay, _ in roles) + max(passing for _, passing in roles)
        for device, roles in by_hand.items()
    }


@pytest.mark.parametrize("known", [None, 80 * GIB])
def test_turns_need_what_the_largest_phase_does(plan: Callable[..., RunPlan], known: int | None) -> None:
    """A student and its engines on one device: training, generation, or both weights during a weight sync."""
    run = plan({"student_infer.device_mapping": "[0]", "student_train.device_mapping": "[0]"})
    student, engines = (dict(fullest(run.memory[name])) for name in ("student_train", "student_infer"))
    if known:
        engines["kv_cache"] = int(0.9 * known) - engines["weights"]
    synced = student["weights"] + engines["weights"]
    alone = device_memory(run, known)[0] - max(sum(student.values()), sum(engines.values()), synced)
    assert alone == 0
    apart = device_memory(replace(run, is_offload_states=False), known)[0]
    passing = student["activations"] + student["head"]
    assert apart == sum(student.values()) - passing + sum(engines.values()) + passing


def test_devices_that_are_too_small_are_refused_or_warned_of(
    plan: Callable[..., RunPlan], problems: Callable[..., list[str]]
) -> None:
    """Refused where weights and states alone are too much, warned of where activations are."""
    run = plan({"device_memory_gb": 4})
    assert not any("GiB each" in text for text in run.warnings)
    (refused,) = problems({"device_memory_gb": 1e-5})
    assert refused.startswith("device_memory_gb: devices") and "student_train" in refused and "GiB each" in refused
    assert any("GiB each" in text for text in plan({"device_memory_gb": 1e-5}, runnable=False).warnings)
    alone = {
        "student_train.device_mapping": "[0]",
        "teacher.device_mapping": "[2,3]",
        "student_infer.device_mapping": "[1]",
    }
    spread = {**alone, "num_gpus_per_node": 4, "device_memory_gb": 4}
    run = plan(spread)
    stays, needs = (device_memory(run, computing=computing)[0] for computing in (False, True))
    assert stays == sum(run.memory["student_train"][0][part] for part in ("weights", "gradients", "optimizer")) < needs
    (warning,) = (t for t in plan({"device_memory_gb": (stays + needs) / 2**31}).warnings if "GiB each" in t)
    assert "student_train" in warning and "without any activations" not in warning
