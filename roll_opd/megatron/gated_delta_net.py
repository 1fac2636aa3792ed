"""Gated DeltaNet layers (arXiv 2412.06464) over packed sequences. They replace attention in Qwen3-Next and Qwen3.5.

Heads are split over tensor ranks. With context parallelism, only the projections are split over context ranks. Each
rank gathers the projections of all ranks, computes the recurrence over complete sequences, and keeps the outputs of its
tokens. Shared prefixes are expanded.

Legend: n packed tokens of this context rank, s of them on this tensor rank (sequence parallelism), X tokens of the
expanded sequences, E hidden size, G local key heads, R value heads per key head, K width of keys, W width of values.

Gated delta rule and causal convolution over packed sequences, with gradients (Gated DeltaNet, arXiv 2412.06464).

The decay of a token is a = exp(log_decay). At the start of each sequence, the state S [K, W] of a head is zero. Each
token updates S and gives an output:

    S <- a S;    S <- S + beta k (v - k S)^T;    output = q S / √K,   with |q| = |k| = 1

Tokens are computed in chunks (section 3.3 of the paper). Solving one triangular system gives the updates of all tokens
of a chunk, so only the states between chunks are computed sequentially. All computation is in f32.

Legend: X tokens of the concatenated sequences, B rows, L tokens of a row, J chunks of C tokens, G key heads, R value
heads per key head, K width of queries and keys, W width of values, Y channels.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
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

from roll_opd.base.installed import is_installed
from roll_opd.megatron.attention import blocks_of_similar_size
from roll_opd.megatron.packing import PackedSequences
from roll_opd.models.families.qwen_hybrid import DeltaSizes

CHUNK = 64  # tokens
SMALLEST_CHUNK = 16  # tokens, for rows of short sequences
MAX_PADDING = 2.0  # largest ratio of padded to real tokens in the rows that are computed together
NORM_EPSILON = 1e-6  # added to the squared L2 norm of queries and keys


@dataclass(frozen=True)
class SequenceRows:
    """Sequences as rows of padded blocks.

    A block is a tuple (tokens, cells, shape):

    - tokens: indices of the tokens of the block.
    - cells: indices of these tokens in the flattened block.
    - shape: number of rows, and number of tokens of a row.
    """

    positions_X: Tensor  # int64, positions of tokens in their sequences
    bounds: Tensor  # int64, boundaries of the sequences that have tokens
    blocks: tuple[tuple[Tensor, Tensor, tuple[int, int]], ...]


def sequence_rows(bounds: Sequence[int], device: torch.device) -> SequenceRows:
    """Arrange the sequences between `bounds` as rows of blocks. Each block has sequences of similar length."""
    ranges = [torch.arange(start, end) for start, end in itertools.pairwise(bounds)]
    filled, blocks = [tokens for tokens in ranges if len(tokens)], []
    for block in blocks_of_similar_size([(len(tokens),) for tokens in filled], MAX_PADDING):
        rows = [filled[number] for number in block]
        size = max(map(len, rows))
        cells = [size * row + torch.arange(len(tokens)) for row, tokens in enumerate(rows)]
        blocks.append((torch.cat(rows).to(device), torch.cat(cells).to(device), (len(rows), size)))
    positions = torch.cat([tokens - start for tokens, start in zip(ranges, bounds, strict=False)])
    filled_bounds = torch.tensor(list(dict.fromkeys(bounds)), device=device)
    return SequenceRows(positions.to(device), filled_bounds, tuple(blocks))


def gated_delta_rule(
    query_XGK: Tensor,
    key_XGK: Tensor,
    value_XGRW: Tensor,
    log_decay_XGR: Tensor,
    beta_XGR: Tensor,
    sequences: SequenceRows,
) -> Tensor:
    """Return the outputs of the gated delta rule, [X, G, R, W], in the dtype of the values.

    Queries and keys are normalised in this function. `log_decay` and `beta` are f32. For half precision on a GPU, the
    kernel of flash-linear-attention is used if it is installed, except in deterministic runs: the kernel chooses its
    tiles by timing, and other tiles give other bits. Otherwise the backward pass recomputes the forward pass of each
    block, so that chunks are not stored.
    """
    given = (query_XGK, key_XGK, value_XGRW, log_decay_XGR, beta_XGR)
    is_half = value_XGRW.is_cuda and value_XGRW.dtype is not torch.float32
    if is_half and not torch.are_deterministic_algorithms_enabled() and (kernel := _fla_kernel()):
        has_gradients = torch.is_grad_enabled() and any(each.requires_grad for each in given)
        if not has_gradients or _fla_trains():
            return _fused(kernel, *given, sequences.bounds)
    out_XGRW = torch.zeros_like(value_XGRW)
    for places_A, cells_A, shape in sequences.blocks:
        compute = partial(_rows, places_A, cells_A, shape)
        if torch.is_grad_enabled():
            found = checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            found = compute(*given)
        out_XGRW = out_XGRW.index_copy(0, places_A, found)
    return out_XGRW


def _rows(places_A: Tensor, cells_A: Tensor, shape: tuple[int, int], *given_X: Tensor) -> Tensor:
    """Return the outputs of the tokens of one block, [A, G, R, W].

    - `places_A`: indices of these tokens.
    - `cells_A`: cells of the block to which the tokens are copied.
    - `shape`: shape of the block.
    """
    padded = []
    for tensor in given_X:
        flat = tensor.new_zeros(shape[0] * shape[1], *tensor.shape[1:])
        padded.append(flat.index_copy(0, cells_A, tensor.index_select(0, places_A)).unflatten(0, shape))
    out_BLGRW = chunked_delta_rule(*padded)
    return out_BLGRW.flatten(0, 1).index_select(0, cells_A).to(given_X[2].dtype)


def chunked_delta_rule(
    query_BLGK: Tensor, key_BLGK: Tensor, value_BLGRW: Tensor, log_decay_BLGR: Tensor, beta_BLGR: Tensor
) -> Tensor:
    """Return the outputs of padded rows, f32 [B, L, G, R, W].

    At the start of each row, the state is zero. Padding with zeros at the end of a row does not change the outputs
    before the padding.
    """
    length = query_BLGK.size(1)
    chunk = min(CHUNK, -(-length // SMALLEST_CHUNK) * SMALLEST_CHUNK)

    def chunked(tensor: Tensor) -> Tensor:
        """Reshape [B, L, G, ..., width] to chunks, f32 [B, G, ..., J, C, width]."""
        pad = -length % chunk
        padded = F.pad(tensor.float(), (0, 0) * (tensor.dim() - 2) + (0, pad))
        return padded.unflatten(1, (-1, chunk)).movedim((1, 2), (-3, -2))

    query, key = (chunked(normalised(x.float()).unsqueeze(3)) for x in (query_BLGK, key_BLGK))  # [B, G, 1, J, C, K]
    query = query * query.size(-1) ** -0.5
    value, beta, decay = chunked(value_BLGRW), chunked(beta_BLGR[..., None]), chunked(log_decay_BLGR[..., None])
    total = decay.cumsum(-2)  # [B, G, R, J, C, 1], from the start of the chunk
    later_CC = torch.ones(chunk, chunk, dtype=torch.bool, device=value.device).triu(1)
    between = (total - total.mT).masked_fill(later_CC, -torch.inf).exp()  # decay from column to row, [..., C, C]
    scores = query @ key.mT * between
    system = beta * (key @ key.mT) * between
    both = torch.cat([beta * value, beta * total.exp() * key], -1)
    # solved with a unit diagonal: the updates for a zero state, and the matrix whose product with the state reduces
    # them
    both = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    update, removed = both.split([value.size(-1), key.size(-1)], -1)
    read, kept = query * total.exp(), key * (total[..., -1:, :] - total).exp()
    carried = total[..., -1:, :].exp()
    state = value.new_zeros(*value.shape[:3], key.size(-1), value.size(-1))
    outputs = []
    for number in range(value.size(3)):
        new = update[:, :, :, number] - removed[:, :, :, number] @ state
        outputs.append(read[:, :, :, number] @ state + scores[:, :, :, number] @ new)
        state = carried[:, :, :, number] * state + kept[:, :, :, number].mT @ new
    return torch.cat(outputs, 3).movedim(3, 1)[:, :length]


def normalised(tensor: Tensor) -> Tensor:
    """Normalise vectors along the last dimension to L2 norm 1."""
    return tensor * (tensor.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()


def causal_convolution(input_XY: Tensor, weight_YC: Tensor, positions_X: Tensor) -> Tensor:
    """Return the depthwise causal convolution followed by SiLU, [X, Y], in the dtype of the input.

    - `weight_YC`: C taps. The last tap is multiplied with the token itself.
    - `positions_X`: position of each token in its sequence, int64. With the positions, no tap reads tokens of the
      previous sequence.
    """
    taps, input_f32 = weight_YC.size(1), input_XY.float()
    total = input_f32 * weight_YC[:, -1].float()
    for back in range(1, taps):
        earlier = F.pad(input_f32, (0, 0, back, 0))[: len(input_f32)]
        tap = weight_YC[:, taps - 1 - back].float()
        total = total + torch.where(positions_X[:, None] >= back, earlier, 0) * tap
    return F.silu(total.to(input_XY.dtype))


@cache
def _fla_kernel() -> Any:
    """Return the kernel of the package flash-linear-attention, or None if the package is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    return chunk_gated_delta_rule


