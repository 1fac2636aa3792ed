"""Names that ROLL, Megatron-core and vLLM users write, as data.

`IGNORED_*`: ROLL's keys that have no meaning here yet; they are accepted and listed in one warning.
`MEGATRON_FIELDS`: fields of Megatron-core's TransformerConfig that pass through untouched.
"""

import re

from roll_opd.config.algorithms import ADVANTAGES, LOSSES

DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")  # the path of a user's own class or function


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


IGNORED_TOP = _names("""
    logging_dir rollout_dump_dir checkpoint_config reward_pretrain base_dir rpc_timeout
    val_batch_size local_rank val_prompt_length val_sequence_length profiler_timeline profiler_memory
    profiler_output_dir length_profiler_dir report_length_and_rewards is_offload_states
    is_offload_optimizer_states_in_train_step model_update_buffer_size_mb model_download_type rollout_mock
    generate_opt_level is_num_return_sequences_expand user_defined_rollout_loop_cls router_args
    deepspeed_zero deepspeed_zero2 deepspeed_zero3 deepspeed_zero3_cpuoffload reward reward_model l2
    use_reward_scaling add_len_reward use_reward_norm enable_reference
    force_disable_old_logprobs_recompute dataset_filter vlm_filter
    save_logging_board_dir difficulty_loss_weight length_loss_weight use_policy_loss_type rl_loss_coef
    val_greedy val_n_sample max_len_mask mask_type difficulty_mask balance_length minibatch_data_iter_num
    difficulty_low_threshold difficulty_high_threshold error_max_len_clip error_max_len_threshold
    opsd_solution_key opsd_max_solution_length ratio_type step_reward_gamma max_actions_per_traj
    step_reward_weight episode_reward_weight opsd_teacher_template batch_adjust_mode
    render_save_dir env_manager_cls agent_runner_cls custom_env agent_system_template agent_template
    all_response_pattern action_pattern think_action_pattern max_tokens_per_step sokoban_format_penalty
    frozen_format_penalty single_prompt_agent_system_template single_prompt_agent_template transfer_backend
    divide_std add_length_bonus add_token_penalty model_name parse_tool_call_parameter_to_dict
    skip_mock_system_prompt user_prompt_no_think_format user_prompt_think_format added_text_no_think added_text_think
""")

IGNORED_WORKER = _names("""
    name worker_cls pg_variant world_size num_gpus_per_worker model_update_frequency backend_timeout
    topr_positive_weight topr_negative_weight max_concurrency use_remove_padding sequence_length_round_in_train
    sequence_length_round_in_infer offload_nccl logits_in_fp32 apply_loss_scale
""")

IGNORED_MODEL_ARGS = _names("""
    attn_implementation flash_attn disable_gradient_checkpointing model_type lora_alpha lora_dropout lora_rank
    additional_target autocast_adapter_dtype gradient_checkpointing_use_reentrant device_map num_labels
    model_config_kwargs moe_aux_loss_coef ulysses_size vision_dp
""")

IGNORED_TRAINING_ARGS = _names("""
    num_train_epochs logging_steps save_steps bf16 fp16 seed output_dir max_steps gradient_checkpointing
    dataloader_num_workers report_to remove_unused_columns save_total_limit
""")

IGNORED_DATA_ARGS = _names("preprocessing_num_workers cache_path eval_file_name dataset_type response")

IGNORED_GENERATING_ARGS = _names("""
    num_beams do_sample max_length length_penalty default_system logprobs include_stop_str_in_output
    skip_special_tokens
""")

IGNORED_REWARD = _names("""
    name model_args data_args strategy_args generating_args device_mapping num_gpus_per_worker system_envs
    training_args
""")

IGNORED_ENV_MANAGER = _names("""
    name worker_cls llm_proxy group_size_redundancy format_penalty group_filter_cls model_args generating_args
    data_args strategy_args device_mapping world_size system_envs max_concurrency num_gpus_per_worker
    infer_batch_size
""")

IGNORED_VALIDATION = _names("eval_steps device_mapping model_args strategy_args infer_batch_size")

IGNORED_SEQUENCE_PACKING = _names("algorithm min_num_micro_batches_forward min_num_micro_batches_train")

