"""Check whether a machine can run a plan, so that problems are reported before an engine starts. Imports no torch.

`roll-opd run` refuses a plan with problems. `roll-opd plan` only warns, because the plan may be for another machine.
"""

from pathlib import Path

from roll_opd.base import hardware
from roll_opd.base.interpreter import REMEDY
from roll_opd.config.plan import RolloutPlan, RunPlan
from roll_opd.inference import cpu_attention
from roll_opd.inference.engine_arguments import cached_models, cpu_block, kv_cache_bytes, resolve_engine_args
from roll_opd.models.engine_options import missing_engines
from roll_opd.models.model_info import ModelFilesError, read_model

OPTIONS = "strategy_args.strategy_config"

CPU_WIDTH = 32  # vLLM 0.32's CPU kernel of the gated delta rule needs a multiple of this, and more than this


def machine_problems(plan: RunPlan, gpus: int) -> list[str]:
    """Return the problems of a plan on a machine with `gpus` GPUs.

    The run must start its own Ray cluster.
    """
    if gpus:
        if plan.devices_per_node <= gpus:
            return []
        return [f"num_gpus_per_node: {plan.devices_per_node} is more than the {gpus} GPUs of this machine; lower it"]
    return [problem for engine in plan.inference_roles().values() for problem in _engine_problems(plan, engine)]


def warnings_here(plan: RunPlan) -> list[str]:
    """Return the problems of a plan on this machine, and what could not be checked here.

    Without problems of devices if the plan is for the GPUs of another machine.
    """
    gpus, unchecked = hardware.gpus(), _unchecked_options()
    if not gpus and (hardware.has_gpu_driver() or plan.device_memory_gb is not None):
        return unchecked
    changed = None if gpus else other_blocks(plan)
    return [*unchecked, *machine_problems(plan, gpus), *([changed] if changed else [])]


def _unchecked_options() -> list[str]:
    """Return a warning about engines that are not installed, whose options are therefore not checked."""
    missing = " and ".join(missing_engines())
    if not missing:
        return []
    return [f"strategy_config: options are not checked against {missing}, which this Python lacks; {REMEDY}"]


def other_blocks(plan: RunPlan) -> str | None:
    """Return a warning about engines whose block size is replaced on CPUs, or None if there are none."""
    changed = [
        f"{engine.name}.{OPTIONS}.block_size: {engine.engine_args['block_size']} is not supported on a CPU; the engine"
        f" uses {cpu_block(engine.engine_args)} here"
        for engine in plan.inference_roles().values()
        if engine.engine_args.get("block_size") not in (None, cpu_block(engine.engine_args))
    ]
    return "\n".join(changed) or None


def _engine_problems(plan: RunPlan, engine: RolloutPlan) -> list[str]:
    """Return the problems of an engine on CPUs.

    The options of the engine, its KV cache and the attention of its models are checked.
    """
    if engine.engine_args.get("enable_chunked_prefill"):
        return [f"{engine.name}.{OPTIONS}.enable_chunked_prefill: breaks seeded sampling on a CPU; remove the key"]
    try:
        arguments = resolve_engine_args(
            engine.model,
            max_model_len=engine.max_model_len,
            seed=plan.seed,
            tensor_parallel_size=engine.tp,
            on_cpu=True,
            engine_args=engine.engine_args,
            routes=engine.returns_routes,
        )
    except (ValueError, ModelFilesError) as error:
        return [f"{engine.name}: {error}"]
    problems = []
    models, block = cached_models(engine.model, engine.engine_args), cpu_block(engine.engine_args)
    least = sum(kv_cache_bytes(model, engine.max_model_len, 1, block, engine.tp) for model in models)
    if (cache := arguments["kv_cache_memory_bytes"]) is not None and cache < least:
        problems.append(
            f"{engine.name}.{OPTIONS}.kv_cache_memory_bytes: {cache} bytes are too few for a sequence of"
            f" {engine.max_model_len} tokens, which takes {least}; raise or remove it"
        )
    paths = {engine.name: engine.model.path}
    paths |= {f"{engine.name}.{OPTIONS}.speculative_config.model": draft.path for draft in models[1:]}
    if engine is plan.rollout and plan.validation and plan.validation.evaluate_teacher:
        paths |= {teacher.name: teacher.model.path for teacher in plan.teachers if teacher.model}
    sentences = {_heads(name, path) for name, path in reversed(paths.items())}
    sentences |= {_linear(name, path, engine) for name, path in paths.items()}
    return [*problems, *sorted(filter(None, sentences))]


def _linear(name: str, path: str, engine: RolloutPlan) -> str | None:
    """Return an error for a model whose linear attention vLLM does not support on CPUs, else None."""
    delta = read_model(Path(path)).delta
    if delta is None:
        return None
    if engine.model.dtype != "bf16":
        return (
            f"{name}: vLLM's linear attention on CPUs supports only bf16, and the dtype of {path} is"
            f" {engine.model.dtype}; set dtype: bf16 in its model_args, or use a machine with GPUs"
        )
    widths = {delta.key_width, delta.value_width}
    if len(widths) > 1 or any(width % CPU_WIDTH or width == CPU_WIDTH for width in widths):
        return (
            f"{name}: vLLM's linear attention on CPUs needs keys and values of the same width, which must be a"
            f" multiple of {CPU_WIDTH} and above {CPU_WIDTH}, but {path} has {delta.key_width} and {delta.value_width};"
            " use another model, or a machine with GPUs"
        )
    return None


def _heads(name: str, path: str) -> str | None:
    """Return an error for a model whose head size vLLM does not support on CPUs, else None."""
    info = read_model(Path(path))
    latent = info.latent
    known = cpu_attention.head_sizes(*(cpu_attention.LATENT if latent else cpu_attention.PLAIN))
    size = latent.cached if latent else info.head_dim
    if not known or size in known:
        return None
    sizes = ", ".join(map(str, known))
    if latent:
        return (
            f"{name}: vLLM's latent attention on CPUs supports only kv_lora_rank + qk_rope_head_dim = {sizes}, and"
            f" {path} has {size}; use another model, or a machine with GPUs"
        )
    return (
        f"{name}: vLLM's attention on CPUs cannot compute heads of size {size} (head_dim of {path}); use a model with"
        f" one of {sizes}, or a machine with GPUs"
    )
