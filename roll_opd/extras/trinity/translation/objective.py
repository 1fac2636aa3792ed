"""Translate the objective of a Trinity-RFT configuration: algorithm, loss, advantage, KL and critic."""

from typing import Any

from roll_opd.extras.trinity.translation.keys import BATCH_ARGUMENTS, KL_PENALTIES
from roll_opd.extras.trinity.translation.reading import Translation
from roll_opd.objective.algorithms import algorithm
from roll_opd.objective.registry import AlgorithmError


def objective(read: Translation) -> None:
    """Translate the algorithm, the arguments of its functions, and the KL to the reference policy."""
    key = "algorithm.algorithm_type"
    name = read.get(key, "ppo")
    if name in ("sft", "dpo"):
        read.diag.error(key, f"{name} trains on rows with answers; write a configuration for start_{name}_pipeline.py")
        return
    read.put("algorithm_type", name, key if read.get(key) else "")
    try:
        row = algorithm(name) if isinstance(name, str) else None
    except AlgorithmError:
        row = None  # an error names this package's key
    advantage = read.below("algorithm.advantage_fn_args")
    if read.is_pure and "kl_coef" in advantage:
        read.put("opd_kl_coef", advantage.pop("kl_coef"), "algorithm.advantage_fn_args.kl_coef")
    loss = read.below("algorithm.policy_loss_fn_args")
    for argument in sorted(BATCH_ARGUMENTS & loss.keys()):
        read.drop(
            f"algorithm.policy_loss_fn_args.{argument}",
            "the loss is normalised over the whole batch, independent of micro-batches",
        )
    if loss.get("use_token_level_loss_in_sft") is True:
        read.drop("algorithm.policy_loss_fn_args.use_token_level_loss_in_sft", "loss_agg_mode sets it")
        loss = {argument: value for argument, value in loss.items() if argument != "use_token_level_loss_in_sft"}
    if "loss_agg_mode" in loss and read.get("algorithm.loss_agg_mode") is not None:
        read.drop("algorithm.policy_loss_fn_args.loss_agg_mode", "algorithm.loss_agg_mode sets it")
        loss = {argument: value for argument, value in loss.items() if argument != "loss_agg_mode"}
    if loss := {argument: value for argument, value in loss.items() if argument not in BATCH_ARGUMENTS}:
        read.put("policy_loss_fn_args", loss, "algorithm.policy_loss_fn_args")
    if advantage:
        read.put("advantage_fn_args", advantage, "algorithm.advantage_fn_args")
    compares = _kl_loss(read, bool(row and row.kl_loss)) | _kl_penalty(read)
    coefficient = _one_argument(read, "algorithm.entropy_loss_fn_args", "entropy_coef")
    if coefficient is not None and read.values.get("entropy_loss_fn") != "none":
        read.put("entropy_loss_coef", coefficient, "algorithm.entropy_loss_fn_args.entropy_coef")
    arguments = read.below("algorithm.sample_strategy_args")
    for argument, value in arguments.items():
        path = f"algorithm.sample_strategy_args.{argument}"
        if argument == "expert_data_ratio":
            read.put("expert_data_ratio", value, path)
        elif argument == "sft_dataset_name":
            read.drop(path, "demonstrations come from trainer_input")
        elif argument == "max_staleness" and read.get("algorithm.sample_strategy") == "staleness_control":
            read.found[path] = value  # translated with the synchronizer
        else:
            read.diag.error(
                path, "is not supported, because every experience is trained on in its own step; remove this key"
            )
    if compares:
        read.put("reference.strategy_args.strategy_name", "megatron_infer")
    if (row and row.advantage == "gae") or read.values.get("advantage_fn") in ("ppo", "gae"):
        _critic(read)


def _one_argument(read: Translation, section: str, name: str) -> Any:
    """Return the value of the argument `name` in `section`; None if it is not set.

    Other arguments in the section are not supported. They are reported as problems.
    """
    given = read.below(section)
    for argument in given.keys() - {name}:
        read.diag.error(
            f"{section}.{argument}",
            f"is not supported here; remove this argument (the only supported argument is {name})",
        )
    return given.get(name)


def _kl_loss(read: Translation, by_row: bool) -> bool:
    """Translate the KL loss. Return whether the run has a KL loss."""
    name, key = read.first("algorithm.kl_loss_fn")
    coefficient = _one_argument(read, "algorithm.kl_loss_fn_args", "kl_coef")
    if name:
        read.put("kl_loss_fn", name, key)
    if name == "none":
        return False
    if coefficient == 0:
        read.put("use_kl_loss", False, "algorithm.kl_loss_fn_args.kl_coef")
        return False
    if coefficient is not None:
        read.put("kl_loss_coef", coefficient, "algorithm.kl_loss_fn_args.kl_coef")
    if name and not by_row:
        read.put("use_kl_loss", True, key)
    return bool(name) or by_row


def _kl_penalty(read: Translation) -> bool:
    """Translate the KL penalty of the rewards. Return whether the run has a KL penalty."""
    name, key = read.first("algorithm.kl_penalty_fn", default="none")
    given = read.below("algorithm.kl_penalty_fn_args")
    if name == "none":
        if key:
            read.drop(key, "no KL is subtracted from rewards")
        return False
    if not isinstance(name, str) or name not in KL_PENALTIES:
        read.diag.error(key, f"should be none or {', '.join(KL_PENALTIES)}, got {read.diag.as_written(key, name)}")
        return False
    read.put("add_token_level_kl", True, key)
    read.put("kl_penalty", KL_PENALTIES[name], key)
    read.put("init_kl_coef", given.get("kl_coef", 0.001), f"{key}_args.kl_coef" if "kl_coef" in given else "")
    if given.get("adaptive"):
        read.put("target_kl", given.get("target_kl", 1.0), f"{key}_args.target_kl")
        read.put("kl_horizon", given.get("horizon", 10000), f"{key}_args.horizon")
    for argument in given.keys() - {"kl_coef", "adaptive", "target_kl", "horizon"}:
        read.diag.error(f"{key}_args.{argument}", "is not supported here; remove this argument")
    return True


def _critic(read: Translation) -> None:
    model, key = read.first("model.critic_model_path", "model.model_path")
    if model:
        read.put("critic.model_args.model_name_or_path", model, key)
    verl = "trainer.trainer_config.critic"
    rate, key = read.first(f"{verl}.optim.lr", default=1e-5)
    read.put("critic.training_args.learning_rate", rate, key)
    read.put("critic.training_args.lr_scheduler_type", "constant")
    read.put("critic.strategy_args.strategy_name", "megatron_train")
    clip, key = read.first(f"{verl}.cliprange_value", default=0.5)
    read.put("value_clip", clip, key)
