"""Plan the LoRA adapters of a student from its keys or from its initial adapter."""

from collections.abc import Iterable
from pathlib import Path

from roll_opd.config.plan import Layout, LoraPlan
from roll_opd.config.schema import ModelArgs
from roll_opd.models.adapter_files import adapted_modules, read_adapter
from roll_opd.models.model_info import ModelFilesError, ModelInfo, find_model

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = LINEAR[:4]
# name of a group -> its layers
GROUPS = {
    "all-linear": LINEAR,
    "all": LINEAR,
    "linear_qkv": LINEAR[:3],
    "linear_proj": LINEAR[3:4],
    "linear_fc1": LINEAR[4:6],
    "linear_fc2": LINEAR[6:],
}
DEFAULT_RANK = 8
KEYS = ("lora_target", "lora_rank", "adapter_name_or_path")  # each of these keys requests an adapter
NEVER = ("additional_target", "freeze_module_prefix")


def read_lora(args: ModelArgs) -> LoraPlan | None:
    """Return the plan of the adapters of a trained role, or None if the role has no adapters. Report problems."""
    diag = args.diag
    if args.lora_dropout:
        diag.error("lora_dropout", f"{args.lora_dropout}: log-probs of a model under dropout are not defined; use 0")
    if adapter_key(args) is None:
        return None
    targets = _written(args)
    for name in _unknown(targets):
        diag.error("lora_target", f"{name!r} is not a linear layer; use all-linear, or some of {', '.join(LINEAR)}")
    if args.adapter_name_or_path is None:
        rank = args.lora_rank or DEFAULT_RANK
        return LoraPlan(_expanded(targets or LINEAR), rank, args.lora_alpha or 2.0 * rank)
    plan = None
    with diag.catching("adapter_name_or_path", ModelFilesError):
        path = find_model(args.adapter_name_or_path)
        info = read_adapter(path)
        if other := _unknown(info.targets):
            raise ModelFilesError(
                f"{path} has an adapter of {', '.join(sorted(other))}; only linear layers can have adapters"
            )
        plan = LoraPlan(_expanded(info.targets), info.rank, info.alpha, str(path))
    return _as_written(args, plan) if plan else None


def check_modules(lora: LoraPlan, model: ModelInfo, args: ModelArgs) -> None:
    """Refuse an initial adapter that belongs to other modules than all those of the model with these names."""
    if lora.path is None or not model.tensors:
        return
    wanted = adapted_modules(model, lora.targets)
    found = read_adapter(Path(lora.path)).modules
    if other := sorted(found - wanted):
        args.diag.error("adapter_name_or_path", f"{lora.path} adapts {other[0]}, which {model.path.name} lacks")
    elif lacking := sorted(wanted - found):
        args.diag.unsupported(
            "adapter_name_or_path",
            f"{lora.path} has adapters in {len(found)} of {len(wanted)} layers, none in {lacking[0]} (target_modules,"
            " layers_to_transform or exclude_modules of its adapter_config.json); name an adapter of all layers",
        )


def check_experts(lora: LoraPlan, model: ModelInfo, layout: Layout | None, args: ModelArgs) -> None:
    """Refuse adapters of expert layers that cannot be trained, and some targets of experts without the others.

    vLLM packs the adapters of gate, up and down of all experts together.
    """
    key, of_mlp = adapter_key(args) or "lora_rank", [name for name in lora.targets if name not in ATTENTION]
    if not of_mlp:
        return
    modules = {name.removesuffix(".weight") for name in model.tensors}
    if model.tensors and not any(name.endswith(".mlp.experts.0.gate_proj") for name in modules):
        text = f"adapters of experts ({', '.join(of_mlp)}) need a tensor for each expert, which {model.path.name} lacks"
        args.diag.unsupported(key, f"{text}; use {','.join(ATTENTION)}")
    elif any(".shared_expert" in name for name in modules):
        text = f"adapters of shared experts ({', '.join(of_mlp)}) are not available yet"
        args.diag.unsupported(key, f"{text}; use {','.join(ATTENTION)}")
    elif len(of_mlp) < len(LINEAR) - len(ATTENTION):
        args.diag.unsupported(key, f"experts with adapters need all of {', '.join(LINEAR[4:])}; name all or none")
    elif layout and layout.expert_tp > 1:
        text = f"adapters of experts need experts on one tensor rank, but {layout.expert_tp} ranks share one"
        args.diag.unsupported(key, f"{text}; set expert_tensor_parallel_size to 1")


def adapter_key(args: ModelArgs) -> str | None:
    """Return the first key of a section that asks for an adapter, or None if no key does."""
    return None if args.lora_rank == 0 else next((key for key in KEYS if getattr(args, key)), None)


def _as_written(args: ModelArgs, plan: LoraPlan) -> LoraPlan:
    """Return the plan of the initial adapter. Refuse keys of the user that contradict it."""
    written = {
        "lora_rank": (args.lora_rank, plan.rank),
        "lora_alpha": (args.lora_alpha, plan.alpha),
        "lora_target": (_expanded(_written(args)), plan.targets),
    }
    for key, (ours, its) in written.items():
        if ours and ours != its:
            shown = ",".join(its) if isinstance(its, tuple) else its
            args.diag.error(key, f"the initial adapter has {shown}; remove this key")
    return plan


def _written(args: ModelArgs) -> tuple[str, ...]:
    """Return the names of layers and groups that the user has written in `lora_target`."""
    target = args.lora_target or ()
    named = target.split(",") if isinstance(target, str) else target
    return tuple(name.strip() for name in named if name.strip())


def _unknown(names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in GROUPS and name not in LINEAR]


def _expanded(names: Iterable[str]) -> tuple[str, ...]:
    """Return the layers that `names` stand for, in the order of `LINEAR`. The name of a group stands for its layers."""
    named = {one for name in names for one in GROUPS.get(name, (name,))}
    return tuple(name for name in LINEAR if name in named)
