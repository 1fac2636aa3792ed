"""Check engine options in `strategy_config` against the option classes of the installed vLLM and Megatron-core.

A subprocess reads the fields of these classes, with their types and bounds. Importing vLLM takes 5 to 20 s, and
importing Megatron-core 2 to 5 s. So the subprocess runs only once per installed version, and its answer is cached as a
JSON file in `~/.cache/roll_opd/`. The planning process itself imports neither engines nor torch.
"""

import fcntl
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Optional, Union, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from roll_opd.base.failures import did_you_mean
from roll_opd.base.paths import user_cache
from roll_opd.base.registry import as_mapping, type_problem


class OptionClass(NamedTuple):
    """Where to find the dataclass that holds the options of an engine."""

    package: str
    module: str  # in the package
    name: str
    bounded: tuple[str, ...] = ()  # modules in the package with pydantic dataclasses, which have bounds of the options


CLASSES = {
    "Megatron": OptionClass("megatron.core", "transformer.transformer_config", "TransformerConfig"),
    "vLLM": OptionClass(
        "vllm",
        "engine.arg_utils",
        "AsyncEngineArgs",
        tuple(f"config.{name}" for name in ("cache", "scheduler", "parallel", "model", "load", "offload")),
    ),
}
FORMAT = 2  # format version of the cache files
TIMEOUT_S = 300
_BOUNDS = (Gt, Ge, Lt, Le)
# the names that may occur in the text of a type
_PLAIN = (int, float, bool, str, type(None), dict, list, tuple, *_BOUNDS)
_NAMES: dict[str, Any] = {kind.__name__: kind for kind in _PLAIN}
_NAMES |= {
    "List": list,
    "Dict": dict,
    "Tuple": tuple,
    "Annotated": Annotated,
    "Any": Any,
    "Literal": Literal,
    "Optional": Optional,
    "Union": Union,
}
_NAMES["__builtins__"] = {}
_PROGRAM = "import sys; sys.path[:] = {path!r}; from roll_opd.models.engine_options import main; main({engines!r})"
_answers: dict[str, dict[str, Any]] = {}  # answers in this process: engine -> encoded fields, or {"error": reason}


def engine_fields(engine: str) -> dict[str, Any] | None:
    """Return {option: type} for an engine, or None if the engine cannot be imported.

    The type is `Any` if the engine itself defines the type.
    """
    files = {name: file for name in CLASSES if (file := _cache_file(name))}
    if engine not in files:
        return None
    found = _answers.get(engine) or _cached(files[engine])
    if found is None:
        with _lock() as is_writable:  # another process may have written the file meanwhile
            cold = [name for name in files if name not in _answers and _cached(files[name]) is None]
            if engine in cold:
                _answers.update(_query(cold, is_writable))
                for name in cold if is_writable else ():
                    _write(files[name], _answers[name])
        found = _answers.get(engine) or _cached(files[engine])
    if not found or "error" in found:
        return None
    return decoded(found)


def missing_engines() -> list[str]:
    """Return the names of the engines that are not installed. Their options cannot be checked."""
    return [name for name in CLASSES if _directory(name) is None]


def _directory(engine: str) -> Path | None:
    """Return the directory of an engine's package, or None if the engine is not installed."""
    package = CLASSES[engine].package
    spec = find_spec(package.partition(".")[0]) and find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def _cache_file(engine: str) -> Path | None:
    """Return the cache file of an engine, or None if the engine is not installed.

    The name of the file contains a hash of the engine's sources.
    """
    _, module, _, bounded = CLASSES[engine]
    root = _directory(engine)
    if root is None:
        return None
    files = [Path(root, *name.split(".")).with_suffix(".py") for name in (module, *bounded)]
    if not files[0].is_file():
        return None  # another version with a different layout
    state = hashlib.sha256(f"{FORMAT} {sys.version_info[:2]}".encode())
    for file in files:
        state.update(file.read_bytes() if file.is_file() else b"")
    return user_cache() / f"{engine.lower()}-options-{state.hexdigest()[:16]}.json"


