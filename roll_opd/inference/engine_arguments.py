"""Environment variables and engine arguments for vLLM, from our defaults, the run plan and the user.

vLLM reads some environment variables at import, so this module does not import vLLM at the top.
"""

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_opd.base.failures import did_you_mean
from roll_opd.base.frozen import thaw
from roll_opd.base.paths import plain_path
from roll_opd.config.plan import LoraPlan, ModelPlan
from roll_opd.inference.plugin import DIE_WITH_PARENT, PLUGIN_NAME
from roll_opd.models.adapter_files import ENGINE_RANKS
from roll_opd.models.engine_options import DRAFT_MODEL, DTYPE_NAMES
from roll_opd.models.model_files import MULTIMODAL, read_json
from roll_opd.models.model_info import read_model

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

THREADS_BIND = "VLLM_CPU_OMP_THREADS_BIND"
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

ENVIRONMENT = {
    DIE_WITH_PARENT: "1",
    THREADS_BIND: "nobind",  # engines share cores with trainers and teachers
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
EAGER_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}  # vLLM's sampler compiles a part even in eager mode

KV_CACHE_LIMIT = 2**30  # bytes on a CPU; vLLM's default takes most of the machine's memory
CPU_BLOCK = 128  # tokens: vLLM's default on CPUs
CPU_BLOCK_MULTIPLE = 32  # tokens: get_supported_kernel_block_sizes

# engine argument -> why it cannot be set
SET_BY_PLAN = {
    "model": "its value is the role's model path",
    "dtype": "its value is the role's dtype",
    "max_model_len": "its value is computed from the prompt and response lengths",
    "seed": "its value is the run's seed",
    "tensor_parallel_size": "its value is the number of devices per engine",
    "logprobs_mode": "vLLM always returns log-probs of the distribution that it samples from",
    "enable_lora": "lora_sync and the student's adapter decide it",
    "max_loras": "an engine holds one adapter, the student's",
    "weight_transfer_config": "weights always arrive through roll_opd's weight-transfer plugin",
}


# keys of config.json that transformers 5 does not write; without them vLLM assumes DeepSeek-V2's routers
DEEPSEEK_V3_ROUTERS = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def prepare_environment(*, eager_on_cpu: bool) -> None:
    """Set vLLM's environment variables for this process and its children. Variables set by the user are kept."""
    for name, value in (ENVIRONMENT | (EAGER_ENVIRONMENT if eager_on_cpu else {})).items():
        os.environ.setdefault(name, value)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        os.environ["VLLM_PLUGINS"] = ",".join(filter(None, [allowed, PLUGIN_NAME]))


