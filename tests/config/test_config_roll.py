"""ROLL's YAML files: every key of its distillation files is accepted, in both generations of the format."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from config_assets import write_model

from roll_opd.config.plan import RunPlan
from roll_opd.config.roll_keys import REWARD_CLASSES_OF_ROLL
from roll_opd.config.schema import (
    DataArgs,
    GeneratingArgs,
    ModelArgs,
    Reward,
    Top,
    TrainingArgs,
    Validation,
    Worker,
)
from roll_opd.models.engine_options import MEGATRON_DECIDED, engine_options
from roll_opd.planner.load_plan import load_plan
from roll_opd.rewards.reward_registry import REWARDS

ROLL = """
hydra:
  run:
    dir: .
  output_subdir: null
exp_name: "qwen3-onpolicy-distill"
output_dir: {root}/output
logging_dir: ./output/logs
rollout_dump_dir: ./output/rollout_dump
seed: 42
system_envs:
  USE_MODELSCOPE: '1'
checkpoint_config:
  type: file_system
  output_dir: /data/models/${{exp_name}}
track_with: tensorboard
num_nodes: 1
num_gpus_per_node: 8
max_steps: 500
save_steps: 100
logging_steps: 1
eval_steps: 10
resume_from_checkpoint: false
rollout_batch_size: 64
prompt_length: 32
response_length: 64
num_return_sequences_in_group: 1
is_num_return_sequences_expand: true
ppo_epochs: 1
adv_estimator: "reinforce"
use_kl_loss: false
kl_loss_coef: 0.001
dual_clip_loss: true
reward_clip: 10
norm_mean_type: ~
whiten_advantages: false
pretrain: {root}/student
reward_pretrain: {root}/student
global_template: qwen3
validation:
  data_args:
    template: qwen3
    file_name:
      - {root}/train.jsonl
  generating_args:
    max_new_tokens: ${{response_length}}
    top_p: 0.6
    top_k: 50
    num_beams: 1
    temperature: 0.6
    num_return_sequences: 1
opd_kl_coef: 0.5
student_train:
  model_args:
    attn_implementation: fa2
    disable_gradient_checkpointing: false
    dtype: bf16
    model_type: ~
  training_args:
    learning_rate: 1.0e-6
    weight_decay: 0
    per_device_train_batch_size: 1
    gradient_accumulation_steps: 16
    warmup_steps: 20
    num_train_epochs: 50
  data_args:
    template: qwen3
    file_name:
      - {root}/train.jsonl
    domain_interleave_probs:
      math_rule: 1
    dataset_dir: data
    messages: messages
    interleave_probs: "1.0"
    preprocessing_num_workers: 16
  strategy_args:
    strategy_name: megatron_train
    strategy_config:
      tensor_model_parallel_size: 1
      pipeline_model_parallel_size: 1
      expert_model_parallel_size: 1
      context_parallel_size: 1
      use_distributed_optimizer: true
      recompute_granularity: full
      overlap_grad_reduce: true
  device_mapping: list(range(0,4))
  infer_batch_size: 4
  use_sequence_packing: true
  sequence_packing_args:
    algorithm: none
    max_packed_sequence_length_forward: 1024
    max_packed_sequence_length_train: 1024
    min_num_micro_batches_forward: 1
    min_num_micro_batches_train: 1
student_infer:
  model_args:
    disable_gradient_checkpointing: true
    dtype: bf16
  generating_args:
    max_new_tokens: ${{response_length}}
    top_p: 1.0
    top_k: -1
    num_beams: 1
    temperature: 0.99
    num_return_sequences: ${{num_return_sequences_in_group}}
  data_args:
    template: qwen3
  strategy_args:
    strategy_name: vllm
    strategy_config:
      gpu_memory_utilization: 0.8
      block_size: 16
      max_model_len: 128
  device_mapping: list(range(0,4))
  infer_batch_size: 1
{teacher}
rewards:
  math_rule:
    worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker
    model_args:
      model_name_or_path: ${{reward_pretrain}}
    data_args:
      template: qwen3
    tag_included: [math, 'MATH-500', gsm8k, math_rule]
    query_filter_config:
      type: no_filter
    world_size: 8
    infer_batch_size: 1