# strategy_config of Megatron that the engine decides itself, or that speed up what is not run here
IGNORED_MEGATRON = _names("""
    overlap_grad_reduce overlap_param_gather grad_reduce_in_fp32 use_distributed_optimizer_infer
    additional_configs optimizer variable_seq_lengths use_cpu_initialization
    accumulate_allreduce_grads_in_fp32 use_flash_attn delay_grad_reduce ddp_bucket_size ddp_num_buckets
    ddp_average_in_collective check_for_nan_in_loss_and_grad align_param_gather optimizer_cpu_offload
    optimizer_offload_fraction use_precision_aware_optimizer overlap_cpu_optimizer_d2h_h2d bounded_cpu_grad_staging
    offload_model_from_cpu_master save_only_model ckpt_format
""")
# ROLL's own words inside a vLLM strategy_config
IGNORED_VLLM = _names("""
    sleep_level logger_level data_parallel_rank online_quantization online_quantization_config
""")

# Fields that a model's config.json or another key decides; writing them is a mistake worth a sentence
MEGATRON_DECIDED = _names("""
    num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels layernorm_epsilon
    normalization num_moe_experts moe_router_topk moe_ffn_hidden_size rotary_base params_dtype pipeline_dtype
    gated_linear_unit activation_func add_qkv_bias add_bias_linear qk_layernorm deterministic_mode
    calculate_per_token_loss hidden_dropout attention_dropout gradient_accumulation_fusion
""")

MEGATRON_FIELDS = _names("""
    expert_tensor_parallel_size  async_tensor_model_parallel_allreduce
    tp_comm_overlap cross_entropy_loss_fusion cross_entropy_fusion_impl overlap_moe_expert_parallel_comm
    delay_wgrad_compute overlap_p2p_comm batch_p2p_comm batch_p2p_sync deallocate_pipeline_outputs
    defer_embedding_wgrad_compute wgrad_deferral_limit microbatch_group_size_per_vp_stage cpu_offloading
    cpu_offloading_num_layers num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    pipeline_model_parallel_layout account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split attention_backend
    fp32_residual_connection apply_query_key_layer_scaling attention_softmax_in_fp32
    disable_bf16_reduced_precision_matmul bias_activation_fusion masked_softmax_fusion persist_layer_norm
    memory_efficient_layer_norm bias_dropout_fusion apply_rope_fusion fused_single_qkv_rope
    recompute_granularity recompute_method recompute_num_layers distribute_saved_activations recompute_modules
    fp8 fp8_recipe fp8_param fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad
    fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red first_last_layers_bf16
    num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4 fp4_recipe fp4_param
    moe_shared_expert_overlap moe_router_load_balancing_type moe_enable_routing_replay
    moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_router_dtype
    moe_router_bias_update_rate moe_router_force_load_balancing moe_grouped_gemm moe_use_legacy_grouped_gemm
    moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_token_dispatcher_type moe_enable_deepep
    moe_flex_dispatcher_backend moe_per_layer_logging moe_expert_capacity_factor
    moe_pad_expert_input_to_capacity moe_token_drop_policy moe_layer_recompute moe_permute_fusion
    moe_router_fusion moe_apply_probs_on_input moe_deepep_num_sms moe_hybridep_num_sms cp_comm_type
    hierarchical_context_parallel_sizes enable_cuda_graph cuda_graph_impl cuda_graph_scope
    batch_invariant_mode use_te_activation_func use_te_rng_tracker transformer_impl
    fine_grained_activation_offloading offload_modules min_offloaded_tensor_size mtp_num_layers
    mtp_loss_scaling_factor
""")

