"""The words of other tools (TRL, verl, NeMo-RL, axolotl) and the keys that have their meaning here."""

# {train} and {infer} are the student's sections, {role} is the role of the written key, or {train};
# NOTHING precedes the reason why a word has no counterpart here
NOTHING = "nothing: "
SECTIONS = ("model_args", "training_args", "strategy_args", "generating_args", "data_args")

# key here -> words of other tools, or ends of their dotted paths
_WORDS = {
    "{train}.training_args.learning_rate": "lr optimizer.lr optim_lr",
    "{train}.training_args.lr_scheduler_type": "lr_scheduler lr_decay_style",
    "{train}.training_args.warmup_steps": "lr_warmup_steps",
    "{train}.training_args.warmup_ratio": "lr_warmup_steps_ratio",
    "nothing: the optimizer is AdamW ({train}.training_args)": "optim optimizer",
    "max_grad_norm": "grad_clip clip_grad gradient_clip_val",
    "{role}.model_args.dtype (bf16, fp16 or fp32)": "bf16 fp16 torch_dtype precision mixed_precision",
    "nothing: students are not quantised": "load_in_4bit load_in_8bit qlora",
    "{train}.strategy_args.strategy_config.recompute_granularity: full":
        "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing",
    "num_return_sequences_in_group":
        "num_generations num_generations_per_prompt rollout.n n_samples_per_prompt group_size "
        "num_samples_per_prompt n_samples",
    "rollout_batch_size (prompts per step)":
        "train_batch_size num_prompts_per_step batch_size gen_batch_size prompt_batch_size",
    "{train}.training_args.gradient_accumulation_steps (an update has it x per_device_train_batch_size x "
    "ranks)":
        "ppo_mini_batch_size train_global_batch_size global_batch_size mini_batch_size generation_batch_size",
    "{train}.training_args.per_device_train_batch_size":
        "micro_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu train_micro_batch_size "
        "micro_batch_size_per_gpu",
    "{train}.infer_batch_size":
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu logprob_batch_size per_device_eval_batch_size",
    "ppo_epochs": "num_iterations update_epochs",
    "prompt_length": "max_prompt_length",
    "response_length": "max_completion_length max_response_length max_tokens",
    "sequence_length (prompt and response) or response_length":
        "max_length max_seq_length max_seq_len seq_length seq_len sequence_len max_total_sequence_length "
        "cutoff_len",
    "max_steps": "total_training_steps max_num_steps total_steps steps num_steps train_steps",
    "max_steps, because a run with rollouts counts steps and not epochs":
        "num_train_epochs num_epochs total_epochs epochs max_num_epochs",
    "save_steps, the number of steps between two checkpoints":
        "save_freq save_period save_interval save_strategy saves_per_epoch",
    "eval_steps, the number of steps between two validations":
        "test_freq val_period eval_interval eval_strategy evaluation_strategy evals_per_epoch",
    "max_ckpt_to_keep": "save_total_limit keep_top_k max_actor_ckpt_to_keep",
    "resume_from_checkpoint": "resume_mode resume_from_path auto_resume auto_resume_from_checkpoints",
    "kl_loss_coef with use_kl_loss: true, if it weighs the KL to a reference policy (TRL's GRPO), or "
    "opd_divergence, if it interpolates divergences (TRL's GKD)":
        "beta",
    "opd_kl_coef for the reverse KL to the teachers, or kl_loss_coef for the KL to a reference policy":
        "kl_coef kl_penalty_coef reference_policy_kl_penalty",
    "nothing: all samples are the student's own": "lmbda",
    "pg_clip": "epsilon clip_ratio cliprange clip_eps ratio_clip_min",
    "pg_clip_high with use_pg_clip_range: true": "epsilon_high clip_ratio_high ratio_clip_max",
    "entropy_loss_coef": "entropy_coeff entropy_coef",
    "policy_loss, and loss_agg_mode for the way in which tokens are averaged": "loss_type",
    "opd_topk with opd_objective: topk": "topk topk_logits_k top_k_logits loss_top_k distill_topk",
    "opd_divergence": "divergence kl_type distillation_loss",
    "{train}.model_args.lora_rank": "lora_r peft_config.r lora.r lora.dim lora.rank use_peft use_lora adapter",
    "{train}.model_args.lora_target": "target_modules lora_target_modules",
    "teacher.model_args.model_name_or_path": "teacher_model teacher_model_name_or_path teacher_path teacher_name",
    "teacher.http.url": "base_url teacher_url teacher_model_server_url vllm_server_base_url",
    "nothing: the student always samples with vLLM, whose options are {infer}.strategy_args.strategy_config":
        "use_vllm vllm_mode rollout.name inference_engine",
    "{infer}.strategy_args.strategy_config.gpu_memory_utilization":
        "vllm_gpu_memory_utilization rollout.gpu_memory_utilization",
    "{infer}.strategy_args.strategy_config.tensor_parallel_size":
        "vllm_tensor_parallel_size rollout.tensor_model_parallel_size",
    "{train}.strategy_args, whose strategy_name is megatron_train":
        "deepspeed fsdp fsdp_config accelerator_config zero_stage",
    "track_with": "report_to logger use_wandb wandb_enabled",
    "exp_name": "run_name experiment_name",
    "tracker_kwargs, the arguments of the tracker": "wandb_project project_name wandb_entity wandb_name",
    "nothing: a run uploads no model; `hf upload` does, after the run":
        "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo",
    "{train}.data_args.file_name, with the path of a JSONL or Parquet file":
        "train_files dataset datasets dataset_name dataset_path train_data train_file prompt_data train_dataset",
    "validation.data_args.file_name": "val_files eval_dataset test_files val_file test_datasets",
    "chat_template_kwargs.enable_thinking": "enable_thinking thinking",
    "chat_template_kwargs": "apply_chat_template_kwargs",
    "{train}.data_args.template, the name of a template, or chat_template.jinja of the model": "chat_template",
    "system_prompt": "default_system system_message default_system_prompt",
    "{train}.data_args.ground_truth": "label_key solution_key ground_truth_key",
    "rewards.<domain>.worker_cls": "reward_funcs reward_fn custom_reward_function reward_functions reward_manager",
    "num_gpus_per_node": "n_gpus_per_node gpus_per_node num_gpus n_gpus num_devices nproc_per_node",
    "num_nodes": "nnodes n_nodes",
    "{role}.model_args.model_name_or_path":
        "base_model model_path model.path pretrained_model_name_or_path model_id policy.model_name",
}  # fmt: skip
WORDS = {word: ours for ours, words in _WORDS.items() for word in words.split()}


def advice(path: str, train: str, infer: str) -> str | None:
    """Return what to write in place of another tool's key, as "use KEY" or "remove it (REASON)"; None if unknown.

    Args:
        path: the dotted path of the key; its longest end that is a word of the table counts.
        train, infer: names of the student's sections.
    """
    parts = path.split(".")
    found = (WORDS.get(".".join(parts[-length:])) for length in range(len(parts), 0, -1))
    place = next(filter(None, found), None)
    if place is None:
        return None
    inside = next((number for number, part in enumerate(parts) if part in SECTIONS), 0)  # of a role
    place = place.format(train=train, infer=infer, role=".".join(parts[:inside]) or train)
    return f"remove it ({place.removeprefix(NOTHING)})" if place.startswith(NOTHING) else f"use {place}"
