"""Keys of a role's section that the planner does not read for every role, and the roles for which it reads them."""

from collections.abc import Collection

from roll_opd.config.schema import Worker, keys_of

TRAIN, ROLLOUT, TEACHER, FROZEN, CRITIC = "train", "rollout", "teacher", "frozen", "critic"  # kinds of roles
ENGINES = (ROLLOUT,)
MEGATRON = (TRAIN, TEACHER, FROZEN, CRITIC)
LEARNERS = (TRAIN, CRITIC)
OF_TEACHERS = ("opd_kl_coef", "tag_included")
# key -> the kinds of roles that read it; every role reads the others
READ_BY: dict[str, Collection[str]] = {
    **dict.fromkeys(OF_TEACHERS, (TEACHER,)),
    "data_args": (TRAIN,),
    "training_args": LEARNERS,
    "generating_args": ENGINES,
    "worker_cls": (),  # of a reward; an ActorPGWorker of the student is ROLL's
    **dict.fromkeys(("pg_variant", "topr_positive_weight", "topr_negative_weight"), (TRAIN,)),
    "num_gpus_per_worker": ENGINES,
    **dict.fromkeys(("infer_batch_size", "use_sequence_packing", "sequence_packing_args"), MEGATRON),
    **dict.fromkeys(("use_dynamic_batching_in_infer", "max_tokens_per_microbatch_in_infer"), MEGATRON),
    **dict.fromkeys(("use_dynamic_batching_in_train", "max_tokens_per_microbatch_in_train"), LEARNERS),
}
# keys whose readers are checked with their values (roles.py, roll.variants)
CHECKED = ("data_args", "training_args", "generating_args", "worker_cls", "pg_variant")
# options of strategy_args.strategy_config that are often written elsewhere
OF_MEGATRON = frozenset({
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("sequence_parallel", "use_distributed_optimizer", "recompute_granularity"),
})  # fmt: skip
OF_VLLM = frozenset({
    *("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "max_model_len", "max_num_seqs"),
    *("enforce_eager", "block_size", "load_format", "sleep_level", "max_num_batched_tokens"),
})  # fmt: skip


def kind_of(role: str) -> str:
    """Return the kind of the role with this name in a configuration."""
    if role.endswith("_train"):
        return TRAIN
    if role in (TEACHER, CRITIC):
        return role
    return FROZEN if role == "reference" else ROLLOUT


def has_effect(key: str, kind: str) -> bool:
    """Whether a role of this kind reads a key of its section."""
    return kind in READ_BY.get(key, (kind,))


def unread(worker: Worker, kind: str) -> list[str]:
    """Return the keys with another value than the default that a role of this kind does not read."""
    default = type(worker)()
    changed = [name for name in keys_of(Worker) if getattr(worker, name, None) != getattr(default, name, None)]
    return [name for name in changed if name not in CHECKED and not has_effect(name, kind)]
