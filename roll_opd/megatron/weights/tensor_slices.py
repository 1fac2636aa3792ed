"""How the values of Hugging Face tensors are laid out in Megatron's parameters, over the tensor ranks.

A `RankLayout` describes one parameter. Everything else follows from it: which intervals of a tensor a rank reads, how
it arranges them into its parameter, which intervals its parameter contains, and how the parameters of all ranks are
joined to the full tensors. Of Gated DeltaNet and gated attention, key heads are split equally over the ranks, and each
rank also has the value heads that belong to its key heads.

Legend: a region is a run of consecutive rows of a tensor; rows are along the split dimension.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, Protocol

import torch
from torch import Tensor

from roll_opd.models.families.parameter_names import Slicing
from roll_opd.models.families.qwen_hybrid import DeltaSizes

Interval = tuple[int, int]  # first row and end


class SliceSource(Protocol):
    """Source of full tensors by Hugging Face name, from which slices can be read."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`."""
        ...

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Return a slice of tensor `name`, from `start` to `stop` along dimension `dim`.

        `dim`: 0 or 1.
        """
        ...


@dataclass(frozen=True)
class SliceSizes:
    """Sizes of a model that determine how its tensors are sliced."""

    heads: int
    kv_heads: int
    vocab: int  # rows of the embedding without padding
    padded_vocab: int
    delta: DeltaSizes | None = None  # None: no Gated DeltaNet layers


@dataclass(frozen=True)
class RankLayout:
    """Layout of Hugging Face tensors in a parameter that is split over tensor ranks.

    Each region of a tensor is split into `groups` equal parts. A group of the parameter has its part of each region,
    in the order of the regions. The groups are split equally over the ranks, in order.
    """

    ranks: int
    groups: int
    regions: tuple[tuple[int, ...], ...]  # of each tensor, of each of its regions: rows of a group
    # the first region consists of two kinds of pieces that alternate; in the parameter, all pieces of the first kind
    # come first. Rows of a piece; 0: no such region
    alternating: int = 0
    padding: int = 0  # rows at the end of the parameter that belong to no tensor

    def rows(self, tensor: int) -> int:
        """Return the rows of a tensor."""
        return self.groups * sum(self.regions[tensor]) - self.padding

    def intervals(self, tensor: int, rank: int) -> list[Interval]:
        """Return the rows of a tensor that a rank has, one interval for each region."""
        found, start, end = [], 0, self.rows(tensor)
        for each in self.regions[tensor]:
            bounds = (start + self.groups * number // self.ranks * each for number in (rank, rank + 1))
            first, last = (min(bound, end) for bound in bounds)
            found.append((first, last))
            start += self.groups * each
        return found

    def arrange(self, shares: Sequence[Tensor], dim: int) -> Tensor:
        """Return a rank's parameter without padding. `shares`: of each tensor, its intervals of this rank, joined."""
        if not self.alternating and list(map(len, self.regions)) == [1]:
            return shares[0]
        local, pieces = self.groups // self.ranks, []
        for share, each in zip(shares, self.regions, strict=True):
            regions = share.split([local * rows for rows in each], dim)
            pieces += [region.unflatten(dim, (local, -1)) for region in regions]
        if self.alternating:
            pairs = pieces[0].unflatten(dim + 1, (-1, 2, self.alternating))
            pieces[0] = pairs.transpose(dim + 1, dim + 2).flatten(dim + 1, dim + 3)
        return torch.cat(pieces, dim + 1).flatten(dim, dim + 1)

    def intervals_of(self, parameters: Sequence[Tensor], dim: int) -> list[list[list[Tensor]]]:
        """Return, of each tensor, of each of its regions, the interval of each given rank. Inverse of `arrange`."""
        if not self.alternating and list(map(len, self.regions)) == [1]:
            return [[list(parameters)]]
        widths, local = list(chain.from_iterable(self.regions)), self.groups // self.ranks
        by_rank = [list(one.unflatten(dim, (local, -1)).split(widths, dim + 1)) for one in parameters]
        if self.alternating:
            for pieces in by_rank:
                kinds = pieces[0].unflatten(dim + 1, (2, -1, self.alternating))
                pieces[0] = kinds.transpose(dim + 1, dim + 2).flatten(dim + 1, dim + 3)
        regions = ([piece.flatten(dim, dim + 1) for piece in pieces] for pieces in zip(*by_rank, strict=True))
        return [[next(regions) for _ in each] for each in self.regions]


@dataclass(frozen=True)
class RowSplit:
    """Which rows of a full tensor each tensor rank has."""

    dim: int | None  # the split dimension; None: every rank has the whole tensor
    intervals: tuple[tuple[Interval, ...], ...] = ()  # of each rank, one for each region of the tensor

    @property
    def is_even(self) -> bool:
        """Whether each rank has one interval, and all intervals have the same length."""
        lengths = {tuple(end - start for start, end in of_rank) for of_rank in self.intervals}
        return len(lengths) == 1 and len(lengths.pop()) == 1


