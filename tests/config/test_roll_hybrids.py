"""ROLL's configurations of Qwen3-Next and Qwen3.5: their layouts, batches and models of full size, planned.

Each configuration has the keys that its file in ROLL's examples sets for models, layouts, devices and batches. The
models have the sizes of the releases. tests/net/plans.py plans the whole files of a checkout of ROLL.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from plan_sources import with_stand_ins

from roll_opd.base.failures import ConfigError
from roll_opd.config.plan import RunPlan
from roll_opd.planner.load_plan import load_plan

pytestmark = pytest.mark.extras

Values = dict[str, Any]
WORKERS = "roll.pipeline.rlvr.rewards"
COMMON = {"seed": 42, "num_gpus_per_node": 8, "max_steps": 500, "save_steps": 100, "resume_from_checkpoint": False}
MOE = {"moe_token_dispatcher_type": "alltoall", "bias_activation_fusion": True, "moe_grouped_gemm": True}


def layout(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, **more: Any) -> Values:
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    return dict(zip(names, (tp, pp, cp), strict=True)) | {"expert_model_parallel_size": ep, "bf16": True} | more


def role(strategy: str, config: Values, devices: int, first: int = 0, **more: Any) -> Values:
    return {
        "model_args": {"dtype": "bf16"},
        "strategy_args": {"strategy_name": strategy, "strategy_config": config},
        "device_mapping": f"list(range({first},{first + devices}))",
        **more,
    }


def rlvr(
    model: str,
    train: Values,
    reference: Values,
    engine: Values,
    prompts: int,
    accumulated: int,
    devices: int,
    engines: tuple[int, int] | None = None,  # devices, the first of them
    estimator: str = "reinforce",
) -> Values:
    """Return RLVR with a math reward; without `engines` the engines share the student's devices."""
    steps = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": accumulated, "learning_rate": 1e-6}
    data = {"data_args": {"template": "native", "file_name": ["data/math_deepmath_deal.jsonl"]}}
    answers = {"max_new_tokens": 4096, "top_p": 0.99, "top_k": 100, "temperature": 0.99, "num_return_sequences": 8}
    number, first = engines or (devices, 0)
    reward = {"worker_cls": f"{WORKERS}.math_rule_reward_worker.MathRuleRewardWorker", "world_size": 8}
    return COMMON | {
        "pretrain": f"Qwen/{model}",
        "rollout_batch_size": prompts,
        "num_return_sequences_in_group": 8,
        "prompt_length": 2048,
        "response_length": 4096,
        "adv_estimator": estimator,
        "actor_train": role("megatron_train", train, devices, training_args=steps, **data),
        "actor_infer": role("vllm", engine, number, first, generating_args=answers),
        "reference": role("megatron_infer", reference, devices),
        "rewards": {"math_rule": reward | {"tag_included": ["math_rule"]}},
    }


def next_80b(memory: float) -> Values:
    stages = {"virtual_pipeline_model_parallel_size": 12, "recompute_granularity": "selective"} | MOE
    train = layout(pp=4, ep=8, use_distributed_optimizer=True, recompute_modules="moe", **stages)
    reference = layout(pp=2, ep=8, virtual_pipeline_model_parallel_size=12, **MOE)
    engine = {"tensor_parallel_size": 4, "gpu_memory_utilization": memory, "max_model_len": 8192}
    return rlvr("Qwen3-Next-80B-A3B-Instruct", train, reference, engine, 64, 32, 64)


def moe_122b() -> Values:
    train = layout(pp=4, ep=8, sequence_parallel=True, recompute_granularity="full", **MOE)
    return rlvr("Qwen3.5-122B-A10B", train, layout(pp=2, ep=8, **MOE), {"tensor_parallel_size": 8}, 32, 8, 128)


def moe_397b() -> Values:
    stages = {"pipeline_model_parallel_layout": "E|(tt|)*30,L", "sequence_parallel": True} | MOE
    train = layout(pp=16, cp=4, ep=16, recompute_granularity="full", **stages)
    engine = {"tensor_parallel_size": 16, "max_model_len": 20480, "gpu_memory_utilization": 0.85}
    return rlvr("Qwen3.5-397B-A17B", train, layout(pp=8, cp=2, ep=8, **stages), engine, 32, 64, 256, (64, 256))


def dense_27b() -> Values:
    train = layout(tp=4, pp=2, sequence_parallel=True, recompute_granularity="selective")
    engine = {"tensor_parallel_size": 4}
    return rlvr("Qwen3.5-27B", train, layout(tp=4), engine, 256, 512, 32, estimator="grpo")


def moe_35b() -> Values:
    train = layout(pp=2, ep=8, sequence_parallel=True, recompute_granularity="selective", **MOE)
    engine = {"tensor_parallel_size": 2}
    return rlvr("Qwen3.5-35B-A3B", train, layout(ep=4, **MOE), engine, 256, 256, 16, estimator="grpo")


def moe_35b_virtual() -> Values:
    train = layout(pp=4, ep=8, sequence_parallel=True, virtual_pipeline_model_parallel_size=2, **MOE)
    engine = {"tensor_parallel_size": 4, "max_model_len": 8192}
    return rlvr("Qwen3.5-35B-A3B", train, layout(pp=4, ep=8, **MOE), engine, 64, 64, 32, estimator="grpo")


def sft_35b(**sharded: Any) -> Values:
    config = {"fsdp_size": 8, "param_dtype": "bf16", "reduce_dtype": "bf16", "offload_policy": False} | sharded
    steps = {"num_train_epochs": 1, "per_device_train_batch_size": 1, "learning_rate": 5e-6}
    learner = role("fsdp2_train", config, 8, training_args=steps | {"gradient_accumulation_steps": 1})
    learner["data_args"] = {"file_name": "./data/code_alpaca_20k.json", "template": "qwen2_5"}
    keys = {"prompt_key": "instruction", "query_key": "input", "response_key": "output", "sequence_length": 2048}
    return {**COMMON, **keys, "pretrain": "Qwen/Qwen3.5-35B-A3B", "sft_train": learner}