MODEL_TYPES = ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe")
TEMPLATES = ("native", "native_nonthinking", "qwen2_5", "qwen3", "qwen3_nothink", "chatml", "base", "empty")
# reward workers known by name and the arguments each takes, and the class names under which ROLL users know them
REWARD_WORKERS: dict[str, frozenset[str]] = {
    "math_rule": _names("timeout"),
    "code_sandbox": _names("""
        partial unsafe workers packages cpu_seconds wall_seconds memory_mb processes open_files disk_mb files output_mb
    """),
    "llm_judge": _names("""
        judge_model_name judge_api_url judge_api_key judge_model_type judge_prompt prompt_file system_prompt verdict
        verdict_key pattern min_score max_score temperature max_tokens extra_body api_key_env cache_size
        request_seconds retry_seconds concurrency requests_per_minute
    """),
    "remote": _names("url headers request_seconds retry_seconds concurrency requests_per_minute"),
    "ifeval": _names("loose partial"),
    "multiple_choice": _names("require_boxed"),
    "crossthinkqa": _names("reward_type response_length_penalty_coef"),
    "general_rule": _names("rule normalize tolerance"),
    "format": _names("pattern"),
    "length_penalty": _names("max_tokens cache_tokens coef"),
}
# of a judge behind an endpoint: one that runs here has an engine and generating_args
JUDGE_ENDPOINT_KEYS = _names("""
    judge_model_name judge_api_url judge_api_key api_key_env temperature max_tokens extra_body request_seconds
    retry_seconds concurrency requests_per_minute
""")
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
REWARDS_THAT_NEED_ANSWERS = ("math_rule", "multiple_choice", "crossthinkqa", "general_rule")  # a row's ground_truth
# those that keep time themselves, by what they are asked to do; others have `timeout` seconds a sample
REWARDS_THAT_KEEP_TIME = ("math_rule", "code_sandbox", "llm_judge", "remote")
REWARD_SECONDS = 60.0
# calls that a worker has under way: as many as it takes, but few where a batch is what a call is for
REWARD_CALLS = {"remote": 4}
MOST_REWARD_CALLS = 256
# keys of ROLL's RewardConfig; a worker here that does not take one ignores it
REWARD_KEYS_OF_ROLL = _names("""
    code_url use_local judge_prompt judge_model_type judge_model_name judge_api_url judge_api_key format_pattern
    reward_type response_length_penalty_coef reward_manager_config
""")

# ROLL's names, ours for pure distillation, and the rest of the table
ADV_ESTIMATORS = (
    "on_policy_distill",
    "reinforce",
    "grpo",
    "gae",
    *(name for name in ADVANTAGES if name not in ("on_policy_distill", "reinforce", "grpo", "gae")),
    "skip_obs_gae",
    "gigpo",
    "step_reinforce",
    "agentic_reinforce",
)
POLICY_LOSSES = tuple(LOSSES)
KL_LOSSES = ("none", "k1", "k2", "k3", "abs", "low_var_kl", "corrected_k3")
DIVERGENCES = ("reverse_kl", "forward_kl", "jsd", "skewed_reverse_kl", "skewed_forward_kl")
KL_PENALTIES = ("kl", "k1", "mse", "k2", "low_var_kl", "k3", "abs", "full")

# ROLL's strategies without an own counterpart here, and the nearest that exists, by what a role does
NEAREST_STRATEGY = {
    "train": {"deepspeed_train": "megatron_train", "fsdp2_train": "megatron_train"},
    "score": {
        "hf_infer": "megatron_infer",
        "deepspeed_infer": "megatron_infer",
        "fsdp2_infer": "megatron_infer",
    },
    "rollout": {"sglang": "vllm", "hf_infer": "vllm"},
}
STRATEGY = {"train": "megatron_train", "score": "megatron_infer", "rollout": "vllm"}