Form = Literal["", "transposed", "without dimension 1"]


@dataclass(frozen=True)
class TensorSlice:
    """Kind of layout. `name`: see `SLICINGS`."""

    name: Slicing
    dim: int | None  # split dimension of the tensors (0 for vectors); None: replicated
    form: Form = ""  # of the parameter, compared with its Hugging Face tensor
    takes_adapters: bool = True

    def layout(self, rows: int, ranks: int, sizes: SliceSizes) -> RankLayout:
        """Return the layout of a parameter. `rows`: rows of the parameters of all ranks, with padding."""
        each = rows // ranks
        if self.name == "vocabulary":
            return RankLayout(ranks, ranks, ((each,),), padding=rows - sizes.vocab)
        if self.name == "gate_up":
            return RankLayout(ranks, ranks, ((each // 2,), (each // 2,)))
        if self.name == "fused_gate_up":
            return RankLayout(ranks, ranks, ((each // 2, each // 2),))
        if self.name == "interleaved_gate_up":
            return RankLayout(ranks, ranks, ((each,),), alternating=1)
        if self.name in DELTA_SECTIONS:
            assert sizes.delta is not None
            of_head = sizes.delta.of_key_head
            sections = DELTA_SECTIONS[self.name]
            regions = tuple(tuple(sum(of_head[part] for part in one) for one in tensor) for tensor in sections)
            return RankLayout(ranks, sizes.delta.key_heads, regions)
        if self.name in ("qkv", "fused_qkv", "gated_qkv"):
            queries = sizes.heads // sizes.kv_heads * (2 if self.name == "gated_qkv" else 1)
            width = rows // sizes.kv_heads // (queries + 2)
            of_group = queries * width, width, width
            separate = self.name != "fused_qkv"
            regions = tuple((one,) for one in of_group) if separate else (of_group,)
            return RankLayout(ranks, sizes.kv_heads, regions, width if self.name == "gated_qkv" else 0)
        return RankLayout(ranks, ranks, ((each,),))

    def arrange(self, shares: Sequence[Tensor], ranks: int, sizes: SliceSizes, dim: int = 0) -> Tensor:
        """Join this rank's slices of an adapter's output into that of the layer.

        Args:
            shares: one slice per Hugging Face tensor.
            dim: the dimension of the parameter's rows.
        """
        if not self.takes_adapters:
            raise ValueError(f"LoRA adapters are not supported for layers of the layout {self.name}")
        if len(shares) == 1:
            return shares[0]
        return self.layout(ranks * sum(share.size(dim) for share in shares), ranks, sizes).arrange(shares, dim)

    def read(self, source: SliceSource, names: Sequence[str], rank: int, ranks: int, sizes: SliceSizes) -> Tensor:
        """Read the parameter of tensor rank `rank` from Hugging Face tensors.

        `ranks`: number of tensor ranks.
        """
        shapes = [source.shape(name) for name in names]
        dim = self._dim(len(shapes[0]))
        if dim is None:
            return self._as_parameter(source.part(names[0], 0, 0, shapes[0][0]))
        of_vocab = self.name == "vocabulary"
        if of_vocab and shapes[0][0] != sizes.vocab:
            raise ValueError(
                f"{names[0]} has {shapes[0][0]} rows, but vocab_size in config.json is {sizes.vocab};"
                " use the model's config.json"
            )
        rows = sizes.padded_vocab if of_vocab else sum(shape[dim] for shape in shapes)
        layout = self.layout(rows, ranks, sizes)
        shares = []
        for number, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            _check(name, dim, shape[dim], layout, number)
            pieces = [source.part(name, dim, *interval) for interval in layout.intervals(number, rank)]
            shares.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim))
        part = layout.arrange(shares, dim)
        if lacking := rows // ranks - part.size(dim):
            part = torch.cat([part, part.new_zeros(lacking, *part.shape[1:])])
        return self._as_parameter(part)

    def join(self, parameters: Sequence[Tensor], sizes: SliceSizes, lead: int = 0) -> list[Tensor]:
        """Return the full Hugging Face tensors, one per name, from the parameters of all ranks.

        With one rank, they may share memory with its parameter. `lead`: leading dimensions of a stack of parameters.
        """
        given = [self._as_tensor(parameter, lead) for parameter in parameters]
        dim = self._dim(given[0].dim() - lead)
        if dim is None:
            return [given[0]]
        at, ranks = dim + lead, len(given)
        layout = self.layout(ranks * given[0].size(at), ranks, sizes)
        found = []
        for regions in layout.intervals_of(given, at):
            pieces = list(chain.from_iterable(regions))
            found.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, at))
        return [tensor.narrow(at, 0, layout.rows(0)) for tensor in found] if layout.padding else found

    def shares(self, parameter: Tensor, rank: int, ranks: int, sizes: SliceSizes) -> list[Tensor]:
        """Return this rank's part of each Hugging Face tensor: its intervals (see `RankLayout`), joined."""
        given = self._as_tensor(parameter, 0)
        dim = self._dim(given.dim())
        if dim is None:
            return [given]
        layout = self.layout(ranks * given.size(dim), ranks, sizes)
        found = []
        for number, regions in enumerate(layout.intervals_of([given], dim)):
            pieces = list(chain.from_iterable(regions))
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
            found.append(whole.narrow(dim, 0, sum(end - start for start, end in layout.intervals(number, rank))))
        return found

    def splits(self, shape: Sequence[int], ranks: int, sizes: SliceSizes) -> list["RowSplit"]:
        """Return how each Hugging Face tensor is placed. `shape`: of a rank's parameter."""
        tensor = self._as_tensor(torch.empty(shape, device="meta"), 0)
        dim = self._dim(tensor.dim())
        if dim is None:
            return [RowSplit(None)]
        layout = self.layout(ranks * tensor.size(dim), ranks, sizes)
        if ranks == 1:
            return [RowSplit(None)] * len(layout.regions)
        return [
            RowSplit(dim, tuple(tuple(layout.intervals(number, rank)) for rank in range(ranks)))
            for number in range(len(layout.regions))
        ]

    def _dim(self, dims: int) -> int | None:
        return self.dim if self.dim is None or dims > 1 else 0

    def _as_parameter(self, part: Tensor) -> Tensor:
        if self.form == "transposed" and part.dim() > 1:
            return part.T.contiguous()
        return part.flatten(1) if self.form == "without dimension 1" else part

    def _as_tensor(self, parameter: Tensor, lead: int) -> Tensor:
        if self.form == "transposed" and parameter.dim() > 1 + lead:
            return parameter.transpose(lead, lead + 1).contiguous()
        return parameter.unsqueeze(lead + 1) if self.form == "without dimension 1" else parameter


def _check(name: str, dim: int, size: int, layout: RankLayout, number: int) -> None:
    """Raise ValueError unless tensor `number` of a layout has `size` rows, and the groups can be split."""
    if (size + layout.padding) % layout.ranks:
        raise ValueError(
            f"{name}: dimension {dim} of size {size} is not divisible by {layout.ranks} tensor ranks; use fewer ranks"
        )
    if size != layout.rows(number) or layout.groups % layout.ranks:
        implied = " + ".join(str(layout.groups * rows) for rows in layout.regions[number])
        raise ValueError(
            f"{name}: {size} rows, but config.json implies {implied}, and each of these numbers must be divisible by"
            f" {layout.ranks} tensor ranks; use the config.json of the same release, or fewer ranks"
        )


# for each tensor, for each of its regions: indices in `DeltaSizes.of_key_head`. delta_key_heads: in_proj_qkvz and
# in_proj_ba of Qwen3-Next; delta_parts: in_proj_qkv, in_proj_z, in_proj_b and in_proj_a of Qwen3.5; delta_channels:
# channels of the convolution, [channels, 1, taps]
DELTA_SECTIONS: Mapping[Slicing, tuple[tuple[tuple[int, ...], ...], ...]] = {
    "delta_key_heads": (((0, 1, 2, 3),), ((4, 5),)),
    "delta_parts": (((0,), (1,), (2,)), ((3,),), ((4,),), ((5,),)),
    "delta_channels": (((0,), (1,), (2,)),),
}
# - gate_up: each rank has its rows of the gate matrix, then its rows of the up matrix
# - qkv: grouped by key/value head; a group has its queries, its key and its value
# - gated_qkv: the first tensor has the query and the gate of each head; a group has queries, gates, key and value
# - fused_*: one tensor has the rows of all gates, then of all up rows; or of all queries, keys, then values
# - interleaved_gate_up: one transposed tensor in which columns of gate and up alternate
SLICINGS: Mapping[Slicing, TensorSlice] = {
    one.name: one
    for one in (
        TensorSlice("replicated", None),
        TensorSlice("rows", 0),
        TensorSlice("columns", 1),
        TensorSlice("vocabulary", 0),
        TensorSlice("qkv", 0),
        TensorSlice("gate_up", 0),
        TensorSlice("fused_qkv", 0, takes_adapters=False),
        TensorSlice("fused_gate_up", 0, takes_adapters=False),
        TensorSlice("gated_qkv", 0, takes_adapters=False),
        TensorSlice("interleaved_gate_up", 1, "transposed"),
        TensorSlice("transposed_columns", 0, "transposed"),
        TensorSlice("delta_key_heads", 0, takes_adapters=False),
        TensorSlice("delta_parts", 0, takes_adapters=False),
        TensorSlice("delta_channels", 0, "without dimension 1", takes_adapters=False),
    )
}