def agents_2b(prompts: int, group: int, kind: str) -> Values:
    """Return multi-turn RL whose answers are sampled one step ahead."""
    train = layout(tp=2, cp=2, sequence_parallel=True, use_distributed_optimizer=True, recompute_granularity="full")
    steps = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "learning_rate": 1e-6}
    answers = {"max_new_tokens": 4096, "top_k": 50, "temperature": 1.0, "num_return_sequences": 1}
    manager = "roll.pipeline.agentic.env_manager.agent_native_env_manager.AgentNativeStepEnvManager"
    environment = {"env_type": kind, "max_steps": 16, "max_tokens_per_step": 4096, "env_manager_cls": manager}
    environment |= {"agent_system_template": "unused", "agent_template": "unused"}
    tags = {"num_env_groups": 1, "group_size": group, "tags": ["train"], "num_groups_partition": [1]}
    return COMMON | {
        "pretrain": "Qwen/Qwen3.5-2B",
        "async_generation_ratio": 1,
        "rollout_batch_size": prompts,
        "sequence_length": 32768,
        "adv_estimator": "step_reinforce",
        "actor_train": role("megatron_train", train, 4, training_args=steps),
        "actor_infer": role("vllm", {"tensor_parallel_size": 1, "max_model_len": 32768}, 8, generating_args=answers),
        "reference": role("megatron_infer", layout(tp=2, cp=2), 4),
        "train_env_manager": tags,
        "env_manager_cls": manager,
        "custom_envs": {"train": environment | {"env_config": {"mode": "train"}}},
    }


TRUNCATED = "+train_infer_correction.is_weight.enabled=true"
UNCHANGED = {
    "qwen3-next-80BA3B-rlvr_megatron/rlvr_config": lambda: next_80b(0.7),
    "qwen3-next-80BA3B-rlvr_megatron/rlvr_config_amd": lambda: next_80b(0.6),
    "qwen3.5-122A10-rlvr_megatron/rlvr_megatron_80GB": moe_122b,
    "qwen3.5-35BA3-sft_fsdp2/sft_config": sft_35b,
    "qwen3.5-35BA3-sft_fsdp2/sft_config_ep": lambda: sft_35b(efsdp_size=1, ep_size=8),
    # these three also have a reward for bounding boxes in images, which is left out here
    "qwen3.5-27B-rlvr_megatron/rlvr_megatron_80GB": dense_27b,
    "qwen3.5-35BA3-rlvr_megatron/rlvr_megatron_80GB": moe_35b,
    "qwen3.5-35BA3-rlvr_megatron/rlvr_megatron_ppu": moe_35b_virtual,
}
REFUSED_BY_RUNS: dict[str, tuple[Callable[[], Values], str, str]] = {  # configuration, key of the message, the change
    "qwen3.5-397A17-rlvr_megatron/rlvr_megatron_80GB": (
        moe_397b,
        "actor_infer.strategy_args.strategy_config.tensor_parallel_size",
        "actor_infer.strategy_args.strategy_config.tensor_parallel_size=8",
    ),
    "agentic_demo/agent_val_rock_swe_qwen35_2b": (
        lambda: agents_2b(4, 4, "rock_tb_native_env"),
        "async_generation_ratio",
        TRUNCATED,
    ),
    "agentic_demo/openreward_endless_terminals_reinforce_qwen35_2b": (
        lambda: agents_2b(16, 1, "openreward_env"),
        "async_generation_ratio",
        TRUNCATED,
    ),
}


def planned(root: Path, values: Values, overrides: Sequence[str] = (), *, runnable: bool = False) -> RunPlan:
    values = {"hydra": {"run": {"dir": "."}, "output_subdir": None}, "exp_name": "hybrid", **values}
    (root / "run.yaml").write_text(with_stand_ins(yaml.safe_dump(values), root))
    return load_plan(str(root), "run", [f"output_dir={root}", *overrides], runnable=runnable)


@pytest.mark.parametrize("name", UNCHANGED)
def test_a_file_is_planned_with_its_layouts(tmp_path: Path, name: str) -> None:
    values = UNCHANGED[name]()
    run = planned(tmp_path, values)
    student = values.get("actor_train") or values["sft_train"]
    assert len(run.student.devices) == len(range(*map(int, student["device_mapping"][11:-2].split(","))))
    config = student["strategy_args"]["strategy_config"]
    sizes = (run.student.layout.pp, run.student.layout.ep, run.student.layout.tp)
    wanted = ("pipeline_model_parallel_size", "expert_model_parallel_size", "tensor_model_parallel_size")
    assert "fsdp_size" in config or sizes == tuple(config[key] for key in wanted)


@pytest.mark.parametrize("name", REFUSED_BY_RUNS)
def test_the_plan_lists_a_setting_that_a_run_refuses(tmp_path: Path, name: str) -> None:
    """The change that its message asks for removes the message."""
    configuration, key, change = REFUSED_BY_RUNS[name]
    before, after = (planned(tmp_path, configuration(), changes) for changes in ((), (change,)))
    with pytest.raises(ConfigError, match=re.escape(key)):
        planned(tmp_path, configuration(), runnable=True)
    assert sum(key in said for said in before.warnings) == 1 + sum(key in said for said in after.warnings)
    assert len(before.warnings) == 1 + len(after.warnings)
    assert before.student.layout == after.student.layout