@contextmanager
def _lock() -> Iterator[bool]:
    """Lock the cache until the end of the `with` block.

    The value of the block is True if the cache is writable.
    """
    with ExitStack() as stack:
        is_writable = False
        with suppress(OSError):
            user_cache().mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((user_cache() / "engine-options.lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
            is_writable = True
        yield is_writable


def _cached(file: Path) -> dict[str, Any] | None:
    """Return the content of a cache file, or None if it is missing or damaged."""
    with suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else None
    return None


def _write(file: Path, answer: dict[str, Any]) -> None:
    """Write an answer to its cache file atomically, unless the answer is a failure."""
    partial = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        if "error" not in answer:
            partial.write_text(json.dumps(answer), encoding="utf-8")
            os.replace(partial, file)


def cache_fields() -> None:
    """Write the cache files that are missing. The set-up calls this after it has imported the engines."""
    with _lock() as is_writable:
        for name in CLASSES if is_writable else ():
            with suppress(Exception):  # a plan tries again, and warns
                if (file := _cache_file(name)) and _cached(file) is None:
                    _write(file, _fields(CLASSES[name]))


def _query(engines: list[str], is_writable: bool) -> dict[str, dict[str, Any]]:
    """Return {engine: encoded fields} from a subprocess that imports the engines."""
    kept = (
        f"kept in {user_cache()}"
        if is_writable
        else f"{user_cache()} is not writable, so each plan reads the options again"
    )
    names = " and ".join(engines)
    print(f"Reading the options of the installed {names} (up to 30 s; {kept}) ...", file=sys.stderr, flush=True)
    program = _PROGRAM.format(path=sys.path, engines={name: tuple(CLASSES[name]) for name in engines})
    command = [sys.executable, "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        found = {name: {"error": reason[-1] if reason else type(error).__name__} for name in engines}
    for name, answer in found.items():
        if "error" in answer:
            why = f"it cannot be imported ({answer['error']})"
            print(f"The options of {name} are not checked: {why}", file=sys.stderr, flush=True)
    return found


def main(engines: Mapping[str, tuple[str, str, str, tuple[str, ...]]]) -> None:
    """Print {engine: encoded fields} as one line of JSON. Runs in the subprocess."""
    from roll_opd.base.torch_imports import broken_companions, hide

    hide(broken_companions())  # as in the processes of a run
    found: dict[str, Any] = {}
    for engine, where in engines.items():
        try:
            found[engine] = _fields(OptionClass(*where))
        except Exception as error:  # modules of an engine may raise anything
            found[engine] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))


def _fields(options: OptionClass) -> dict[str, str]:
    module = importlib.import_module(f"{options.package}.{options.module}")
    bounds: dict[str, dict[type, Any]] = {}
    for name in options.bounded:
        for kind in list(vars(importlib.import_module(f"{options.package}.{name}")).values()):
            for field, info in getattr(kind, "__pydantic_fields__", {}).items():
                own = {type(item): item for item in info.metadata if isinstance(item, _BOUNDS)}
                bounds.setdefault(field, {}).update(own)
    found = {item.name: encoded(item.type) for item in fields(getattr(module, options.name))}
    for name in found.keys() & {field for field, own in bounds.items() if own}:
        if found[name] != "Any":
            found[name] = f"Annotated[{found[name]}, {', '.join(map(repr, bounds[name].values()))}]"
    return found


def encoded(annotation: Any) -> str:
    """Return a type as the text of a Python expression.

    The result is "Any" if a part of the type is not a plain Python type.
    """
    text = annotation.__name__ if type(annotation) is type else repr(annotation).replace("typing.", "")
    try:
        decoded({"option": text})
    except (NameError, SyntaxError, TypeError, AttributeError):
        return "Any"
    return text


def decoded(texts: dict[str, str]) -> dict[str, Any]:
    """Return {option: type} for {option: text of the type}. This is the inverse of `encoded`."""
    return get_type_hints(types.SimpleNamespace(__annotations__=texts), _NAMES, include_extras=True)


_DECIDED = """
    num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels layernorm_epsilon
    normalization num_moe_experts moe_router_topk moe_ffn_hidden_size rotary_base params_dtype pipeline_dtype
    gated_linear_unit activation_func add_qkv_bias add_bias_linear qk_layernorm deterministic_mode
    calculate_per_token_loss hidden_dropout attention_dropout gradient_accumulation_fusion softmax_scale softmax_type
    window_size window_attn_skip_freq layernorm_zero_centered_gamma rotary_interleaved multi_latent_attention
    qk_l2_norm qk_clip attention_output_gate apply_residual_connection_post_layernorm glu_linear_offset
    activation_func_clamp_value no_rope_freq mrope_section moe_layer_freq moe_latent_size
    moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_pre_softmax moe_router_score_function
    moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias
    experimental_attention_variant linear_attention_freq is_hybrid_model init_method init_method_std
    output_layer_init_method embedding_init_method embedding_init_method_std perform_initialization
    init_model_with_meta_device heterogeneous_block_specs test_mode timers grad_scale_func no_sync_func grad_sync_func
    param_sync_func finalize_model_grads_func autocast_dtype enable_autocast
"""
MEGATRON_DECIDED = frozenset(_DECIDED.split())  # set by model_args, the model's config.json or the engine
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # of the engines
# set by the run
VLLM_DECIDED = (
    "model",
    "seed",
    "dtype",
    "tokenizer",
    "logprobs_mode",
    "weight_transfer_config",
    "enable_lora",
    "max_loras",
)
# options of earlier vLLM versions without effect on results
_REMOVED = """
    cuda_graph_sizes max_seq_len_to_capture max_context_len_to_capture full_cuda_graph use_v2_block_manager
    num_scheduler_steps multi_step_stream_outputs scheduler_delay_factor preemption_mode num_lookahead_slots swap_space
    worker_use_ray engine_use_ray disable_log_requests disable_async_output_proc tokenizer_pool_size
    tokenizer_pool_type tokenizer_pool_extra_config ray_workers_use_nsight collect_detailed_traces
    disable_frontend_multiprocessing max_num_partial_prefills max_long_partial_prefills
"""
REMOVED = {"vLLM": frozenset(_REMOVED.split())}
# Options of vLLM that may change the distribution of samples -> how. They need evidence: the engine check
# (`objective.engine_evidence`) tests samples and log-probs of the engine against the student, and ends a run.
ALTERING_OPTIONS = {
    "speculative_config": "speculation draws several tokens together",
    "logits_processors": "the engine changes logits",
    "watermark_config": "the engine changes logits",
    "hf_overrides": "the engine runs another model",
    "quantization": "the engine rounds weights",
    "quantization_config": "the engine rounds weights",
    "kv_cache_dtype": "the engine rounds its KV cache",
}
ROUNDING_OPTIONS = frozenset({"quantization", "quantization_config", "kv_cache_dtype"})  # also need a correction
DRAFT_MODEL = "draft_model"  # speculation with a whole model; other methods have heads that only vLLM can read
# as above, but with a correct engine the distribution differs only by rounding
_COMPUTING = """
    spec_method spec_model spec_tokens
    allow_deprecated_quantization kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype
    enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds use_fp64_gumbel
    hf_config_path model_class_overrides model_impl model_weights load_format config_format model_loader_extra_config
    ignore_patterns trust_remote_code revision code_revision generation_config override_generation_config
    reasoning_config lora_dtype lora_target_modules max_lora_rank
    attention_backend attention_config moe_backend linear_backend kernel_config ir_op_priority compilation_config
    mamba_backend mamba_ssu_algorithm gdn_prefill_backend kda_prefill_backend kda_decode_backend mamba_config
    sparse_indexer_topk_backend engram_config use_replayssm replayssm_buffer_len
    disable_sliding_window disable_cascade_attn swa_bounded_replay kv_sharing_fast_prefill
    enable_prefix_caching enable_mamba_shared_prefix_checkpoint mamba_cache_mode
    decode_context_parallel_size prefill_context_parallel_size enable_expert_parallel enable_ep_weight_filter
    expert_placement_strategy enable_batch_sharded_sampling enable_eplb eplb_config
    worker_cls worker_extension_cls scheduler_cls additional_config distributed_executor_backend
    kv_transfer_config ec_transfer_config ec_manager_config optimization_level performance_mode
"""
CHECKED_OPTIONS = frozenset((*ALTERING_OPTIONS, *_COMPUTING.split()))
# Options with which an engine returns no samples of the student -> reason
REFUSED_OPTIONS = {
    "runner": "an engine of a run generates text",
    "convert": "an engine of a run generates text",
    "pooler_config": "an engine of a run generates text",
    "diffusion_config": "a diffusion model has no log-probs of tokens",
    "enable_prompt_embeds": "prompts are tokens",
    "tokens_only": "stop strings need the engine's tokenizer",
    "skip_tokenizer_init": "stop strings need the engine's tokenizer",
    "tokenizer_mode": "the tokens of a sample are those of the run's tokenizer",
    "tokenizer_revision": "the tokenizer is the one in the role's model directory",
    "structured_outputs_config": "a grammar restricts samples to a part of the student's distribution",
    "reasoning_parser": "responses are tokens, which no parser reads",
    "reasoning_parser_plugin": "responses are tokens, which no parser reads",
    "enable_trace_replay": "replayed traces are not samples of the student",
    "default_mm_loras": "the engine has only the student's weights",
}
ENVIRONMENT = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")  # the name of an environment variable


@cache
def engine_options(engine: str) -> dict[str, Any] | None:
    """Return {option: type} for an engine, or None if the engine is not installed.

    The type is `Any` if the engine itself defines the type.
    """
    return engine_fields(engine)


def no_effect(engine: str, name: str) -> str | None:
    """Return why an option has no effect in the installed engine, or None if it may have an effect."""
    if ENVIRONMENT.fullmatch(name):
        return f"is an environment variable, not an option of {engine}, and has no effect here; move it to system_envs"
    options = engine_options(engine)
    if options is not None and name not in options and name in REMOVED.get(engine, ()):
        return f"the installed {engine} no longer has this option; it has no effect"
    return None


def option_problem(engine: str, name: str, value: Any, also_known: Iterable[str] = ()) -> str | None:
    """Return what is wrong with an engine option.

    The result is None if the option is valid, or if the engine is not installed.

    `also_known`: further valid keys. If `name` is misspelt, the message may suggest one of them.
    """
    if engine == "Megatron" and name in MEGATRON_DECIDED:
        return "is set by the model's config.json, model_args or the engine; remove this option"
    if engine == "vLLM" and name in VLLM_DECIDED:
        return "is set by the run; remove this option"
    if engine == "vLLM" and name in REFUSED_OPTIONS and value:
        return f"is refused: {REFUSED_OPTIONS[name]}; remove this option"
    options = engine_options(engine)
    if options is None:
        return None
    if name in options:
        is_the_engines = options[name] is Any  # the engine makes its own object of a mapping, but not of its text
        return as_mapping(value) if is_the_engines else type_problem(options[name], value)
    what = "unknown engine argument of vLLM" if engine == "vLLM" else f"unknown key for a {engine} strategy"
    return f"{what}; {did_you_mean(name, {*options, *also_known}, 'remove this option')}"
