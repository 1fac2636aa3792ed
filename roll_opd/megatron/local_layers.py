"""Modules of local layers: RMSNorm for every device, and a dense layer with few kernels for half precision on GPUs.

`DenseLayer` and `PackedSelfAttention` have the same parameters as Megatron's modules. One Triton kernel computes the
norms and the rotation of queries and keys. A second kernel computes SwiGLU (see `triton_kernels`).

Parts of layers in which model families differ from Llama.

`models.families` describes these parts with `Pieces`.

Legend: n packed tokens of this context rank, H local heads, D head width, K kinds of rotary frequencies.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from roll_opd.megatron.packing import PackedSequences
from roll_opd.megatron.rotary import rotary_kinds
from roll_opd.models.families.family_definition import Pieces


class LocalRMSNorm(torch.nn.RMSNorm):
    """RMSNorm that supports sequence parallelism, unlike megatron-core's local norm.

    The weight has the attribute `sequence_parallel`, so Megatron sums its gradient over tensor ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


# frequencies of a pack -> cosines and sines, f32 [n, D/2]
_ANGLES: Any = WeakTensorKeyDictionary()


def fits(config: TransformerConfig) -> bool:
    """Return whether `DenseLayer` and `PackedSelfAttention` support this configuration."""
    plain_attention = not (config.rotary_interleaved or config.attention_output_gate or config.no_rope_freq)
    plain_mlp = config.activation_func is functional.silu and config.gated_linear_unit and not config.add_bias_linear
    return (
        torch.cuda.is_available()
        and config.params_dtype is not torch.float32
        and config.context_parallel_size == 1
        and (config.num_query_groups or 0) >= config.tensor_model_parallel_size
        and config.recompute_granularity != "selective"
        and plain_attention
        and plain_mlp
    )