"""
SINGLE = """
teacher:
  model_args:
    model_name_or_path: {root}/teacher
    disable_gradient_checkpointing: true
    dtype: bf16
    model_type: ~
  data_args:
    template: qwen3
  strategy_args:
    strategy_name: megatron_infer
    strategy_config:
      tensor_model_parallel_size: 2
      pipeline_model_parallel_size: 2
      bf16: true
  device_mapping: list(range(4,8))
  infer_batch_size: 1
"""
SEVERAL = """
teacher:
  math_teacher:
    model_args: {{model_name_or_path: {root}/teacher, dtype: bf16}}
    strategy_args: {{strategy_name: megatron_infer, strategy_config: ~}}
    device_mapping: list(range(4,6))
    opd_kl_coef: 0.25
    tag_included: [math]
  code_teacher:
    model_args: {{model_name_or_path: {root}/other, dtype: bf16}}
    strategy_args: {{strategy_name: hf_infer, strategy_config: ~}}
    device_mapping: list(range(6,8))
    tag_included: [code]
"""


def _plan(root: Path, teacher: str) -> RunPlan:
    (root / "roll.yaml").write_text(ROLL.format(root=root, teacher=teacher.format(root=root)))
    return load_plan(str(root), "roll", pure=True)


def test_single_teacher_form(root: Path, values: dict[str, Any]) -> None:
    run = _plan(root, SINGLE)
    assert [teacher.opd_kl_coef for teacher in run.teachers] == [0.5]
    assert (run.teachers[0].source.layout.tp, run.teachers[0].source.layout.pp) == (2, 2)
    assert run.student.train_limits.tokens == 1024
    every_layer = {"recompute_method": "uniform", "recompute_num_layers": 1}
    assert run.student.megatron_args == {"recompute_granularity": "full"} | every_layer
    assert run.student.optimizer.warmup_steps == 20
    assert run.rollout.max_model_len == 128
    assert [(stream.name, stream.weight) for stream in run.data.streams] == [("math_rule", 1.0)]
    assert run.data.template == run.validation.data.template == "qwen3"
    ignored = next(text for text in run.warnings if text.startswith("these keys"))
    for key in (
        "rollout_dump_dir",
        "checkpoint_config",
        "data_args.preprocessing_num_workers",
        "of rewards: data_args, model_args",
    ):
        assert key in ignored
    assert run.student.optimizer.overlap_grad_reduce and not run.student.optimizer.overlap_param_gather
    assert len(run.warnings) == 1


def test_named_teachers_form(root: Path, values: dict[str, Any]) -> None:
    write_model(root / "other", seed=5)
    run = _plan(root, SEVERAL)
    assert [(teacher.name, teacher.opd_kl_coef, teacher.tags) for teacher in run.teachers] == [
        ("math_teacher", 0.25, ("math",)),
        ("code_teacher", 0.5, ("code",)),
    ]
    assert any("'hf_infer' does not exist here; 'megatron_infer'" in text for text in run.warnings)
    assert any("teacher.code_teacher.tag_included: none of code" in text for text in run.warnings)


def test_one_wrong_key_in_a_named_teacher(problems: Callable[..., list[str]], values: dict[str, Any]) -> None:
    values["teacher"] = {"math": {**values["teacher"], "tag_includet": ["math"]}}
    found = problems()
    assert len(found) == 1
    assert found[0].startswith("teacher.math.tag_includet: unknown key; did you mean 'tag_included'?")


def test_a_key_is_either_read_or_ignored() -> None:
    for section in (Top, Worker, ModelArgs, TrainingArgs, DataArgs, GeneratingArgs, Reward, Validation):
        names = {item.name for item in fields(section)}
        assert not section.ignored & names, section


def test_engine_options_are_those_of_the_installed_dataclasses() -> None:
    """Read from the sources; here from the imported classes themselves."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    for engine, taker in (("Megatron", TransformerConfig), ("vLLM", AsyncEngineArgs)):
        assert engine_options(engine).keys() == {item.name for item in fields(taker)}
    assert {item.name for item in fields(MLATransformerConfig)} >= MEGATRON_DECIDED


def test_roll_classes_are_built_in_rewards() -> None:
    assert set(REWARD_CLASSES_OF_ROLL.values()) <= set(REWARDS.builtin)
