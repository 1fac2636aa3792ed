"""Names that ROLL, Megatron-core and vLLM users write, as data.

`IGNORED_*`: ROLL's keys that have no meaning here yet; they are accepted and listed in one warning.
`MEGATRON_FIELDS`: fields of Megatron-core's TransformerConfig that pass through untouched.
"""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


IGNORED_TOP = _names("""
    logging_dir rollout_dump_dir checkpoint_config reward_pretrain tag_to_template base_dir rpc_timeout
    val_batch_size local_rank val_prompt_length val_sequence_length profiler_timeline profiler_memory
    profiler_output_dir length_profiler_dir report_length_and_rewards is_offload_states
    is_offload_optimizer_states_in_train_step model_update_buffer_size_mb model_download_type rollout_mock
    generate_opt_level is_num_return_sequences_expand max_running_requests is_use_additional_prompts
    max_additional_running_prompts user_defined_rollout_loop_cls router_args pg_variant
    deepspeed_zero deepspeed_zero2 deepspeed_zero3 deepspeed_zero3_cpuoffload
    reference critic reward reward_model async_generation_ratio l2 lambd value_clip kl_penalty target_kl
    kl_horizon use_reward_scaling add_len_reward reward_clip use_reward_norm whiten_rewards whiten_advantages
    advantage_clip norm_mean_type norm_std_type kl_loss_coef entropy_loss_coef enable_reference
    force_disable_old_logprobs_recompute train_infer_correction infer_correction
    dataset_filter vlm_filter save_logging_board_dir difficulty_loss_weight length_loss_weight
    postive_loss_coef use_topr_neg_loss_coef use_policy_loss_type use_topr_loss rl_loss_coef
    importance_sampling val_greedy val_n_sample max_len_mask mask_type difficulty_mask balance_length
    minibatch_data_iter_num difficulty_low_threshold difficulty_high_threshold error_max_len_clip
    error_max_len_threshold opsd_mode opsd_solution_key opsd_max_solution_length
    custom_envs train_env_manager val_env_manager reward_normalization ratio_type step_reward_gamma
    max_actions_per_traj step_reward_weight episode_reward_weight
""")

IGNORED_WORKER = _names("""
    name worker_cls pg_variant world_size num_gpus_per_worker model_update_frequency backend_timeout
    topr_positive_weight topr_negative_weight max_concurrency sequence_length_round_in_train
    sequence_length_round_in_infer offload_nccl logits_in_fp32 apply_loss_scale
""")

IGNORED_MODEL_ARGS = _names("""
    attn_implementation flash_attn disable_gradient_checkpointing model_type lora_alpha lora_dropout lora_rank
    additional_target autocast_adapter_dtype gradient_checkpointing_use_reentrant device_map num_labels
    model_config_kwargs moe_aux_loss_coef ulysses_size vision_dp
""")

IGNORED_TRAINING_ARGS = _names("num_train_epochs logging_steps save_steps bf16 fp16 seed output_dir max_steps")

IGNORED_DATA_ARGS = _names("""
    domain_interleave_probs interleave_probs dataset_dir preprocessing_num_workers cache_path eval_file_name
    dataset_type response
""")

IGNORED_GENERATING_ARGS = _names("num_beams do_sample max_length length_penalty default_system logprobs")

IGNORED_REWARD = _names("""
    name model_args data_args infer_batch_size strategy_args generating_args device_mapping
    query_filter_config response_filter_config num_gpus_per_worker max_concurrency system_envs
""")

IGNORED_VALIDATION = _names("eval_steps device_mapping model_args strategy_args infer_batch_size")

IGNORED_SEQUENCE_PACKING = _names("algorithm min_num_micro_batches_forward min_num_micro_batches_train")

# strategy_config of Megatron that the engine decides itself, or that speed up what is not run here
IGNORED_MEGATRON = _names("""
    overlap_grad_reduce overlap_param_gather grad_reduce_in_fp32 use_distributed_optimizer_infer
    additional_configs optimizer variable_seq_lengths use_cpu_initialization
    accumulate_allreduce_grads_in_fp32
""")
# ROLL's own words inside a vLLM strategy_config
IGNORED_VLLM = _names("sleep_level logger_level data_parallel_rank")

# Fields that a model's config.json or another key decides; writing them is a mistake worth a sentence
MEGATRON_DECIDED = _names("""
    num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels layernorm_epsilon
    normalization num_moe_experts moe_router_topk moe_ffn_hidden_size rotary_base params_dtype pipeline_dtype
    gated_linear_unit activation_func add_qkv_bias add_bias_linear qk_layernorm deterministic_mode
""")

MEGATRON_FIELDS = _names("""
    expert_tensor_parallel_size gradient_accumulation_fusion async_tensor_model_parallel_allreduce
    tp_comm_overlap cross_entropy_loss_fusion cross_entropy_fusion_impl overlap_moe_expert_parallel_comm
    delay_wgrad_compute overlap_p2p_comm batch_p2p_comm batch_p2p_sync deallocate_pipeline_outputs
    defer_embedding_wgrad_compute wgrad_deferral_limit microbatch_group_size_per_vp_stage cpu_offloading
    cpu_offloading_num_layers num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    pipeline_model_parallel_layout account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split attention_backend hidden_dropout attention_dropout
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
    mtp_loss_scaling_factor calculate_per_token_loss
""")

MODEL_TYPES = ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe")
TEMPLATES = ("native", "native_nonthinking", "qwen2_5", "qwen3", "qwen3_nothink", "chatml", "base", "empty")
TRACKERS = ("tensorboard", "stdout", "jsonl")
TRACKERS_OF_ROLL = ("wandb", "swanlab", "mlflow", "ml_tracker")
# reward workers known by name, and the class names under which ROLL users know them
REWARD_WORKERS = ("math_rule",)
REWARD_CLASSES_OF_ROLL = {"MathRuleRewardWorker": "math_rule"}

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