@cache
def _fla_trains() -> bool:
    """Return whether flash-linear-attention has a backward pass with this Triton.

    On Hopper, Triton 3.4 to 3.7.0 compile the Triton kernel wrongly, and the package raises an error unless TileLang is
    installed.
    """
    import triton

    version = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3])
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    return not (is_hopper and (3, 4, 0) <= version < (3, 7, 1)) or is_installed("tilelang")


def _fused(
    kernel: Any,
    query_XGK: Tensor,
    key_XGK: Tensor,
    value_XGRW: Tensor,
    log_decay_XGR: Tensor,
    beta_XGR: Tensor,
    bounds: Tensor,
) -> Tensor:
    """Return the outputs of the flash-linear-attention kernel.

    Before version 0.5, the kernel needs the same number of query, key and value heads, so the heads of queries and keys
    are repeated.
    """
    query, key = (x.repeat_interleave(value_XGRW.size(2), 1)[None] for x in (query_XGK, key_XGK))
    out_1XHW, _ = kernel(
        query,
        key,
        value_XGRW.flatten(1, 2)[None],
        g=log_decay_XGR.flatten(1)[None],
        beta=beta_XGR.flatten(1)[None],
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=bounds,
    )
    return out_1XHW[0].unflatten(1, value_XGRW.shape[1:3])


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
        return self.linear_out(normed.flatten(1)[:, None])

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
    return pack.rows


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
