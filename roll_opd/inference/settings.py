"""What vLLM is started with: the process environment it reads, and the engine arguments, a user's among them.

vLLM reads part of its environment when it is first imported, so this module does not import it at the top.
"""

import difflib
import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from roll_opd.base.frozen import thaw
from roll_opd.config.plan import ModelPlan
from roll_opd.inference.plugin import DIE_WITH_PARENT, PLUGIN_NAME
from roll_opd.models.model_info import read_model

DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
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
EAGER_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}  # vLLM's sampler compiles a part even when all else is eager

KV_CACHE_LIMIT = 2**30  # bytes on a CPU; vLLM's own default takes most of the machine's memory
CPU_BLOCK = 128  # tokens: vLLM's default there
CPU_BLOCKS = 32  # tokens, of which a block there holds a multiple: get_supported_kernel_block_sizes

# engine arguments that the run plan decides, and the plan's word for them
DECIDED_BY_PLAN = {
    "model": "the role's model path",
    "dtype": "the role's dtype",
    "max_model_len": "prompt and response lengths",
    "seed": "the run's seed",
    "tensor_parallel_size": "the number of devices per engine",
    "logprobs_mode": "log-probs are always those of the sampled distribution",
    "weight_transfer_config": "weights always arrive through the weight-transfer plugin",
}


# what vLLM looks for in a config.json, and transformers 5 does not write: without, it takes them for DeepSeek-V2's
DEEPSEEK_V3_ROUTERS = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def prepare_environment(*, eager_on_cpu: bool) -> None:
    """Set what vLLM needs and the user has not set, in this process and so in the engine's processes."""
    for name, value in (ENVIRONMENT | (EAGER_ENVIRONMENT if eager_on_cpu else {})).items():
        os.environ.setdefault(name, value)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        os.environ["VLLM_PLUGINS"] = ",".join(filter(None, [allowed, PLUGIN_NAME]))


def kv_cache_bytes(model: ModelPlan, max_model_len: int, sequences: int, block: int, tp: int) -> int:
    """Return the KV cache of each of `tp` ranks in bytes: for `sequences` of full length, at most `KV_CACHE_LIMIT`.

    Never less than one sequence needs. All of it is written to when an engine starts.
    """
    each_token = int(read_model(Path(model.path)).cached_elements(tp)) * DTYPE_BYTES[model.dtype]
    each_sequence = (-(-max_model_len // block) + 1) * block * each_token  # one block to spare: vLLM keeps some back
    return max(each_sequence, min(sequences * each_sequence, KV_CACHE_LIMIT))


def check_plugin_is_installed() -> None:
    """Raise RuntimeError unless vLLM's other processes will find our plugin."""
    if PLUGIN_NAME not in {point.name for point in entry_points(group="vllm.general_plugins")}:
        raise RuntimeError(
            "the vllm.general_plugins entry point of roll_opd is not installed, so vLLM's engine process "
            "cannot receive weights; install the package (pip install -e . in the repository)"
        )


def check_engine_args(engine_args: Mapping[str, Any], known: set[str]) -> None:
    """Raise ValueError that names every argument that vLLM lacks (with the nearest name) or that the plan decides."""
    problems = []
    for name in engine_args:
        if name in DECIDED_BY_PLAN:
            problems.append(f"{name!r} cannot be set here: it follows from {DECIDED_BY_PLAN[name]}")
        elif name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            problems.append(f"{name!r} is not an engine argument of the installed vLLM; nearest: {nearest[0]!r}")
    if problems:
        raise ValueError("engine_args: " + "; ".join(problems))


def cpu_block(engine_args: Mapping[str, Any]) -> int:
    """Return the tokens of a block without a GPU: those asked for, up to the next multiple that can be computed."""
    return -(-(engine_args.get("block_size") or CPU_BLOCK) // CPU_BLOCKS) * CPU_BLOCKS


def resolve_engine_args(
    model: ModelPlan,
    *,
    max_model_len: int,
    seed: int,
    tensor_parallel_size: int,
    on_cpu: bool,
    engine_args: Mapping[str, Any],
    routes: bool = False,
) -> dict[str, Any]:
    """Return vLLM's engine arguments: the plan's, our defaults, and the user's, which win over the defaults.

    With `routes`, the engine says to which experts it sent each token; on a CPU that is `routes.record_routes`.
    """
    defaults: dict[str, Any] = {"disable_log_stats": True}
    if tensor_parallel_size > 1:
        # in an actor of a placement group vLLM would take Ray's executor, whose ranks wait for devices of their own
        defaults["distributed_executor_backend"] = "mp"
    info = read_model(Path(model.path))
    if info.model_type == "deepseek_v3":
        defaults["hf_overrides"] = dict(DEEPSEEK_V3_ROUTERS)
    if on_cpu:
        defaults["enforce_eager"] = True  # compiling costs minutes and small models gain nothing
        defaults["max_num_seqs"] = 256  # vLLM says 128 here; a step of a small model is mostly overhead
        sequences = engine_args.get("max_num_seqs") or defaults["max_num_seqs"]
        block = cpu_block(engine_args)
        defaults["kv_cache_memory_bytes"] = kv_cache_bytes(model, max_model_len, sequences, block, tensor_parallel_size)
        # a prompt cut in two makes vLLM rewind its seeded generator, which CPU generators cannot: the engine dies
        defaults["enable_chunked_prefill"] = False
        if engine_args.get("enable_chunked_prefill"):
            raise ValueError("engine_args: 'enable_chunked_prefill' breaks seeded sampling on CPU; leave it out")
        if tensor_parallel_size == 1 and os.environ.get(THREADS_BIND, ENVIRONMENT[THREADS_BIND]) == "nobind":
            # vLLM's default worker process exists to bind threads; without it a step is a quarter faster
            defaults["distributed_executor_backend"] = UNIPROC
        if info.latent and "attention_config" not in engine_args:
            # vLLM takes another one where the CPU has AMX, which computes in bf16 alone: f32 weights end the engine
            defaults["attention_backend"] = "CPU_MLA"
    if routes and on_cpu and defaults.get("distributed_executor_backend") != UNIPROC:
        raise ValueError("router_replay on CPUs needs engines of one rank each: use tensor_parallel_size 1")
    decided: dict[str, Any] = {
        "model": model.path,
        "dtype": DTYPE_NAMES[model.dtype],
        "max_model_len": max_model_len,
        "seed": seed,
        "tensor_parallel_size": tensor_parallel_size,
        "logprobs_mode": "processed_logprobs",
    }
    if on_cpu and engine_args.get("block_size"):
        decided["block_size"] = block
    if on_cpu and info.latent:
        decided["compilation_config"] = _without_rotary_kernel(thaw(engine_args.get("compilation_config")))
    if routes and not on_cpu:
        decided["enable_return_routed_experts"] = True
    return {**defaults, **thaw(dict(engine_args)), **decided}


def _without_rotary_kernel(config: Any) -> dict[str, Any]:
    """Return a compilation config without vLLM's rotary kernel for CPUs, which turns a part of a head wrongly.

    Latent attention gives it such parts; what comes out has other log-probs and no error.
    """
    if not isinstance(config, Mapping | None):
        raise ValueError(f"engine_args: 'compilation_config' {config!r} should be a mapping for a model like this one")
    given = dict(config or {})
    return given | {"custom_ops": [*given.get("custom_ops", []), "-rotary_embedding"]}