def kv_cache_bytes(model: ModelPlan, max_model_len: int, sequences: int, block: int, tp: int) -> int:
    """Return the bytes of KV cache per rank that suffice for `sequences` sequences of full length.

    `tp` is the number of ranks. The size is at most `KV_CACHE_LIMIT`, but at least one sequence always fits. An engine
    writes to the whole cache when it starts, so it occupies this memory from the start.
    """
    info = read_model(Path(model.path))
    each_token = int(info.cached_elements(tp)) * DTYPE_BYTES[model.dtype]
    each_sequence = (-(-max_model_len // block) + 1) * block * each_token  # one more block, because vLLM reserves some
    if info.delta:  # vLLM makes attention blocks as large as the f32 state of a linear layer
        page = 4 * info.delta.state // tp
        blocks = -(-max_model_len * each_token // (info.attention_layers * page)) + 1
        each_sequence = page * info.layers * (blocks + 1)
    return max(each_sequence, min(sequences * each_sequence, KV_CACHE_LIMIT))


def cached_models(model: ModelPlan, engine_args: Mapping[str, Any]) -> list[ModelPlan]:
    """Return the models for which an engine has a KV cache: its own, and the draft model of speculation."""
    config = engine_args.get("speculative_config") or {}
    draft = config.get("model") if config.get("method") in (None, DRAFT_MODEL) else None
    return [model, *([replace(model, path=draft)] if draft and Path(draft).is_dir() else [])]


def check_plugin_is_installed() -> None:
    """Raise RuntimeError unless our plugin's entry point is installed. vLLM's child processes need the entry point."""
    if PLUGIN_NAME not in {point.name for point in entry_points(group="vllm.general_plugins")}:
        raise RuntimeError(
            "the vllm.general_plugins entry point of roll_opd is not installed, so vLLM's engine process "
            "cannot receive weights; install the package (pip install -e . in the repository)"
        )


def check_engine_args(engine_args: Mapping[str, Any], known: set[str]) -> None:
    """Raise ValueError if an argument is unknown to vLLM, or if the plan sets it.

    The message lists all such arguments. For each unknown argument, it names a similar argument of vLLM.
    """
    problems = []
    for name in engine_args:
        if name in SET_BY_PLAN:
            problems.append(f"{name!r} cannot be set here: {SET_BY_PLAN[name]}")
        elif name not in known:
            hint = did_you_mean(name, known, "remove it")
            problems.append(f"{name!r} is not an engine argument of the installed vLLM; {hint}")
    if problems:
        raise ValueError("engine_args: " + "; ".join(problems))


def cpu_block(engine_args: Mapping[str, Any]) -> int:
    """Return the number of tokens per KV-cache block on a CPU.

    The number is the user's `block_size`, or `CPU_BLOCK` by default, rounded up to a number that vLLM supports.
    """
    return -(-(engine_args.get("block_size") or CPU_BLOCK) // CPU_BLOCK_MULTIPLE) * CPU_BLOCK_MULTIPLE


def resolve_engine_args(
    model: ModelPlan,
    *,
    max_model_len: int,
    seed: int,
    tensor_parallel_size: int,
    on_cpu: bool,
    engine_args: Mapping[str, Any],
    routes: bool = False,
    adapter: LoraPlan | None = None,
) -> dict[str, Any]:
    """Return vLLM's engine arguments.

    Arguments from the user override our defaults. Arguments from the plan override both. With `routes`, the engine
    returns the experts of each token; on a CPU, `router_replay.record_routes` records them.
    """
    defaults: dict[str, Any] = {"disable_log_stats": True}
    if tensor_parallel_size > 1:
        # inside a placement group vLLM would choose Ray's executor, and its ranks would wait for separate devices
        defaults["distributed_executor_backend"] = "mp"
    info = read_model(Path(model.path))
    if read_json(info.path / "config.json").get("model_type") in MULTIMODAL:
        defaults["language_model_only"] = True  # the vision encoder is neither used nor updated
    if info.model_type == "deepseek_v3":
        defaults["hf_overrides"] = dict(DEEPSEEK_V3_ROUTERS)
    if on_cpu:
        defaults["enforce_eager"] = True  # compiling takes minutes and small models gain nothing
        defaults["max_num_seqs"] = 256  # vLLM's default is 128; a step of a small model is mostly overhead
        sequences = engine_args.get("max_num_seqs") or defaults["max_num_seqs"]
        block = cpu_block(engine_args)
        defaults["kv_cache_memory_bytes"] = sum(
            kv_cache_bytes(cached, max_model_len, sequences, block, tensor_parallel_size)
            for cached in cached_models(model, engine_args)
        )
        # if a prompt is split, vLLM rewinds its seeded generator; CPU generators do not support this, and the engine
        # dies
        defaults["enable_chunked_prefill"] = False
        if info.delta:  # vLLM's prefix cache for such models needs chunked prefill
            defaults["enable_prefix_caching"] = False
        if engine_args.get("enable_chunked_prefill"):
            raise ValueError(
                "engine_args: 'enable_chunked_prefill' breaks seeded sampling on CPUs; leave this argument out"
            )
        if tensor_parallel_size == 1 and os.environ.get(THREADS_BIND, ENVIRONMENT[THREADS_BIND]) == "nobind":
            # vLLM's separate worker process only binds threads; without this process a step is a quarter faster
            defaults["distributed_executor_backend"] = UNIPROC
        if info.latent and "attention_config" not in engine_args:
            # on CPUs with AMX vLLM chooses a backend that supports only bf16, and f32 weights end the engine
            defaults["attention_backend"] = "CPU_MLA"
    if engine_args.get("speculative_config"):
        defaults["per_request_spec_decode_metrics"] = "summary"
    if routes and on_cpu and defaults.get("distributed_executor_backend") != UNIPROC:
        raise ValueError("router_replay on CPUs needs engines with one rank; use tensor_parallel_size 1")
    from_plan: dict[str, Any] = {
        "model": model.path,
        "dtype": DTYPE_NAMES[model.dtype],
        "max_model_len": max_model_len,
        "seed": seed,
        "tensor_parallel_size": tensor_parallel_size,
        "logprobs_mode": "processed_logprobs",
    }
    if on_cpu and engine_args.get("block_size"):
        from_plan["block_size"] = block
    if on_cpu and info.latent:
        from_plan["compilation_config"] = _without_rotary_kernel(thaw(engine_args.get("compilation_config")))
    if adapter is not None:
        fitting = next(rank for rank in ENGINE_RANKS if adapter.rank <= rank)
        from_plan |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": fitting}
        # vLLM leaves the other layers unchanged. It has one layer for the gates, ups and downs of all experts
        fused = ["experts"] if info.experts and "down_proj" in adapter.targets else []
        from_plan["lora_target_modules"] = [*adapter.targets, *fused]
    if routes and not on_cpu:
        from_plan["enable_return_routed_experts"] = True
    return {**defaults, **thaw(dict(engine_args)), **from_plan}


def _without_rotary_kernel(config: Any) -> dict[str, Any]:
    """Return a compilation config without vLLM's rotary kernel for CPUs.

    This kernel is wrong for models that rotate only a part of each head. With latent attention, the kernel gives wrong
    log-probs without an error.
    """
    if not isinstance(config, Mapping | None):
        raise ValueError(f"engine_args: 'compilation_config' {config!r} should be a mapping for this model")
    given = dict(config or {})
    return given | {"custom_ops": [*given.get("custom_ops", []), "-rotary_embedding"]}


def vllm_arguments(
    model: ModelPlan,
    *,
    engine_args: Mapping[str, Any],
    routes: bool,
    weight_transfer: str,
    sleeps: bool,
    adapter: LoraPlan | None = None,
    **plan: int,
) -> "AsyncEngineArgs":
    """Prepare this process for an engine. Returns vLLM's arguments for the engine (see `resolve_engine_args`)."""
    import torch

    from roll_opd.inference.router_replay import RECORDS_ROUTES

    # not is_available(): it initialises CUDA in this process, and vLLM may fork this process
    on_cpu = torch.cuda.device_count() == 0
    prepare_environment(eager_on_cpu=on_cpu and engine_args.get("enforce_eager", True))
    os.environ[RECORDS_ROUTES] = str(int(routes and on_cpu))  # read by the next engine
    check_plugin_is_installed()
    import vllm.v1.engine.async_llm  # noqa: F401
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform

    check_engine_args(engine_args, {field.name for field in fields(AsyncEngineArgs)})
    on_cpu = current_platform.is_cpu()
    arguments = resolve_engine_args(
        model, on_cpu=on_cpu, engine_args=engine_args, routes=routes, adapter=adapter, **plan
    )
    arguments |= {name: plain_path(arguments[name]) for name in ("model", "tokenizer") if arguments.get(name)}
    arguments["weight_transfer_config"] = {"backend": weight_transfer}
    if sleeps and current_platform.is_sleep_mode_available():
        arguments["enable_sleep_mode"] = True
    return AsyncEngineArgs(**arguments)
