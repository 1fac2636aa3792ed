"""Build a Megatron model from a Hugging Face directory. Its forward pass returns an `OutputHead` instead of logits.

Legend: n packed tokens of this context rank, m scored tokens predicted by it, E hidden size.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, PretrainedConfig

from roll_opd.base.frozen import thaw
from roll_opd.config.plan import Layout, LoraPlan, MegatronPlan, TrainPlan
from roll_opd.megatron.deterministic_ops import VECTOR, exact_silu
from roll_opd.megatron.latent_attention import latent_sizes
from roll_opd.megatron.layer_specs import layer_spec, uses_transformer_engine
from roll_opd.megatron.local_layers import pieces_of
from roll_opd.megatron.lora import Adapters
from roll_opd.megatron.output_head import OutputHead, gradient_buffer
from roll_opd.megatron.packing import PackedBatch
from roll_opd.megatron.parallel import tensor_rank
from roll_opd.megatron.rotary import angles, partial_factor, rotary_frequencies, scores_scaled
from roll_opd.megatron.router import RouterLosses, RouterReplayState
from roll_opd.megatron.vocabulary import VocabShard
from roll_opd.megatron.weights.fused_experts import expert_source
from roll_opd.megatron.weights.model_weights import ModelWeights
from roll_opd.megatron.weights.source import FileSource
from roll_opd.models.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from roll_opd.models.families import FAMILIES
from roll_opd.models.families.family_definition import Pieces
from roll_opd.models.families.qwen_hybrid import delta_sizes
from roll_opd.models.megatron_support import unsupported, usable
from roll_opd.models.model_files import decoder_prefix
from roll_opd.models.model_info import EXPERT_COUNTS, layers_with_experts, read_model

ACTIVATIONS = {"silu": functional.silu, "gelu_tanh": partial(functional.gelu, approximate="tanh")}


def model_pieces(hf_config: PretrainedConfig) -> Pieces:
    """Return the description of a model's layers from its family."""
    return FAMILIES[hf_config.model_type].pieces(hf_config.to_dict())


def transformer_config(
    hf_config: PretrainedConfig, dtype: torch.dtype, layout: Layout, overrides: Mapping[str, Any]
) -> TransformerConfig:
    """Return Megatron's configuration of a model. Settings in `overrides` take precedence."""
    pieces = model_pieces(hf_config)
    settings = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": hf_config.__dict__.get("head_dim"),
        "ffn_hidden_size": hf_config.__dict__.get("intermediate_size") or hf_config.moe_intermediate_size,
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        **_activation(pieces),
        "add_bias_linear": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "variable_seq_lengths": True,  # packs differ in length
        "moe_token_dispatcher_type": "alltoall",  # even for dense models: the default needs packs of equal length
        "batch_p2p_comm": False,
        "overlap_p2p_comm": layout.vpp is not None and layout.pp > 1,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "attention_backend": enabled_attention_backend(),
        "add_qkv_bias": pieces.qkv_bias,
        "qk_layernorm": bool(pieces.query_key_norm),
        "attention_output_gate": pieces.output_gate,
        "hetereogenous_dist_checkpoint": bool(pieces.mixers),  # layers have different parameters
        **_expert_settings(hf_config.to_dict()),
        **FAMILIES[hf_config.model_type].settings,
        **overrides,
    }
    if isinstance(settings.get("attention_backend"), str):
        settings["attention_backend"] = AttnBackend[settings["attention_backend"]]
    return TransformerConfig(**settings)


def _activation(pieces: Pieces) -> dict[str, Any]:
    """Return the settings of the MLP's activation function."""
    if pieces.clipped_swiglu is None:
        return {"activation_func": ACTIVATIONS[pieces.activation]}
    limit, alpha = pieces.clipped_swiglu
    return {
        "activation_func": lambda gate: gate * torch.sigmoid(alpha * gate),
        "activation_func_clamp_value": limit,
        "glu_linear_offset": 1.0,
    }


def has_experts(hf_config: PretrainedConfig) -> bool:
    """Return whether a model is a mixture of experts.

    With several tensor ranks, a mixture of experts needs sequence parallelism.
    """
    return bool(_expert_settings(hf_config.to_dict()))