class DenseLayer(TransformerLayer):
    """Transformer layer over a pack: norm, attention, residual addition, norm, SwiGLU, residual addition."""

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """Skip Megatron's checks for CUDA graphs."""
        return torch.nn.Module.__call__(self, *args, **settings)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, context: Tensor | None = None, **given: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, context). The output is [s, 1, E].

        `given`: includes `packed_seq_params` (the pack) and `rotary_pos_emb` (the rotary frequencies of its tokens).
        """
        pack = {name: given[name] for name in ("rotary_pos_emb", "packed_seq_params")}
        attended, bias = self.self_attention(self.input_layernorm(hidden_states), **pack)
        hidden_states = hidden_states + (attended if bias is None else attended + bias)
        return hidden_states + self._mlp(self.pre_mlp_layernorm(hidden_states)), context

    def _mlp(self, hidden_states: Tensor) -> Tensor:
        from roll_opd.megatron.triton_kernels import SwiGLU

        both, _ = self.mlp.linear_fc1(hidden_states)
        return self.mlp.linear_fc2(SwiGLU.apply(both))[0]


class PackedSelfAttention(SelfAttention):
    """Self-attention over a pack: projection, fused norm and rotation, attention, projection."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, bias) of the output projection. The output is [n, 1, E].

        `rotary_pos_emb`: frequencies, f32 [n, 1, 1, D], one row per token.
        """
        from roll_opd.megatron.triton_kernels import NormAndRotate

        linear: Any = self.linear_qkv
        attend: Any = self.core_attention
        mixed_n1X, _ = linear(hidden_states)
        sizes = (
            self.num_attention_heads_per_partition,
            self.num_query_groups_per_partition,
            self.hidden_size_per_attention_head,
        )
        weights = [getattr(norm, "weight", None) for norm in (self.q_layernorm, self.k_layernorm)]
        query_nHD, key_nGD, value_nGD = NormAndRotate.apply(
            mixed_n1X.flatten(0, 1), *weights, *cos_sin(rotary_pos_emb), sizes, self.config.layernorm_epsilon
        )
        out_nX = attend(query_nHD, key_nGD, value_nGD, None, packed_seq_params=packed_seq_params)
        return self.linear_proj(out_nX[:, None])


def cos_sin(freqs_n11D: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cosines, sines) of a pack, each f32 [n, D/2].

    The result is cached, so it is computed once for all layers.
    """
    if freqs_n11D not in _ANGLES:
        angles = freqs_n11D[:, 0, 0, : freqs_n11D.size(-1) // 2]
        _ANGLES[freqs_n11D] = angles.cos().contiguous(), angles.sin().contiguous()
    return _ANGLES[freqs_n11D]


# tensor with the frequencies of all kinds -> list of tensors, one per kind
_FREQUENCIES: Any = WeakTensorKeyDictionary()


class ZeroCentredRMSNorm(LocalRMSNorm):
    """RMSNorm that multiplies by 1 + weight. It is computed in f32."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normalised `hidden`, in its dtype."""
        scale = 1.0 + self.weight.float()
        return functional.rms_norm(hidden.float(), self.normalized_shape, scale, self.eps).to(hidden.dtype)


class HeadsRMSNorm(LocalRMSNorm):
    """RMSNorm over the queries or keys of all heads together, including the heads of other tensor ranks.

    Every rank has the weights of all heads. Megatron therefore sums the gradient of these weights over the ranks, as
    for other norms of queries and keys.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, heads: int, eps: float = 1e-5) -> None:
        super().__init__(config, heads * hidden_size, eps)

    def forward(self, heads_n1HD: Tensor) -> Tensor:
        """Return the normalised heads of this rank."""
        group = parallel_state.get_tensor_model_parallel_group()
        rank, ranks = group.rank(), group.size()
        wide = heads_n1HD.float()
        squares_n111 = wide.square().sum((-2, -1), keepdim=True)
        if ranks > 1:
            squares_n111 = all_reduce(squares_n111, group=group)
        scale_HD = self.weight.view(ranks, *heads_n1HD.shape[-2:])[rank].float()
        mean_n111 = squares_n111 / self.weight.numel()
        found = wide * torch.rsqrt(mean_n111 + (self.eps or 0.0)) * scale_HD
        return found.to(heads_n1HD.dtype)


class OutputNorm(torch.nn.Module):
    """Norm after attention or MLP, followed by the addition to the residual. It replaces Megatron's addition."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = norm_class(config)(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return the function that adds the normalised output to the residual; there is no dropout."""
        return self._add

    def _add(self, output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        hidden, bias = output
        normalised: Tensor = self.norm(hidden if bias is None else hidden + bias)
        return residual + normalised


class FamilyAttention(SelfAttention):
    """Self-attention with an optional output bias and with the rotary embedding of its layer."""

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        pieces = pieces_of(config)
        if pieces.out_bias:  # Megatron has a single setting for this bias and the biases of the MLP
            config = copy.copy(config)
            config.add_bias_linear = True
        super().__init__(config, *args, **options)
        self._rotary = pieces.rotary[self.layer_number - 1] if pieces.rotary else None
        self._kinds = rotary_kinds(pieces)
        factor: float = getattr(config, "rotary_factors", {}).get(self._rotary, 1.0)
        core: Any = self.core_attention
        core.scale *= factor**2

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Any = None, **given: Any
    ) -> tuple[Tensor, Tensor]:
        """Return (output, bias).

        `rotary_pos_emb` has the frequencies of all K kinds, f32 [n, K, 1, D]. Each layer uses at most one kind.
        """
        if self._rotary is not None:
            frequencies = given.pop("rotary_pos_emb")
            given["rotary_pos_emb"] = of_kind(frequencies, self._kinds.index(self._rotary)) if self._rotary else None
        return super().forward(hidden_states, attention_mask, **given)


class ExpertOutput(RowParallelLinear):
    """Output projection of an expert that has a bias. Megatron's MLP adds the bias in place."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (output, bias). An output that is a view is copied, because autograd forbids changing it in place."""
        output, bias = super().forward(input_)
        return output.clone() if output._is_view() else output, bias


class BiasedExperts(SequentialMLP):
    """Experts with biases. Exactly one expert-tensor rank is supported.

    If there were several ranks, each of them would add the output bias. `check_layout` refuses such a layout.
    """

    def __init__(self, experts: int, config: TransformerConfig, *args: Any, **options: Any) -> None:
        config = copy.copy(config)
        if config.expert_tensor_parallel_size != 1:
            raise ValueError("experts with biases cannot be split over ranks; use expert_tensor_parallel_size 1")
        config.add_bias_linear = True
        super().__init__(experts, config, *args, **options)
        expert: Any
        for expert in self.local_experts:
            # only one tensor rank has this bias: its gradient is not summed over ranks, but counts in the gradient norm
            bias = expert.linear_fc2.bias
            bias.sequence_parallel, bias.tensor_model_parallel = False, True


def pieces_of(config: TransformerConfig) -> Pieces:
    """Return the `Pieces` that describe a model's layers."""
    return getattr(config, "pieces", Pieces())


def of_kind(frequencies_nK1D: Tensor, kind: int) -> Tensor:
    """Return the frequencies of one kind, [n, 1, 1, D].

    All layers get the same tensor, so that the rotations of this tensor are cached.
    """
    if frequencies_nK1D.size(1) == 1:
        return frequencies_nK1D
    if frequencies_nK1D not in _FREQUENCIES:
        _FREQUENCIES[frequencies_nK1D] = [each.contiguous() for each in frequencies_nK1D.split(1, 1)]
    return _FREQUENCIES[frequencies_nK1D][kind]


def norm_class(config: TransformerConfig) -> type[LocalRMSNorm]:
    """Return the class of a model's norms."""
    return ZeroCentredRMSNorm if pieces_of(config).zero_centred_norms else LocalRMSNorm


def query_key_norm(config: TransformerConfig, heads: int) -> Any:
    """Return the layer spec for the norm of queries or keys.

    `heads` is the number of heads on all tensor ranks together.
    """
    if pieces_of(config).query_key_norm == "heads":
        return ModuleSpec(module=HeadsRMSNorm, params={"heads": heads})
    return norm_class(config)


def place_norms(layer: Any, config: TransformerConfig) -> None:
    """Set the norms in the submodules of a layer spec.

    Depending on the model, the norms are before attention and MLP, after attention and MLP, or in both places.
    """
    place = pieces_of(config).norms
    before: Any = IdentityOp if place == "after" else norm_class(config)
    layer.input_layernorm = layer.pre_mlp_layernorm = before
    if place != "before":
        layer.self_attn_bda = layer.mlp_bda = ModuleSpec(module=OutputNorm, params={"config": config})
