"""Validate engine options against the sources of the installed vLLM and Megatron-core, without importing them.

`strategy_config` is passed through to the engine. Its names, and its values where the annotation can be evaluated, are
checked against the engine's dataclasses; importing the engines would take seconds.
"""

import ast
import copy
import re
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from roll_opd.base.failures import nearest
from roll_opd.base.registry import type_problem

# engine -> (package, file, dataclass), base classes first
DATACLASSES = {
    "Megatron": (
        ("megatron.core", "model_parallel_config.py", "ModelParallelConfig"),
        ("megatron.core", "transformer/transformer_config.py", "TransformerConfig"),
    ),
    "vLLM": (("vllm", "engine/arg_utils.py", "EngineArgs"), ("vllm", "engine/arg_utils.py", "AsyncEngineArgs")),
}
# vLLM's config modules with type aliases and bounds of the arguments
VLLM_FIELDS = ("cache", "scheduler", "parallel", "model", "load", "offload")
_BOUNDS = ("ge", "gt", "le", "lt")
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
VLLM_DECIDED = ("model", "seed", "dtype", "tokenizer", "logprobs_mode", "weight_transfer_config")  # set by the run
# options of earlier vLLM versions without effect on results
_REMOVED = """
    cuda_graph_sizes max_seq_len_to_capture max_context_len_to_capture full_cuda_graph use_v2_block_manager
    num_scheduler_steps multi_step_stream_outputs scheduler_delay_factor preemption_mode num_lookahead_slots swap_space
    worker_use_ray engine_use_ray disable_log_requests disable_async_output_proc tokenizer_pool_size
    tokenizer_pool_type tokenizer_pool_extra_config ray_workers_use_nsight collect_detailed_traces
    disable_frontend_multiprocessing max_num_partial_prefills max_long_partial_prefills
"""
REMOVED = {"vLLM": frozenset(_REMOVED.split())}
ENVIRONMENT = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")  # the name of an environment variable
# names that an evaluated annotation may use; with others, any value is accepted
_PLAIN = {kind.__name__: kind for kind in (int, float, bool, str, dict, list, tuple)}
_TYPING = {name: getattr(typing, name) for name in ("Any", "Optional", "Union", "Literal", "Dict", "List", "Tuple")}


@cache
def engine_options(engine: str) -> dict[str, Any] | None:
    """Return option -> type (Any if it cannot be evaluated); None if the engine's options are not found."""
    options: dict[str, Any] = {}
    aliases, bounds = _vllm_fields() if engine == "vLLM" else ({}, {})
    for package, file, name in DATACLASSES[engine]:
        spec = find_spec(package.partition(".")[0]) and find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            return None
        source = Path(next(iter(spec.submodule_search_locations))) / file
        tree = ast.parse(source.read_text(encoding="utf-8") if source.is_file() else "")
        found = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
        if not found:
            return None  # another version with a different layout
        for node in found[0].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                options[node.target.id] = _evaluated(node.annotation, aliases)
    bounded = {name: bounds[name] for name in options.keys() & bounds.keys() if options[name] is not Any}
    return options | {name: Annotated[options[name], _bounds(limits)] for name, limits in bounded.items()}


def _bounds(limits: Mapping[str, float]) -> Any:
    """Return the bounds `gt`, `ge`, `lt` and `le` as a pydantic Field."""
    return Field(gt=limits.get("gt"), ge=limits.get("ge"), lt=limits.get("lt"), le=limits.get("le"))


def _vllm_fields() -> tuple[dict[str, ast.expr], dict[str, dict[str, float]]]:
    """Return (type alias -> annotation, option -> bounds) of vLLM's config modules."""
    aliases: dict[str, ast.expr] = {}
    bounds: dict[str, dict[str, float]] = {}
    spec = find_spec("vllm")
    places = spec.submodule_search_locations if spec else None
    for module in VLLM_FIELDS if places else ():
        source = Path(next(iter(places or ()))) / "config" / f"{module}.py"
        tree = ast.parse(source.read_text(encoding="utf-8") if source.is_file() else "")
        for node in ast.walk(tree):
            match node:
                case ast.Assign(
                    targets=[ast.Name(id=name)], value=ast.Subscript(value=ast.Name(id="Literal")) as value
                ):
                    aliases[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(func=ast.Name(id="Field"), keywords=given)):
                    bounds[name] = {item.arg: ast.literal_eval(item.value) for item in given if item.arg in _BOUNDS}
    return aliases, {name: limits for name, limits in bounds.items() if limits}


class _Resolved(ast.NodeTransformer):
    """Replaces type aliases by their annotations."""

    def __init__(self, aliases: Mapping[str, ast.expr]) -> None:
        self._aliases = aliases

    def visit_Name(self, node: ast.Name) -> ast.expr:
        alias = self._aliases.get(node.id)
        return node if alias is None else self.visit(copy.deepcopy(alias))


def _evaluated(annotation: ast.expr, aliases: Mapping[str, ast.expr]) -> Any:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    annotation = _Resolved(aliases).visit(annotation)
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    if any(isinstance(node, ast.Attribute | ast.Call) for node in ast.walk(annotation)):
        return Any
    if not names <= {*_PLAIN, *_TYPING}:
        return Any
    return eval(ast.unparse(annotation), {"__builtins__": {}, **_PLAIN, **_TYPING})


def no_effect(engine: str, name: str) -> str | None:
    """Return why an option has no effect in the installed engine; None if it may have one."""
    if ENVIRONMENT.fullmatch(name):
        return f"is an environment variable, not an option of {engine}, and has no effect here; move it to system_envs"
    options = engine_options(engine)
    if options is not None and name not in options and name in REMOVED.get(engine, ()):
        return f"the installed {engine} no longer has this option; it has no effect"
    return None


def option_problem(engine: str, name: str, value: Any, also_known: Iterable[str] = ()) -> str | None:
    """Return the problem of an engine option; None without one, or if the engine is not installed.

    `also_known` are other valid keys, for spelling hints.
    """
    if engine == "Megatron" and name in MEGATRON_DECIDED:
        return "is set by the model's config.json, model_args or the engine; remove it"
    if engine == "vLLM" and name in VLLM_DECIDED:
        return "is set by the run; remove it"
    options = engine_options(engine)
    if options is None:
        return None
    if name in options:
        return type_problem(options[name], value)
    near = nearest(name, {*options, *also_known})
    what = "unknown engine argument of vLLM" if engine == "vLLM" else f"unknown key for a {engine} strategy"
    return f"{what}; {f'did you mean {near!r}?' if near else 'remove it'}"
