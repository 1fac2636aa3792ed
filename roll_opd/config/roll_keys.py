"""ROLL's keys: keys without effect here, keys that are refused, and ROLL's names for keys of this package.

Keys in `IGNORED_*` are accepted, and listed in one warning. docs/coming-from-roll.md has a table of all ROLL keys.
"""

import re
from typing import Any, Literal

from roll_opd.config.diagnostics import Diagnostics, as_yaml

DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")  # the dotted path of a user's class or function


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


IGNORED_TOP = _names("""
    rollout_dump_dir checkpoint_config reward_pretrain base_dir rpc_timeout local_rank profiler_timeline
    profiler_memory profiler_output_dir length_profiler_dir report_length_and_rewards
    is_offload_optimizer_states_in_train_step model_update_buffer_size_mb model_download_type rollout_mock
    generate_opt_level is_num_return_sequences_expand user_defined_rollout_loop_cls router_args deepspeed_zero
    deepspeed_zero2 deepspeed_zero3 deepspeed_zero3_cpuoffload reward l2 use_reward_scaling add_len_reward
    use_reward_norm enable_reference force_disable_old_logprobs_recompute dataset_filter vlm_filter otlp_output_dir
    save_logging_board_dir use_policy_loss_type use_topr_loss use_topr_neg_loss_coef postive_loss_coef val_greedy
    val_n_sample mask_type balance_length minibatch_data_iter_num infer_correction positive_loss_coef reward_norm
    reward_shift reward_scale opsd_mode opd_token_kld_clip opsd_solution_key opsd_max_solution_length ratio_type
    max_actions_per_traj opsd_teacher_template batch_adjust_mode render_save_dir env_manager_cls agent_runner_cls
    custom_env agent_system_template agent_template all_response_pattern action_pattern think_action_pattern
    max_tokens_per_step sokoban_format_penalty frozen_format_penalty single_prompt_agent_system_template
    single_prompt_agent_template transfer_backend divide_std add_length_bonus add_token_penalty model_name
    parse_tool_call_parameter_to_dict skip_mock_system_prompt user_prompt_no_think_format user_prompt_think_format
    added_text_no_think added_text_think reward_system_config env_monitor dirty_data_mask open_feedback_turn
    use_token_reward exp_mode partial_gpu_mode
""")

# keys about rollouts that ROLL's SFT and DPO inherit from BaseConfig
IGNORED_SUPERVISED = _names("""
    rollout_batch_size prompt_length response_length max_running_requests is_use_additional_prompts
    max_additional_running_prompts
""")

IGNORED_WORKER = _names("""
    name world_size model_update_frequency backend_timeout mtp_training_mode max_concurrency use_remove_padding
    sequence_length_round_in_train sequence_length_round_in_infer offload_nccl logits_in_fp32 apply_loss_scale
""")

IGNORED_MODEL_ARGS = _names("""
    attn_implementation flash_attn disable_gradient_checkpointing model_type autocast_adapter_dtype
    gradient_checkpointing_use_reentrant device_map num_labels model_config_kwargs moe_aux_loss_coef vision_dp
""")

IGNORED_TRAINING_ARGS = _names("""
    num_train_epochs logging_steps save_steps seed output_dir max_steps gradient_checkpointing dataloader_num_workers
    report_to remove_unused_columns save_total_limit data_seed save_hf_model tf32
""")

IGNORED_DATA_ARGS = _names("preprocessing_num_workers cache_path eval_file_name dataset_type response")

IGNORED_GENERATING_ARGS = _names("""
    num_beams do_sample max_length length_penalty default_system logprobs include_stop_str_in_output
    skip_special_tokens
""")

IGNORED_REWARD = _names("""
    name model_args data_args strategy_args generating_args device_mapping num_gpus_per_worker system_envs
    training_args pg_variant topr_positive_weight topr_negative_weight
""")

IGNORED_SEQUENCE_PACKING = _names("algorithm min_num_micro_batches_forward min_num_micro_batches_train")

# warnings about ignored keys whose value would change training in ROLL: key -> (harmless values, sentence of the
# warning)
_UNREAD = "has no effect, as ROLL does not read it either"
_NORM = f"{_UNREAD} any more; norm_mean_type and norm_std_type set how rewards are normalised"
_TOPR = f"{_UNREAD}; to select TOPR, write worker_cls '...ActorPGWorker' and pg_variant: topr in actor_train"
SAID: dict[str, tuple[tuple[object, ...], str]] = {
    "reward_norm": ((), _NORM),
    "reward_shift": ((False,), _NORM),
    "reward_scale": ((False,), _NORM),
    "use_reward_scaling": ((False,), _NORM),
    "use_reward_norm": ((False,), _NORM),
    "use_topr_loss": ((False,), _TOPR),
    "use_topr_neg_loss_coef": ((0,), _TOPR),
    "use_policy_loss_type": (("PPO",), f"{_UNREAD}; pg_variant names the loss"),
    "infer_correction": ((False,), f"{_UNREAD} any more; use train_infer_correction instead"),
    "opsd_mode": ((False,), f"{_UNREAD}; use a teacher's hint, such as teacher.hint: '{{solution}}'"),
    **dict.fromkeys(("balance_length", "val_greedy", "add_len_reward"), ((False,), _UNREAD)),
    **dict.fromkeys(("postive_loss_coef", "positive_loss_coef", "l2"), ((0,), _UNREAD)),
    **dict.fromkeys(("val_n_sample", "minibatch_data_iter_num"), ((1,), _UNREAD)),
    **dict.fromkeys(("opd_token_kld_clip", "dataset_filter"), ((None,), _UNREAD)),
    "mask_type": (("loss",), _UNREAD),
    "do_sample": ((True,), f"{_UNREAD}; temperature: 0 is greedy"),
    "num_beams": ((1,), "has no effect: responses are sampled, without beam search"),
    "force_disable_old_logprobs_recompute": (
        (False,),
        "has no effect: log-probs before the update are computed whenever weights change within a step",
    ),
    "apply_loss_scale": (
        (True,),
        "has no effect: the loss is always normalised over the whole batch, as ROLL does for true",
    ),
    "model_update_frequency": ((1,), "has no effect: engines get new weights in every step"),
    "moe_aux_loss_coef": ((0,), "has no effect: no auxiliary loss of the router is added"),
    "mtp_training_mode": (("disabled",), "has no effect: layers of multi-token prediction are not trained"),
}
# keys that are refused: key -> (harmless values, sentence of the error)
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "model_config_kwargs": (({},), "is not applied; change config.json of the model, and remove the key"),
    "rollout_mock": ((None, "dump"), "replaying rollouts from files is not available here; remove the key"),
    "user_defined_rollout_loop_cls": (
        ("roll.distributed.scheduler.user_defined_rollout_loop.UserDefinedRolloutLoop",),
        "custom rollout loops are not available here; remove the key",
    ),
    "optimizer": (("adam",), "only adam is available; remove the key"),
}

