"""The words of other tools (TRL, verl, NeMo-RL, axolotl) and the keys that have their meaning here."""

# {train} and {infer} are the student's sections, {role} is the role of the written key, or {train};
# NOTHING precedes the reason why a word has no counterpart here
NOTHING = "nothing: "
SECTIONS = ("model_args", "training_args", "strategy_args", "generating_args", "data_args")
_LENGTH = "sequence_length (prompt and response) or response_length"
_EPOCHS = "max_steps, because a run with rollouts counts steps and not epochs"
_MINI_BATCH = (
    "{train}.training_args.gradient_accumulation_steps (an update has it x per_device_train_batch_size x ranks)"
)
_DTYPE = "{role}.model_args.dtype (bf16, fp16 or fp32)"
_MODEL = "{role}.model_args.model_name_or_path"
_ROWS = "{train}.data_args.file_name, with the path of a JSONL or Parquet file"
_HELD_OUT = "validation.data_args.file_name"
_TRACKERS = "track_with"
_REWARDS = "rewards.<domain>.worker_cls"
_LORA = "{train}.model_args.lora_rank"
_HUB = NOTHING + "a run uploads no model; `hf upload` does, after the run"
_ENGINE = NOTHING + "the student always samples with vLLM, whose options are {infer}.strategy_args.strategy_config"
_STRATEGY = "{train}.strategy_args, whose strategy_name is megatron_train"
_QUANTISED = NOTHING + "students are not quantised"
_MEMORY = "{infer}.strategy_args.strategy_config.gpu_memory_utilization"
_PARALLEL = "{infer}.strategy_args.strategy_config.tensor_parallel_size"
_CHECKPOINTS = "save_steps, the number of steps between two checkpoints"
_VALIDATIONS = "eval_steps, the number of steps between two validations"
_URL = "teacher.http.url"

