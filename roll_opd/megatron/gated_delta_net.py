"""Gated DeltaNet layers (arXiv 2412.06464) over packed sequences. They replace attention in Qwen3-Next and Qwen3.5.

Heads are split over tensor ranks. With context parallelism, only the projections are split over context ranks. Each
rank gathers the projections of all ranks, computes the recurrence over complete sequences, and keeps the outputs of its
tokens. Shared prefixes are expanded.

Legend: n packed tokens of this context rank, s of them on this tensor rank (sequence parallelism), X tokens of the
expanded sequences, E hidden size, G local key heads, R value heads per key head, K width of keys, W width of values.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from roll_opd.megatron.delta_rule import SequenceRows, causal_convolution, gated_delta_rule, sequence_rows
from roll_opd.megatron.packing import PackedSequences
from roll_opd.models.delta_sizes import DeltaSizes


def gated_delta_net(linear_out: Any) -> ModuleSpec:
    """Return the module spec of a Gated DeltaNet with an output projection of class `linear_out`."""
    return ModuleSpec(module=GatedDeltaNet, params={"linear_out": linear_out})


class GatedNorm(torch.nn.Module):
    """RMSNorm over each head, multiplied by SiLU of a gate. It is computed in f32, as in transformers."""

    def __init__(self, width: int, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=dtype, device=torch.cuda.current_device()))

    def forward(self, input_nHW: Tensor, gate_nHW: Tensor) -> Tensor:
        """Return the normalised and gated heads, [n, H, W], in the dtype of the input."""
        # each tensor rank has the gradient from its heads; the weight's gradient is the sum over tensor ranks
        weight_W = copy_to_tensor_model_parallel_region(self.weight)
        normed = F.rms_norm(input_nHW.float(), self.weight.shape, eps=self.epsilon).to(input_nHW.dtype)
        return (weight_W * normed * F.silu(gate_nHW.float())).to(input_nHW.dtype)


class GatedDeltaNet(MegatronModule):
    """Gated DeltaNet that replaces a layer's `self_attention`. Its sizes are in `config.delta`."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, linear_out: Any, attn_mask_type: Any = None, **groups: Any
    ) -> None:
        super().__init__(config)
        sizes: DeltaSizes = config.delta  # type: ignore[attr-defined]
        self.sizes, tp = sizes, config.tensor_model_parallel_size
        self.local_heads = sizes.key_heads // tp
        options: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        self.linear_in = ColumnParallelLinear(
            config.hidden_size,
            sizes.projected,
            **options,
            gather_output=False,
            skip_bias_add=False,
        )
        self.convolution = self._split_parameter(sum(sizes.channels) // tp, sizes.taps)
        self.log_rates = self._split_parameter(sizes.value_heads // tp)
        self.time_bias = self._split_parameter(sizes.value_heads // tp)
        self.gated_norm = GatedNorm(sizes.value_width, config.layernorm_epsilon, config.params_dtype)
        self.linear_out = linear_out(
            sizes.values, config.hidden_size, **options, input_is_parallel=True, skip_bias_add=True
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron's sharded state dict, which describes how this module's parameters are split."""
        found: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        split = {name: parameter for name, parameter in self.named_parameters(recurse=False)}
        axes = dict.fromkeys(split, 0)
        return found | make_sharded_tensors_for_checkpoint(split, prefix, axes, sharded_offsets)

    def _split_parameter(self, *shape: int) -> torch.nn.Parameter:
        """Return a parameter whose first dimension is split over tensor ranks."""
        device = torch.cuda.current_device()
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=self.config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        return parameter

    def forward(
        self,
        hidden_s1E: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, bias). The output is [s, 1, E]."""
        pack, groups = packed_seq_params, self.local_heads
        query, key, value, gate, beta, decay = (
            self.linear_in(hidden_s1E)[0][:, 0].unflatten(-1, (groups, -1)).split(self.sizes.of_key_head, -1)
        )
        mixed_nX = torch.cat([part.flatten(1) for part in (query, key, value, beta, decay)], -1)
        mixed = _expanded(mixed_nX, pack)
        channels = self.convolution.size(0)
        qkv_XY, betas_and_decays = mixed[:, :channels], mixed[:, channels:]
        out_XGRW = self._recurrence(qkv_XY, betas_and_decays, _rows_of(pack))
        out_nHW = _own(out_XGRW, pack).flatten(1, 2)
        normed = self.gated_norm(out_nHW, gate.reshape(out_nHW.shape))
        output: tuple[Tensor, Tensor | None] = self.linear_out(normed.flatten(1)[:, None])
        return output

    def _recurrence(self, qkv_XY: Tensor, betas_and_decays: Tensor, sequences: SequenceRows) -> Tensor:
        """Return the outputs of the recurrence over complete sequences, [X, G, R, W]."""
        sizes, groups = self.sizes, self.local_heads
        convolve: Any = causal_convolution
        if torch.is_grad_enabled():  # without recomputation, the input of each tap would be kept in f32
            convolve = partial(checkpoint, causal_convolution, use_reentrant=False, preserve_rng_state=False)
        # grouped by key head: the shards of all tensor ranks in order are the parameter of a single rank
        taps = self.convolution.unflatten(0, (groups, -1)).split(sizes.of_key_head[:3], 1)
        taps_YC = torch.cat([part.flatten(0, 1) for part in taps])
        mixed_XY = convolve(qkv_XY, taps_YC, sequences.positions_X)
        query, key, value = mixed_XY.split([size * groups // sizes.key_heads for size in sizes.channels], -1)
        beta_XGR, decay_XGR = (x.float().unflatten(-1, (groups, -1)) for x in betas_and_decays.chunk(2, -1))
        rates, bias = (x.float().unflatten(0, (groups, -1)) for x in (self.log_rates, self.time_bias))
        return gated_delta_rule(
            query.unflatten(-1, (groups, -1)),
            key.unflatten(-1, (groups, -1)),
            value.unflatten(-1, (groups, sizes.each, -1)),
            -rates.exp() * F.softplus(decay_XGR + bias),
            beta_XGR.sigmoid(),
            sequences,
        )


def _rows_of(pack: PackedSequences) -> SequenceRows:
    """Return the rows of a pack. The first layer creates the rows, and all layers share them."""
    if pack.rows is None:
        assert pack.padding_n is not None
        pack.rows = sequence_rows(pack.bounds, pack.padding_n.device)
    rows: SequenceRows = pack.rows
    return rows


def _expanded(tensor_nY: Tensor, pack: PackedSequences) -> Tensor:
    """Gather the tokens of all context ranks. Returns the expanded sequences, [X, Y].

    The backward pass sums the gradient over the context ranks.
    """
    if pack.context.ranks > 1:
        tensor_nY = gather_from_sequence_parallel_region(tensor_nY, group=pack.context.group)
    return tensor_nY if pack.places_X is None else tensor_nY.index_select(0, pack.places_X)


def _own(tensor_X: Tensor, pack: PackedSequences) -> Tensor:
    """Select this context rank's n tokens from the tokens of the expanded sequences."""
    if pack.cells_N is None:
        return tensor_X
    assert pack.padding_n is not None
    return tensor_X.index_select(0, pack.cells_N[pack.first : pack.first + len(pack.padding_n)])