# Engine arguments of vLLM 0.32, for telling a misspelt one before anything starts; the engine itself has the last word
VLLM_ARGUMENTS = _names("""
    _api_process_count _api_process_rank additional_config aggregate_engine_logging all2all_backend
    allow_deprecated_quantization allowed_local_media_path allowed_media_domains async_scheduling
    attention_backend attention_config aux_output_config block_size code_revision collect_detailed_traces
    compilation_config config_format convert cp_kv_cache_interleave_size cpu_distributed_timeout_seconds
    cpu_offload_gb cpu_offload_params cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets
    data_parallel_address data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb
    data_parallel_multi_port_external_lb data_parallel_rank data_parallel_rpc_port data_parallel_size
    data_parallel_size_local data_parallel_start_rank dbo_decode_token_threshold dbo_prefill_token_threshold
    dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate decode_context_parallel_size default_mm_loras
    device_ids diffusion_config disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce
    disable_hybrid_kv_cache_manager disable_log_stats disable_nccl_for_dp_synchronization disable_sliding_window
    distributed_executor_backend distributed_timeout_seconds download_dir dp_sync_interval dtype
    ec_manager_config ec_transfer_config elastic_ep_max_dp_size enable_batch_sharded_sampling
    enable_chunked_prefill enable_cumem_allocator enable_dbo enable_elastic_ep enable_ep_weight_filter
    enable_eplb enable_expert_parallel enable_fault_tolerance enable_flashinfer_autotune enable_hc_sp
    enable_layerwise_nvtx_tracing enable_log_requests enable_logging_iteration_details enable_lora
    enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_mfu_metrics
    enable_mixed_moe_lora_format enable_mm_embeds enable_mm_processor_stats enable_moe_shared_loras
    enable_nccl_comm_suspend enable_prefix_caching enable_prompt_embeds enable_return_routed_experts
    enable_shm_tensor_arena enable_sleep_mode enable_tower_connector_lora enable_trace_replay enforce_eager
    engram_config eplb_config expert_placement_strategy fail_on_environ_validation fault_tolerance_config
    fully_sharded_loras gdn_prefill_backend generation_config gpu_memory_utilization hf_config_path hf_overrides
    hf_token ignore_patterns interleave_mm_strings io_processor_plugin ir_op_priority jit_monitor_mode
    jit_monitor_verbose kda_decode_backend kda_prefill_backend kernel_config kv_cache_dtype
    kv_cache_dtype_skip_layers kv_cache_memory_bytes kv_cache_metrics kv_cache_metrics_sample kv_events_config
    kv_offloading_backend kv_offloading_size kv_sharing_fast_prefill kv_transfer_config language_model_only
    limit_mm_per_prompt linear_backend load_format log_config_file log_level logging_config logits_processors
    logprobs_mode long_prefill_token_threshold long_prefill_token_threshold_adaptive lora_dtype
    lora_target_modules mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode
    mamba_cache_philox_rounds mamba_config mamba_ssm_cache_dtype mamba_ssu_algorithm master_addr master_port
    max_cpu_loras max_cudagraph_capture_size max_logprobs max_lora_cls_labels max_lora_rank max_loras
    max_model_len max_num_active_seqs max_num_batched_tokens max_num_queued_reqs max_num_queued_tokens
    max_num_scheduled_tokens max_num_seqs max_parallel_loading_workers media_io_kwargs mm_device_do_normalize
    mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
    mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb
    mm_processor_cache_gb mm_processor_cache_type mm_processor_device mm_processor_kwargs
    mm_shm_cache_max_object_size_mb mm_tensor_ipc model model_class_overrides model_impl
    model_loader_extra_config model_weights moe_backend nnodes node_rank num_gpu_blocks_override numa_bind
    numa_bind_cpus numa_bind_nodes offload_backend offload_group_size offload_num_in_group offload_params
    offload_prefetch_step optimization_level otlp_traces_endpoint override_generation_config
    per_request_spec_decode_metrics performance_mode pipeline_parallel_size pooler_config
    prefill_context_parallel_size prefill_schedule_interval prefix_cache_retention_interval
    prefix_caching_hash_algo prefix_match_unit profiler_config pt_load_map_location quantization
    quantization_config ray_workers_use_nsight reasoning_config reasoning_parser reasoning_parser_plugin
    renderer_num_workers replayssm_buffer_len return_sampling_mask revision runner safetensors_load_strategy
    safetensors_prefetch_block_size safetensors_prefetch_num_threads scheduler_cls scheduler_reserve_full_isl
    scheduling_policy seed served_model_name show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling
    skip_tokenizer_init sleep_mode_offload_cudagraph sleep_preserve_parameter_names sparse_indexer_topk_backend
    spec_method spec_model spec_tokens specialize_active_lora speculative_config stream_interval
    structured_outputs_config swa_bounded_replay tensor_parallel_size tokenizer tokenizer_mode
    tokenizer_revision tokens_only trust_remote_code ubatch_size use_fp64_gumbel use_replayssm use_tqdm_on_load
    video_pruning_method video_pruning_rate watermark watermark_config weight_transfer_config worker_cls
    worker_extension_cls
""")