def _expert_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron's settings for the experts of a model. The result is empty for dense models."""
    experts = next((config[name] for name in EXPERT_COUNTS if config.get(name)), 0)
    has_experts = layers_with_experts(config, config["num_hidden_layers"], experts)
    if not any(has_experts):
        return {}
    settings = {
        "num_moe_experts": experts,
        "moe_layer_freq": [int(has) for has in has_experts],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config.get("moe_intermediate_size") or config["intermediate_size"],
        "moe_shared_expert_intermediate_size": config.get("shared_expert_intermediate_size"),
        # True: probabilities are normalised over all experts; False: over the chosen experts
        "moe_router_pre_softmax": not config.get("norm_topk_prob", True),
        "moe_router_load_balancing_type": "none",
    }
    router = FAMILIES[config["model_type"]].router
    if router == "softmax":
        return settings
    is_biased = router != "groups"
    settings |= {
        "moe_router_pre_softmax": not is_biased,
        "moe_router_score_function": "sigmoid" if is_biased else "softmax",
        "moe_router_enable_expert_bias": is_biased,
        "moe_router_bias_update_rate": 0.0,  # Megatron's default would update the biases
    }
    return settings if router == "biased" else settings | _grouped_experts(config, is_v3=is_biased)


def _grouped_experts(config: Mapping[str, Any], *, is_v3: bool) -> dict[str, Any]:
    """Return Megatron's settings for DeepSeek's shared experts and groups of experts."""
    is_limited = is_v3 or config.get("topk_method") == "group_limited_greedy"
    return {
        "moe_shared_expert_intermediate_size": (config.get("n_shared_experts") or 0) * config["moe_intermediate_size"]
        or None,
        "moe_router_num_groups": config["n_group"] if is_limited else None,
        "moe_router_group_topk": config["topk_group"] if is_limited else None,
        "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
    }


def enabled_attention_backend() -> AttnBackend:
    """Return the attention backend that Transformer Engine's environment variables enable.

    The result is `auto` if no backend is disabled. If several backends remain, the variables of all but the fastest are
    set to 0, because Megatron cannot choose between two.

    Megatron raises an error if these variables contradict its setting. ROLL configurations may set them in
    `system_envs`.
    """
    kinds = ("flash", "fused", "unfused")
    on = [kind for kind in kinds if os.environ.get(f"NVTE_{kind.upper()}_ATTN", "1") != "0"]
    if len(on) == len(kinds):
        return AttnBackend.auto
    for kind in on[1:]:  # keep only the fastest one, because Megatron cannot choose between two
        os.environ[f"NVTE_{kind.upper()}_ATTN"] = "0"
    return AttnBackend[on[0]] if on else AttnBackend.local


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class PackedModel(GPTModel):
    """GPT model over packed sequences that returns the last hidden states. Subclasses add a head."""

    frequencies: Sequence[Tensor]  # rotary frequencies, f32 [rotated width / 2] per kind of layer
    embedding_scale: float  # factor of token embeddings, as in Gemma
    logit_cap: float | None  # bound of the head's logits, as in Gemma 2; see `vocabulary.Columns.cap`
    vocab_size_real: int  # columns without padding; log-probs are normalised over these

    @staticmethod
    def before(hidden: Tensor, batch: PackedBatch) -> Tensor:
        """Select the hidden states that predict the scored tokens, [m, E].

        `hidden`: hidden states of all packed tokens, [n, 1, E].
        """
        return hidden[:, 0].index_select(0, batch.before_m)

    def hidden_states(self, batch: PackedBatch) -> Tensor:
        """Return the hidden states of a pack at the end of this pipeline stage, [n, 1, E]."""
        self.config.routing_replay.set_pack(batch.sequences)  # type: ignore[attr-defined]
        no_mask: Any = None  # `packed_seq_params` bounds the sequences
        return GPTModel.forward(
            self,
            batch.tokens_n[None],
            batch.positions_n[None],
            attention_mask=no_mask,
            packed_seq_params=batch.sequences,
        )

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        decoder_input, rotary_pos_emb, *rest = super()._preprocess(input_ids, position_ids, *args, **kwargs)
        if self.config.num_moe_experts:  # Megatron splits the mask over tensor ranks on the first stage only
            padding_1n = kwargs["packed_seq_params"].padding_n[None]
            if self.config.sequence_parallel:
                padding_1n = padding_1n.chunk(self.config.tensor_model_parallel_size, 1)[tensor_rank()[0]]
            rest[3] = padding_1n
        if decoder_input is not None:
            # Make the tensor contiguous. With the strides of a transposed [1, n, E], torch multiplies row by row: this
            # is slower, and the last bits differ from those of a stage that received a contiguous tensor.
            decoder_input = decoder_input.flatten(0, 1)[:, None]
            if self.embedding_scale != 1.0:  # same rounding as in transformers
                decoder_input = decoder_input * torch.tensor(self.embedding_scale, dtype=decoder_input.dtype).item()
            if torch.is_grad_enabled() and not decoder_input.requires_grad:
                # recomputed layers compute gradients for adapters only if their input requires one
                decoder_input.requires_grad_(self.config.recompute_granularity == "full")
        # one row per token, not per position, because for the rotary kernels a pack is one sequence
        if len(self.frequencies) > 1:
            return decoder_input, angles(position_ids[0], self.frequencies), *rest
        return decoder_input, rotary_pos_emb[position_ids[0]], *rest

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        return hidden_states