# word, or the end of a dotted path -> key here
WORDS: dict[str, str] = {
    **dict.fromkeys(("lr", "optimizer.lr", "optim_lr"), "{train}.training_args.learning_rate"),
    **dict.fromkeys(("lr_scheduler", "lr_decay_style"), "{train}.training_args.lr_scheduler_type"),
    "lr_warmup_steps": "{train}.training_args.warmup_steps",
    "lr_warmup_steps_ratio": "{train}.training_args.warmup_ratio",
    **dict.fromkeys(("optim", "optimizer"), NOTHING + "the optimizer is AdamW ({train}.training_args)"),
    **dict.fromkeys(("grad_clip", "clip_grad", "gradient_clip_val"), "max_grad_norm"),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "precision", "mixed_precision"), _DTYPE),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "qlora"), _QUANTISED),
    **dict.fromkeys(("gradient_checkpointing", "enable_gradient_checkpointing", "activation_checkpointing"),
                    "{train}.strategy_args.strategy_config.recompute_granularity: full"),
    **dict.fromkeys(("num_generations", "num_generations_per_prompt", "rollout.n", "n_samples_per_prompt", "group_size",
                     "num_samples_per_prompt", "n_samples"), "num_return_sequences_in_group"),
    **dict.fromkeys(("train_batch_size", "num_prompts_per_step", "batch_size", "gen_batch_size", "prompt_batch_size"),
                    "rollout_batch_size (prompts per step)"),
    **dict.fromkeys(("ppo_mini_batch_size", "train_global_batch_size", "global_batch_size", "mini_batch_size",
                     "generation_batch_size"), _MINI_BATCH),
    **dict.fromkeys(("micro_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu",
                     "train_micro_batch_size", "micro_batch_size_per_gpu"),
                    "{train}.training_args.per_device_train_batch_size"),
    **dict.fromkeys(("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "logprob_batch_size",
                     "per_device_eval_batch_size"), "{train}.infer_batch_size"),
    **dict.fromkeys(("num_iterations", "update_epochs"), "ppo_epochs"),
    "max_prompt_length": "prompt_length",
    **dict.fromkeys(("max_completion_length", "max_response_length", "max_tokens"), "response_length"),
    **dict.fromkeys(("max_length", "max_seq_length", "max_seq_len", "seq_length", "seq_len", "sequence_len",
                     "max_total_sequence_length", "cutoff_len"), _LENGTH),
    **dict.fromkeys(("total_training_steps", "max_num_steps", "total_steps", "steps", "num_steps", "train_steps"),
                    "max_steps"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "total_epochs", "epochs", "max_num_epochs"), _EPOCHS),
    **dict.fromkeys(("save_freq", "save_period", "save_interval", "save_strategy", "saves_per_epoch"), _CHECKPOINTS),
    **dict.fromkeys(("test_freq", "val_period", "eval_interval", "eval_strategy", "evaluation_strategy",
                     "evals_per_epoch"), _VALIDATIONS),
    **dict.fromkeys(("save_total_limit", "keep_top_k", "max_actor_ckpt_to_keep"), "max_ckpt_to_keep"),
    **dict.fromkeys(("resume_mode", "resume_from_path", "auto_resume", "auto_resume_from_checkpoints"),
                    "resume_from_checkpoint"),
    "beta": "kl_loss_coef with use_kl_loss: true, if it weighs the KL to a reference policy (TRL's GRPO), or"
            " opd_divergence, if it interpolates divergences (TRL's GKD)",
    **dict.fromkeys(("kl_coef", "kl_penalty_coef", "reference_policy_kl_penalty"),
                    "opd_kl_coef for the reverse KL to the teachers, or kl_loss_coef for the KL to a reference policy"),
    "lmbda": NOTHING + "all samples are the student's own",
    **dict.fromkeys(("epsilon", "clip_ratio", "cliprange", "clip_eps", "ratio_clip_min"), "pg_clip"),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high", "ratio_clip_max"),
                    "pg_clip_high with use_pg_clip_range: true"),
    **dict.fromkeys(("entropy_coeff", "entropy_coef"), "entropy_loss_coef"),
    "loss_type": "policy_loss, and loss_agg_mode for the way in which tokens are averaged",
    **dict.fromkeys(("topk", "topk_logits_k", "top_k_logits", "loss_top_k", "distill_topk"),
                    "opd_topk with opd_objective: topk"),
    **dict.fromkeys(("divergence", "kl_type", "distillation_loss"), "opd_divergence"),
    **dict.fromkeys(("lora_r", "peft_config.r", "lora.r", "lora.dim", "lora.rank", "use_peft", "use_lora", "adapter"),
                    _LORA),
    **dict.fromkeys(("target_modules", "lora_target_modules"), "{train}.model_args.lora_target"),
    **dict.fromkeys(("teacher_model", "teacher_model_name_or_path", "teacher_path", "teacher_name"),
                    "teacher.model_args.model_name_or_path"),
    **dict.fromkeys(("base_url", "teacher_url", "teacher_model_server_url", "vllm_server_base_url"), _URL),
    **dict.fromkeys(("use_vllm", "vllm_mode", "rollout.name", "inference_engine"), _ENGINE),
    **dict.fromkeys(("vllm_gpu_memory_utilization", "rollout.gpu_memory_utilization"), _MEMORY),
    **dict.fromkeys(("vllm_tensor_parallel_size", "rollout.tensor_model_parallel_size"), _PARALLEL),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "accelerator_config", "zero_stage"), _STRATEGY),
    **dict.fromkeys(("report_to", "logger", "use_wandb", "wandb_enabled"), _TRACKERS),
    **dict.fromkeys(("run_name", "experiment_name"), "exp_name"),
    **dict.fromkeys(("wandb_project", "project_name", "wandb_entity", "wandb_name"),
                    "tracker_kwargs, the arguments of the tracker"),
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo"), _HUB),
    **dict.fromkeys(("train_files", "dataset", "datasets", "dataset_name", "dataset_path", "train_data",
                     "train_file", "prompt_data", "train_dataset"), _ROWS),
    **dict.fromkeys(("val_files", "eval_dataset", "test_files", "val_file", "test_datasets"), _HELD_OUT),
    **dict.fromkeys(("enable_thinking", "thinking"), "chat_template_kwargs.enable_thinking"),
    "apply_chat_template_kwargs": "chat_template_kwargs",
    "chat_template": "{train}.data_args.template, the name of a template, or chat_template.jinja of the model",
    **dict.fromkeys(("default_system", "system_message", "default_system_prompt"), "system_prompt"),
    **dict.fromkeys(("label_key", "solution_key", "ground_truth_key"), "{train}.data_args.ground_truth"),
    **dict.fromkeys(("reward_funcs", "reward_fn", "custom_reward_function", "reward_functions", "reward_manager"),
                    _REWARDS),
    **dict.fromkeys(("n_gpus_per_node", "gpus_per_node", "num_gpus", "n_gpus", "num_devices", "nproc_per_node"),
                    "num_gpus_per_node"),
    **dict.fromkeys(("nnodes", "n_nodes"), "num_nodes"),
    **dict.fromkeys(("base_model", "model_path", "model.path", "pretrained_model_name_or_path", "model_id",
                     "policy.model_name"), _MODEL),
}  # fmt: skip


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
