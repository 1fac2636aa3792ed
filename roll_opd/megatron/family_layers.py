"""Parts of layers in which model families differ from Llama.

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
from torch import Tensor
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from roll_opd.megatron.local_layers import LocalRMSNorm
from roll_opd.megatron.rotary import rotary_kinds
from roll_opd.models.families.family import Pieces

# tensor with the frequencies of all kinds -> list of tensors, one per kind
_CACHE: Any = WeakTensorKeyDictionary()


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
    if frequencies_nK1D not in _CACHE:
        _CACHE[frequencies_nK1D] = [each.contiguous() for each in frequencies_nK1D.split(1, 1)]
    found: Tensor = _CACHE[frequencies_nK1D][kind]
    return found


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