class HeadModel(PackedModel):
    """GPT model whose output is an `OutputHead`."""

    # True: the output embedding's gradient is added to Megatron's buffer; False: autograd gets it, for hooks that
    # communicate
    fills_buffer = True
    # called before the output embedding is read: no module's forward hook runs at that point
    before_head: Callable[[Tensor], None] = staticmethod(lambda weight: None)

    def forward(self, batch: PackedBatch, temperature: float) -> Tensor | OutputHead:  # type: ignore[override]
        """Return the output head of the scored tokens.

        On pipeline stages before the last, return hidden states instead.
        """
        hidden = self.hidden_states(batch)
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        weight = self.output_weight()
        self.before_head(weight)
        return OutputHead(
            hidden_mE=self.before(hidden, batch),
            targets_m=batch.targets_m,
            vocab=VocabShard(
                weight,
                temperature,
                self.vocab_size_real,
                parallel_state.get_tensor_model_parallel_group(),
                weight_grad_VE=gradient_buffer(weight) if self.fills_buffer else None,
                logit_cap=self.logit_cap,
            ),
            owners=batch.owners,
        )

    def output_weight(self) -> Tensor:
        """Return this rank's rows of the output embedding. Call this only on the last pipeline stage."""
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight


@dataclass(frozen=True)
class BuiltModel:
    """Model chunks of this rank, their weight mapping and their adapters.

    There is one chunk per virtual pipeline stage.
    """

    chunks: Sequence[torch.nn.Module]
    weights: ModelWeights
    adapters: Adapters | None = None  # None: no LoRA


