"""Table of Trinity-RFT's keys, with a rule for each key.

A key is translated to another key, combined with other keys, ignored or refused.

`translate.py` applies the table, and docs/coming-from-trinity.md describes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AUXILIARY = "explorer.auxiliary_models"
TASKSET, EVAL_TASKSETS = "buffer.explorer_input.taskset", "buffer.explorer_input.eval_tasksets"
SFT_ROWS = ("buffer.trainer_input.sft_warmup_dataset", "buffer.trainer_input.auxiliary_buffers.sft_dataset")


@dataclass(frozen=True)
class Rule:
    """The rule for a key: translate it to another key, combine it with other keys, or ignore it.

    Attributes:
        ours: the key of this package. {train} and {infer} in it stand for the student's roles.
        part: whether the key is combined with other keys.
        why: reason to ignore the key, or remedy for a refused value.
        harmless: values that are ignored. If this is set, all other values are refused.
    """

    ours: str = ""
    part: bool = False
    why: str = ""
    harmless: tuple[Any, ...] | None = None


PART = Rule(part=True)
NOTHING = Rule()


def to(ours: str) -> Rule:
    """Return the rule for a key whose value is copied to the key `ours` of this package."""
    return Rule(ours=ours)


def nothing(why: str) -> Rule:
    """Return the rule for a key that is ignored."""
    return Rule(why=why)


def only(*harmless: Any, instead: str) -> Rule:
    """Return the rule for a key whose `harmless` values are ignored.

    All other values are refused, with the remedy `instead`.
    """
    return Rule(harmless=harmless, why=instead)


def _all(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


def _below(prefix: str, keys: Mapping[str, Rule]) -> dict[str, Rule]:
    return {f"{prefix}.{key}": rule for key, rule in keys.items()}


_WEIGHTS = nothing("new weights are sent to the running engines after each step")
_OWN_LOADER = nothing("the package has its own data loader")
_NO_BUFFER = nothing("a step's experiences go to training without a buffer")
_NO_RETRY = nothing("a failed run is dropped (on_workflow_error), a dead process is replaced")
_TEMPLATE = only(None, "", instead="move it to chat_template in the model's tokenizer_config.json, remove the key")
_IMAGES = only(None, "", {}, instead="rows with images cannot be trained on; remove the key")

_EXTERNAL = only(None, {}, {"enable": False}, instead="the run starts its own engines; remove the section")
_ROPE = only(None, {}, instead="move it to the model's config.json, remove the key")
_CODE = nothing("code of a model directory is never run")
_LORA = only(False, None, [], {}, instead="the student's adapter is set by model.lora_configs; remove the key")
_LONG_PROMPT = nothing("on_long_prompt handles prompts that are too long")
_LOGPROBS = nothing("log-probs of sampled tokens are always recorded")
_THINKING = to("chat_template_kwargs.enable_thinking")

_SELECTOR: dict[str, Rule] = {}
for _name in ("task_selector", "data_selector"):  # names up to version 0.5, and since 0.6
    _SELECTOR[f"{_name}.selector_type"] = only(
        "sequential", "shuffle", "random", instead="rows are shuffled in each epoch; remove the key"
    )
    _SELECTOR |= _below(_name, _all(NOTHING, "seed feature_keys kwargs"))

TASKSET_KEYS: dict[str, Rule] = {
    **_all(PART, "path split subset_name workflow_args default_workflow_type default_reward_fn_type reward_fn_args"),
    **_below("rollout_args", _all(PART, "temperature top_p top_k max_tokens n")),
    **_below("format", _all(PART, "prompt_key response_key system_prompt reply_prefix")),
    "rollout_args.logprobs": _LOGPROBS,
    "repeat_times": PART,
    **_all(NOTHING, "name enable_progress_bar index is_eval total_epochs total_steps batch_size"),
    "storage_type": only("file", instead="only files can be read; export the data to a JSONL or Parquet file"),
    "format.workflow_key": only("", None, instead="all rows have one workflow; let the workflow read the row"),
    "format.reward_fn_key": only("", None, instead="a row's tag selects its reward; see docs/rewards/README.md"),
    "format.system_prompt_key": only("", None, instead="let the workflow read it from task.raw_task; remove the key"),
    **_below("format", _all(_IMAGES, "image_key video_key")),
    **_below("format", _all(NOTHING, "prompt_type messages_key tools_key chosen_key rejected_key")),
    **_below("format", _all(NOTHING, "enable_concatenated_multi_turn")),
    "format.chat_template": _TEMPLATE,
    "mm_data_kwargs": _IMAGES,
    **_SELECTOR,
    "format.enable_thinking": NOTHING,
    **_all(_OWN_LOADER, "max_retry_times max_retry_interval ray_namespace wrap_in_ray"),
}

ENGINE_KEYS: dict[str, Rule] = {
    **_all(PART, "engine_num tensor_parallel_size dtype"),
    **_all(PART, "max_model_len max_prompt_tokens max_response_tokens"),
    **_all(PART, "temperature top_p top_k repetition_penalty"),
    "engine_type": only("vllm", "vllm_async", instead="engines are vLLM's; write vllm"),
    **_all(NOTHING, "use_v1 bundle_indices name"),
    "enable_history": nothing("the responses of a workflow are always recorded"),
    "enable_thinking": nothing("chat_template_kwargs applies to all models"),
    "enable_openai_api": nothing("every workflow has an OpenAI-compatible endpoint"),
    "enable_auto_tool_choice": nothing("tools of a request may always be called"),
    "reasoning_parser": nothing("thoughts are part of the response"),
    "tool_call_parser": nothing("a teacher generates no responses"),
    "min_response_tokens": only(None, 0, 1, instead="responses have no minimum length; remove the key"),
    "ignore_eos": only(False, None, instead="a response ends at the model's stop token; remove the key"),
    "chat_template": _TEMPLATE,
    **_all(_LORA, "enable_lora enable_runtime_lora_updating lora_modules lora_kwargs"),
    "logprobs": _LOGPROBS,
    "trust_remote_code": _CODE,
    "enable_prompt_truncation": _LONG_PROMPT,
    **_all(only(1, 0, None, instead="use more engines (engine_num)"), "data_parallel_size"),
    **_all(only(1, 0, None, instead="engines support only tensor_parallel_size"), "pipeline_parallel_size"),
    "enable_expert_parallel": only(False, None, instead="engines support only tensor_parallel_size; remove the key"),
    "extra_engine_args": only(None, {}, instead="override strategy_args.strategy_config of the role; remove the key"),
    "enable_multimodal": only(False, None, instead="images cannot be trained on; remove the key"),
    "enable_return_routed_experts": only(
        False, None, instead="routes of workflows are not recorded yet; remove the key"
    ),
    "external_model_config": _EXTERNAL,
    **_all(_ROPE, "rope_scaling rope_theta"),
    "base_port": nothing("endpoint_port sets the port of the policy's endpoint"),
    "api_key": nothing("endpoint_api_key sets the key of the policy's endpoint"),
    **_all(NOTHING, "gpu_per_engine enable_log_requests nnodes node_rank weight_sync_buffer_size engine_id"),
    **_all(NOTHING, "ray_namespace ray_actor_name sync_method checkpoint_job_dir cuda_visible_devices"),
}
# applies only to the student's engines, since teachers run in Megatron
ROLLOUT_KEYS: dict[str, Rule] = {
    **ENGINE_KEYS,
    "seed": to("seed"),
    "enable_thinking": _THINKING,
    "tool_call_parser": to("tool_call_parser"),
    "model_path": nothing("it is the student's model"),
    **_all(PART, "gpu_memory_utilization enable_chunked_prefill"),
    **{key: to(f"{{infer}}.strategy_args.strategy_config.{key}") for key in ("enforce_eager", "enable_prefix_caching")},
}
_SCORED = nothing("a teacher is a Megatron model that scores given tokens")
TEACHER_KEYS: dict[str, Rule] = {
    **ENGINE_KEYS,
    "model_path": PART,
    **_all(_SCORED, "seed gpu_memory_utilization enforce_eager enable_prefix_caching enable_chunked_prefill"),
    **_all(_SCORED, "max_model_len max_prompt_tokens max_response_tokens logprobs"),
    **_all(_SCORED, "temperature top_p top_k repetition_penalty"),
}

# auxiliary models of workflows
AUXILIARY_KEYS: dict[str, Rule] = {
    **ENGINE_KEYS,
    "model_path": PART,
    "name": PART,
    "tool_call_parser": nothing("the student's parser applies to all models"),
    **_all(NOTHING, "seed gpu_memory_utilization enforce_eager enable_prefix_caching enable_chunked_prefill"),
}

# keys of veRL that are read; its other keys are ignored
_VERL = {
    "actor_rollout_ref.actor": "optim.lr ppo_epochs grad_clip use_dynamic_bsz ppo_max_token_len_per_gpu"
    " ulysses_sequence_parallel_size",
    "critic": "optim.lr cliprange_value",
    "trainer": "max_actor_ckpt_to_keep critic_warmup",
}

KEYS: dict[str, Rule] = {
    "mode": only(
        "both",
        instead="exploring and training are always one loop here (mode: both); use start_sft_pipeline.py or"
        " start_dpo_pipeline.py for rows with answers, and validation to evaluate a model",
    ),
    **_all(PART, "project checkpoint_root_dir"),
    "name": to("exp_name"),
    "continue_from_checkpoint": to("resume_from_checkpoint"),
    **_all(NOTHING, "group ray_namespace checkpoint_job_dir log ignore_validator_suggestions"),
    "algorithm.algorithm_type": PART,
    "algorithm.repeat_times": to("num_return_sequences_in_group"),
    "algorithm.advantage_fn": to("advantage_fn"),
    "algorithm.policy_loss_fn": to("policy_loss_fn"),
    **_below(
        "algorithm",
        _all(PART, "policy_loss_fn_args advantage_fn_args kl_loss_fn kl_loss_fn_args kl_penalty_fn kl_penalty_fn_args"),
    ),
    "algorithm.entropy_loss_fn": only(
        "default", "basic", "none", None, instead="entropy is set only by entropy_loss_coef; remove the key"
    ),
    "algorithm.entropy_loss_fn_args": PART,
    "algorithm.sample_strategy": only(
        *("default", "mix", "staleness_control", None),
        instead="every experience is trained on once, in its step; remove the key",
    ),
    "algorithm.sample_strategy_args": PART,
    "algorithm.add_strategy": only(
        None,
        "",
        "reward_variance",
        instead="algorithm_type: multi_step_grpo compares runs of several steps; remove the key",
    ),
    "algorithm.use_token_level_loss": NOTHING,
    "algorithm.loss_agg_mode": to("loss_agg_mode"),
    "algorithm.bypass_old_logprobs": nothing("ratios are computed from log-probs of the training engine"),
    "algorithm.rollout_correction": only(
        None,
        {},
        {"bypass_mode": True},
        instead="use train_infer_correction for the mismatch of log-probs; remove the key",
    ),
    "algorithm.enable_router_replay": only(
        False, None, instead="routes of workflows are not recorded yet; remove the key"
    ),
    "algorithm.optimizer.clip_grad": PART,
    "algorithm.optimizer.lr": PART,
    "algorithm.optimizer.lr_warmup_steps": PART,
    "algorithm.optimizer.lr_warmup_steps_ratio": to("{train}.training_args.warmup_ratio"),
    "algorithm.optimizer.weight_decay": to("{train}.training_args.weight_decay"),
    **_below("algorithm.optimizer", _all(PART, "min_lr_ratio warmup_style lr_scheduler_type betas")),
    "algorithm.optimizer.optimizer_type": only("adam", "adamw", instead="AdamW is the only optimizer; remove the key"),
    "model.model_path": PART,
    "model.critic_model_path": PART,
    **_below("model", _all(PART, "max_model_len max_prompt_tokens max_response_tokens temperature top_p top_k")),
    "model.logprobs": _LOGPROBS,
    "model.repetition_penalty": PART,
    "model.trust_remote_code": _CODE,
    "model.enable_thinking": _THINKING,
    "model.external_model": _EXTERNAL,
    **_below("model", _all(_ROPE, "rope_scaling rope_theta")),
    "model.min_response_tokens": ENGINE_KEYS["min_response_tokens"],
    "model.enable_prompt_truncation": _LONG_PROMPT,
    **_below("model", _all(_TEMPLATE, "custom_chat_template chat_template_path")),
    "model.lora_configs": PART,
    **_below("model", _all(NOTHING, "fully_sharded_loras max_cpu_loras")),
    "model.tinker": only(
        None, {}, {"enable": False}, instead="training runs locally with Megatron-core; remove the section"
    ),
    **_below("cluster", _all(PART, "node_num gpu_per_node")),
    "cluster.ray_address": nothing("a run starts Ray itself, or joins hosts with torchrun"),
    **_below("cluster", _all(NOTHING, "total_gpu_num rollout_gpu_num auxiliary_model_gpu_num explorer_gpu_num")),
    **_below("cluster", _all(NOTHING, "trainer_gpu_num trainer_node_num trainer_gpu_num_per_node")),
    "buffer.batch_size": PART,
    "buffer.train_batch_size": PART,
    "buffer.total_steps": PART,
    "buffer.total_epochs": PART,
    **_below("buffer", _all(_OWN_LOADER, "max_retry_times max_retry_interval")),
    **_below("buffer", _all(NOTHING, "explorer_output tokenizer_path pad_token_id cache_dir")),
    **_below(TASKSET, TASKSET_KEYS),
    "buffer.explorer_input.tasksets": PART,
    EVAL_TASKSETS: PART,
    **_below(
        "buffer.explorer_input",
        _all(
            PART, "default_workflow_type default_eval_workflow_type default_reward_fn_type system_prompt reply_prefix"
        ),
    ),
    "buffer.trainer_input.experience_buffer": _NO_BUFFER,
    **dict.fromkeys(SFT_ROWS, PART),
    "buffer.trainer_input.sft_warmup_steps": only(
        0, None, instead="warm up with start_sft_pipeline.py and start from its checkpoint; remove the key"
    ),
    "explorer.runner_per_model": PART,
    "explorer.max_timeout": to("workflow_timeout"),
    "explorer.env_vars": to("system_envs"),
    **_below("explorer", _all(_NO_RETRY, "max_retry_times")),
    **_below(
        "explorer",
        _all(NOTHING, "name api_port listen_address service_status_check_interval bench_on_latest_checkpoint"),
    ),
    **_below("explorer", _all(NOTHING, "min_running_model_num proxy_port db_url runner_state_report_interval")),
    **_below("explorer", _all(NOTHING, "runner_prepare_concurrency runner_prepare_max_retries")),
    "explorer.max_inflight_batches": PART,
    "explorer.runner_num": nothing("runner_per_model sets it"),
    "explorer.max_repeat_times_per_runner": nothing("runs of a prompt are distributed over all processes"),
    "explorer.concurrent_mode": nothing("runs are concurrent threads and coroutines"),
    "explorer.over_rollout": only(
        None, {}, {"ratio": 0.0}, instead="is_use_additional_prompts samples more prompts than needed; remove the key"
    ),
    "explorer.dynamic_timeout": only(
        None, {}, {"enable": False}, instead="max_timeout (workflow_timeout) is the only limit; remove the key"
    ),
    "explorer.eval_interval": PART,
    "explorer.eval_on_startup": nothing("a run with validation always starts with a validation"),
    **_below("explorer.rollout_model", ROLLOUT_KEYS),
    AUXILIARY: PART,
    **_below("synchronizer", _all(PART, "sync_style sync_interval sync_offset")),
    **_below("synchronizer", _all(PART, "explorer_sync_interval trainer_sync_interval")),
    **_below("synchronizer", _all(_WEIGHTS, "sync_method sync_timeout wait_for_checkpoint")),
    **_below("synchronizer", _all(NOTHING, "explorer_world_size ray_namespace group_name")),
    "trainer.trainer_type": only("verl", instead="training runs in Megatron-core; write verl, or remove the key"),
    "trainer.trainer_strategy": PART,
    **_below(
        "trainer.megatron",
        _all(PART, "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size")
        | _all(PART, "context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel"),
    ),
    "trainer.critic_warmup": PART,
    "trainer.use_remove_padding": nothing("sequences are packed without padding"),
    **_below(
        "trainer",
        _all(nothing("weights and optimizer stay on their device"), "param_offload optimizer_offload grad_offload")
        | _all(nothing("weights and optimizer stay on their device"), "offload_policy"),
    ),
    "trainer.trust_remote_code": _CODE,
    "trainer.balance_batch": NOTHING,
    "trainer.save_interval": PART,
    "trainer.max_checkpoints_to_keep": to("max_ckpt_to_keep"),
    "trainer.total_steps": PART,
    **_below("trainer", _all(PART, "grad_clip use_dynamic_bsz max_token_len_per_gpu ppo_max_token_len_per_gpu")),
    **_below("trainer", _all(PART, "ulysses_sequence_parallel_size actor_grad_clip")),
    **_below("trainer", _all(NOTHING, "name enable_preview save_strategy save_hf_checkpoint")),
    "trainer.fix_actor_microbatch_loss_scale": nothing("the loss is always normalised over the whole batch"),
    "trainer.trainer_config_path": only(
        None, "", instead="the file is not read; set algorithm.optimizer and trainer.grad_clip here, remove the key"
    ),
    **{f"trainer.trainer_config.{section}.{key}": PART for section, keys in _VERL.items() for key in keys.split()},
    "monitor.monitor_type": to("track_with"),
    "monitor.monitor_args": to("tracker_kwargs"),
    **_below("monitor", _all(NOTHING, "enable_ray_timeline detailed_stats cache_dir")),
    "data_processor.task_pipeline": only(
        None, {}, instead="process the rows before the run, into a file; remove the key"
    ),
    "data_processor.experience_pipeline": PART,
    "service": only(None, {}, {"data_juicer": None}, instead="other services are not supported; remove the section"),
    "stages": only(
        None,
        [],
        instead="write one configuration per stage, each starting from the previous stage's checkpoint",
    ),
}
# arguments of Trinity-RFT's losses with demonstrations that concern only veRL's batching
BATCH_ARGUMENTS = frozenset(
    (
        *("use_dynamic_bsz", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ngpus_trainer"),
        *("train_batch_size_expert", "train_batch_size_usual"),
    )
)
UNREAD = ("trainer.trainer_config",)  # sections in which unlisted keys are ignored

# workflow -> its default reward
DEFAULT_REWARDS = {
    **dict.fromkeys(("math_workflow", "async_math_workflow"), "math_reward"),
    **dict.fromkeys(("math_boxed_workflow", "async_math_boxed_workflow"), "math_boxed_reward"),
    **dict.fromkeys(("on_policy_distill_math_workflow", "math_eval_workflow"), "accuracy_reward"),
}
# Trinity-RFT's reward -> equivalent sections of `rewards`; its format reward is 0.1 or -0.1, which differs only by a
# constant
_FORMAT = {"weight": 0.2, "pattern": r".*?<think>.*?</think>\s*<answer>.*?</answer>\s*"}
REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"math_rule": {"worker_cls": "math_rule"}},
    "math_boxed_reward": {"math_rule": {"worker_cls": "math_rule"}},
    "math_reward": {"math_rule": {"worker_cls": "math_rule", "terms": {"format": _FORMAT}}},
    "format_reward": {"format": {"worker_cls": "format", **_FORMAT}},
    "math_dapo_reward": {"math_rule": {"worker_cls": "math_rule"}},
}
KL_PENALTIES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "low_var_kl": "low_var_kl", "abs": "abs"}
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