# options of Megatron's strategy_config that the engine sets itself or does not need here
IGNORED_MEGATRON = _names("""
    grad_reduce_in_fp32 use_distributed_optimizer_infer additional_configs optimizer variable_seq_lengths
    use_cpu_initialization accumulate_allreduce_grads_in_fp32 use_flash_attn delay_grad_reduce ddp_bucket_size
    ddp_num_buckets ddp_average_in_collective check_for_nan_in_loss_and_grad align_param_gather optimizer_cpu_offload
    optimizer_offload_fraction use_precision_aware_optimizer overlap_cpu_optimizer_d2h_h2d bounded_cpu_grad_staging
    offload_model_from_cpu_master save_only_model ckpt_format max_grad_norm distrib_optim_fully_reshardable
    distrib_optim_fully_reshardable_mem_efficient
""")
# options that ROLL adds to vLLM's in a strategy_config
IGNORED_VLLM = _names("logger_level data_parallel_rank online_quantization online_quantization_config")

REWARD_CLASSES_OF_ROLL = {
    "MathRuleRewardWorker": "math_rule",
    "GSM8KMathRewardWorker": "math_rule",
    "CodeSandboxRewardWorker": "code_sandbox",
    "LLMJudgeRewardWorker": "llm_judge",
    "PerAlignLLMJudgeRewardWorker": "llm_judge",
    "GeneralRuleRewardWorker": "ifeval",
    "GeneralValRuleRewardWorker": "general_rule",
    "CrossThinkQARuleRewardWorker": "crossthinkqa",
    "MultipleChoiceBoxedRuleRewardWorker": "multiple_choice",
    "RemoteRewardSystemWorker": "remote",
}

# keys of ROLL's RewardConfig, ignored if the worker here does not take them
REWARD_KEYS_OF_ROLL = _names("""
    code_url use_local judge_prompt judge_model_type judge_model_name judge_api_url judge_api_key format_pattern
    reward_type response_length_penalty_coef reward_manager_config
""")

# kind of role -> {ROLL's strategy without a counterpart here: the nearest strategy}
NEAREST_STRATEGY = {
    "train": {"deepspeed_train": "megatron_train", "fsdp2_train": "megatron_train"},
    "frozen": {"hf_infer": "megatron_infer", "deepspeed_infer": "megatron_infer", "fsdp2_infer": "megatron_infer"},
    "rollout": {"sglang": "vllm", "hf_infer": "vllm"},
}
STRATEGY = {"train": "megatron_train", "frozen": "megatron_infer", "rollout": "vllm"}


Schedule = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]  # Megatron-core's
SCHEDULES: dict[str, Schedule] = {
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "inverse_sqrt": "inverse-square-root",
    "warmup_stable_decay": "WSD",
}
KL_PENALTIES_LATER = ("full",)
PG_KEYS = frozenset({"worker_cls", "pg_variant", "topr_positive_weight", "topr_negative_weight"})
# keys that pure distillation fixes: key -> accepted values
PURE_FIXED: dict[str, tuple[object, ...]] = {
    "adv_estimator": ("reinforce", "on_policy_distill"),
    "gamma": (0,),
    "use_kl_loss": (False,),
    "add_token_level_kl": (False,),
    "init_kl_coef": (0,),
    "critic_warmup": (0,),
}


def report_ignored(key: str, value: Any, diag: Diagnostics) -> None:
    """Report that a key of ROLL has no effect here.

    Nothing is reported if the value is null, or if the value has no effect in ROLL either.
    """
    if value in (None, "None"):
        return
    for report, sentences in ((diag.warn, SAID), (diag.unsupported, REFUSED)):
        if key in sentences:
            harmless, text = sentences[key]
            if value not in harmless and _setting(value) not in harmless:
                report(key, text if isinstance(value, dict | list) else f"{as_yaml(value)} {text}")
            return
    diag.unused(key)


def _setting(value: Any) -> Any:
    """Return the `mode` of a section, or None if the section has `enable: false`.

    A value that is not a section is returned unchanged.
    """
    if isinstance(value, dict):
        return value.get("mode") if value.get("enable", True) else None
    return value