def build_model(
    plan: MegatronPlan, model_class: type[PackedModel] = HeadModel, *, seed: int, trainable: bool, exact: bool
) -> BuiltModel:
    """Build this rank's model chunks and load their weights. Collective.

    The weights come from `plan.model`, and the adapters from `plan.lora`. Raises ValueError if the model is
    unsupported, or if the weights do not match its configuration.

    Args:
        trainable: if False, all weights are frozen. If there are adapters, only the adapters are trainable.
        exact: make f32 results independent of the layout (see `megatron.deterministic_ops`).
    """
    if problems := unsupported(Path(plan.model.path)):
        raise ValueError("; ".join(problems))
    hf_config = decoder_hf_config(plan.model.path)
    pieces = model_pieces(hf_config)
    dtype = DTYPES[plan.model.dtype]
    exact = exact and dtype is torch.float32
    has_silu = pieces.activation == "silu" and pieces.clipped_swiglu is None
    overrides = {
        **fusions(dtype, plan.layout, has_silu=has_silu),
        **usable(thaw(plan.megatron_args), has_kernels=uses_transformer_engine(dtype)),
        # required for correct log-probs and the global denominator of the losses; not configurable
        "sequence_parallel": plan.layout.tp > 1 and (plan.layout.sequence_parallel or has_experts(hf_config)),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "calculate_per_token_loss": True,
        # Megatron's linear layers need Apex for this fusion; `fused_updates` replaces Apex
        "gradient_accumulation_fusion": is_fused(dtype),
        "fp16": dtype is torch.float16,
        **({"activation_func": exact_silu(hf_config)} if exact and has_silu else {}),
        **scores_scaled(hf_config, pieces),
    }
    config = transformer_config(hf_config, dtype, plan.layout, overrides)
    config.latent = latent_sizes(hf_config)  # type: ignore[attr-defined]
    config.pieces = pieces  # type: ignore[attr-defined]
    config.delta = delta_sizes(hf_config.to_dict())  # type: ignore[attr-defined]
    factors = {kind: factor for kind, (_, factor) in rotary_frequencies(hf_config, pieces).items()}
    config.rotary_factors = factors  # type: ignore[attr-defined]
    config.rotary_factor = partial_factor(hf_config, pieces)  # type: ignore[attr-defined]
    config.router_losses = RouterLosses()  # type: ignore[attr-defined]
    config.routing_replay = RouterReplayState()  # type: ignore[attr-defined]
    lora = plan.lora if isinstance(plan, TrainPlan) else None
    padding = VECTOR * plan.layout.tp
    padded_vocab = -(-hf_config.vocab_size // padding) * padding
    weights = ModelWeights(hf_config, config, padded_vocab, decoder_prefix(read_model(Path(plan.model.path)).tensors))
    spec = partial(layer_spec, config, exact=exact, has_adapters=lora is not None)
    chunks: list[torch.nn.Module] = [
        _build_chunk(model_class, weights, hf_config, stage, plan.vocab_size, spec)
        for stage in range(plan.layout.vpp or 1)
    ]
    for chunk in chunks:
        # Megatron allocates the weights of routers and the gates of shared experts on the CPU
        chunk.to(torch.cuda.current_device())
        chunk.requires_grad_(trainable and lora is None)
    with expert_source(Path(plan.model.path)) as files:
        weights.load(chunks, files)
        adapters = _adapters(lora, chunks, weights, files, seed) if lora else None
    if dtype is not torch.float32:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    return BuiltModel(chunks, weights, adapters)


def decoder_hf_config(path: str) -> PretrainedConfig:
    """Return the decoder's configuration from a model directory.

    If the model is multimodal, this is the configuration of its text model.
    """
    whole = AutoConfig.from_pretrained(path)
    found: PretrainedConfig = whole.get_text_config()
    found.tie_word_embeddings = bool(whole.tie_word_embeddings or found.tie_word_embeddings)
    return found


def fusions(dtype: torch.dtype, layout: Layout, *, has_silu: bool = True) -> dict[str, bool]:
    """Return the defaults of Megatron's fusion options.

    The result is empty in f32 and on a CPU. On a CPU, torch would compile the fusions together with the calls that the
    module `cpu_port` replaces. `bias_dropout_fusion` stays off, because there are neither biases nor dropout.

    `has_silu`: whether the activation is plain SiLU. Megatron has no fused activation otherwise.
    """
    if dtype is torch.float32 or not torch.cuda.is_available():
        return {}
    # with context parallelism Transformer Engine would recompute positions
    rope = uses_transformer_engine(dtype) and layout.cp == 1
    return {"bias_activation_fusion": has_silu, "apply_rope_fusion": rope}


def is_fused(dtype: torch.dtype) -> bool:
    """Return whether matrix products also accumulate the gradients of weights.

    This is the case in local layers, in half precision on a GPU.
    """
    return dtype is not torch.float32 and torch.cuda.is_available() and not uses_transformer_engine(dtype)


def _adapters(
    lora: LoraPlan, chunks: Sequence[torch.nn.Module], weights: ModelWeights, files: FileSource, seed: int
) -> Adapters:
    adapters = Adapters(weights.linear_layers(chunks, lora.targets, files), lora, weights.sizes)
    if lora.path is None:
        adapters.initialise(seed)
    else:
        file = Path(lora.path) / ADAPTER_WEIGHTS
        adapters.load(load_file(file), str(file))
    return adapters


def _build_chunk(
    model_class: type[PackedModel],
    weights: ModelWeights,
    hf_config: PretrainedConfig,
    stage: int,
    vocab_size: int | None,
    spec: Callable[[int | None], Any],
) -> PackedModel:
    config = weights.config
    virtual = config.virtual_pipeline_model_parallel_size is not None
    vp_stage = stage if virtual else None
    model = model_class(
        config=config,
        transformer_layer_spec=spec(vp_stage),
        vocab_size=weights.padded_vocab,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=not virtual, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=not virtual, vp_stage=vp_stage),
        share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings),
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
    if config.num_moe_experts and config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
        # with one expert rank Megatron assumes experts sharded like other layers and does not reduce over replicas
        for layer in (module for module in model.modules() if isinstance(module, MoELayer)):
            experts: Any = layer.experts
            for parameter in experts.parameters():
                parameter.allreduce = False
    model.vocab_size_real = min(hf_config.vocab_size, vocab_size or hf_config.vocab_size)
    pieces = pieces_of(config)
    model.embedding_scale, model.logit_cap = pieces.embedding_scale, pieces.logit_cap
    frequencies = rotary_frequencies(hf_config, pieces)
    model.frequencies = tuple(each.to(torch.cuda.current_device()) for each, _ in frequencies.values())
    model.rotary_pos_emb.inv_freq = model.frequencies[0]
    return model


def unwrapped(module: torch.nn.Module) -> PackedModel:
    """Return the model inside Megatron's wrappers."""
    inner: Any = module
    while isinstance(inner, DistributedDataParallel | Float16Module):
        inner = inner.module
    assert isinstance(inner, PackedModel)
    return inner
