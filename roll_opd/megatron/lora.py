"""LoRA: beside a frozen linear layer the product of two thin matrices learns (Hu et al. 2021).

    y = W x + alpha / rank · B A x

Each of Hugging Face's linear layers has an A and a B of its own, as in `peft`, also where Megatron makes one layer of
several (queries, keys and values; gate and up). Of the two, one is cut as the layer is: B by rows where the layer is
column-parallel, A by columns where it is row-parallel. The other one is on all tensor ranks.

Legend: n tokens on this rank, I inputs and O outputs of a layer on this rank, R the rank of the adapters, J targets of
one layer.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor
from torch.nn import functional

from roll_opd.config.plan import LoraPlan
from roll_opd.megatron.weights.source import Given
from roll_opd.megatron.weights.stream import Shard, streamed, tensor_rank
from roll_opd.megatron.weights.tensor_slices import Same, Sizes, Split, TensorSlice
from roll_opd.models.adapter_files import tensor_name

ADAPTER = "lora"  # what an adapter is called inside its layer


@dataclass(frozen=True)
class LinearLayer:
    """One of Megatron's, and what it is in Hugging Face's model."""

    module: torch.nn.Module
    names: tuple[str, ...]  # of Hugging Face's modules, in the order in which they lie in the weight
    shapes: tuple[tuple[int, ...], ...]  # of their whole weights
    cut: TensorSlice  # of the weight


class Pair(torch.nn.Module):
    """A and B of one of Hugging Face's linear layers, and how they are cut."""

    def __init__(
        self,
        name: str,
        rank: int,
        whole: tuple[int, ...],
        outputs: int,
        cuts: tuple[TensorSlice, TensorSlice],
        weight: Tensor,
    ) -> None:
        """`whole` is the shape of the layer's whole weight, `weight` this rank's part of the one it lies in."""
        super().__init__()
        self.name, self.inputs, self.cuts = name, whole[1], dict(zip("AB", cuts, strict=True))
        self.A = torch.nn.Parameter(weight.new_zeros(rank, weight.size(1)))
        self.B = torch.nn.Parameter(weight.new_zeros(outputs, rank))

    def product(self) -> Tensor:
        """Return B A, f32 [O, I]."""
        return self.B.float() @ self.A.float()


class Adapter(torch.nn.Module):
    """The pairs beside one of Megatron's linear layers, whose output they are added to."""

    is_on = True

    def __init__(self, layer: LinearLayer, plan: LoraPlan, sizes: Sizes) -> None:
        super().__init__()
        weight, config = layer.module.weight, layer.module.config
        assert isinstance(weight, Tensor)
        self._scale = plan.alpha / plan.rank
        self._cut, self._sizes, self._ranks = layer.cut, sizes, tensor_rank()[1]
        self._row_parallel = layer.cut.dim == 1
        self._sequence_parallel = self._ranks > 1 and bool(getattr(config, "sequence_parallel", False))
        self._widths = [rows if self._row_parallel else rows // self._ranks for rows, _ in layer.shapes]
        self.pairs = torch.nn.ModuleDict()
        cuts: tuple[TensorSlice, TensorSlice] = (Split(1), Same()) if self._row_parallel else (Same(), Split(0))
        self._places = [n for n, name in enumerate(layer.names) if last_part(name) in plan.targets]
        for n in self._places:
            name = layer.names[n]
            pair = Pair(name, plan.rank, layer.shapes[n], self._widths[n], cuts, weight)
            self.pairs[last_part(name)] = pair
            for parameter, cut in zip((pair.A, pair.B), cuts, strict=True):
                _mark(parameter, cut, self._sequence_parallel)

    def forward(self, input_nI: Tensor) -> Tensor:
        """Return what is added to the layer's output, [n, 1, O]."""
        pairs = self._pairs()
        hidden_nR = functional.linear(input_nI, torch.cat([pair.A for pair in pairs]))
        hidden = dict(zip(self._places, self._exchanged(hidden_nR).chunk(len(pairs), -1), strict=True))
        by_place = dict(zip(self._places, pairs, strict=True))
        some = next(iter(hidden.values()))
        shares = [
            functional.linear(hidden[n], by_place[n].B) if n in by_place else some.new_zeros(*some.shape[:-1], width)
            for n, width in enumerate(self._widths)
        ]
        return self._cut.arrange(shares, self._ranks, self._sizes, dim=input_nI.dim() - 1) * self._scale

    def added_to(self, weight: Tensor) -> Tensor:
        """Return this rank's part of the layer's weight [O, I] with the adapter in it, in its own dtype."""
        products = dict(zip(self._places, (pair.product() for pair in self._pairs()), strict=True))
        shares = [
            products[n] if n in products else weight.new_zeros(width, weight.size(1), dtype=torch.float32)
            for n, width in enumerate(self._widths)
        ]
        return (weight + self._cut.arrange(shares, self._ranks, self._sizes) * self._scale).to(weight.dtype)

    def stand_beside(self, module: torch.nn.Module) -> None:
        """Become a part of a linear layer of Megatron's."""
        module.add_module(ADAPTER, self)

        def add(_: torch.nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
            return (output[0] + self(inputs[0]), output[1]) if self.is_on else output

        module.register_forward_hook(add)

    def _pairs(self) -> list[Pair]:
        return list(self.pairs.values())  # type: ignore[arg-type]

    def _exchanged(self, hidden_nR: Tensor) -> Tensor:
        """Give each tensor rank what its B reads: sums over the inputs, or all tokens."""
        if self._ranks == 1:
            return hidden_nR
        if self._row_parallel:
            reduce = (
                reduce_scatter_to_sequence_parallel_region
                if self._sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
            return reduce(hidden_nR)
        if self._sequence_parallel:
            return gather_from_sequence_parallel_region(hidden_nR, tensor_parallel_output_grad=True)
        return copy_to_tensor_model_parallel_region(hidden_nR)


class Adapters:
    """All adapters of this rank's model chunks."""

    def __init__(self, layers: Sequence[LinearLayer], plan: LoraPlan, sizes: Sizes) -> None:
        self.plan, self._sizes = plan, sizes
        self._adapters = [Adapter(layer, plan, sizes) for layer in layers]
        for adapter, layer in zip(self._adapters, layers, strict=True):
            adapter.stand_beside(layer.module)

    def begin(self, seed: int) -> None:
        """Make the products zero: B is, and A is uniform, as in `peft`; the same numbers in every layout."""
        for pair in self._pairs():
            key = tensor_name(pair.name, "A")
            generator = torch.Generator().manual_seed(_seed_of(f"{seed} {key}"))
            whole = torch.rand(self.plan.rank, pair.inputs, generator=generator, device="cpu")
            self._fill(pair, "A", Given({key: (2 * whole - 1) / math.sqrt(pair.inputs)}))

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Take in what `peft` saved. ValueError for what is missing, or has no place here, or does not fit."""
        wanted = {tensor_name(pair.name, matrix) for pair in self._pairs() for matrix in "AB"}
        if lacking := sorted(wanted - tensors.keys()):
            raise ValueError(f"{where}: has no {lacking[0]}; its adapter_config.json says otherwise")
        for pair in self._pairs():
            for matrix in "AB":
                self._fill(pair, matrix, Given(tensors))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every A and B, whole and under `peft`'s names, on rank 0, and nothing on the others. Collective."""
        shards = []
        for pair in self._pairs():
            for matrix, cut in pair.cuts.items():
                value = getattr(pair, matrix)
                shard = Shard(((tensor_name(pair.name, matrix),),), cut, value.shape, value.dtype)
                shards.append((shard, lambda value=value: value))
        return streamed(shards, self._sizes)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Have the model compute without adapters inside the block."""
        for adapter in self._adapters:
            adapter.is_on = False
        try:
            yield
        finally:
            for adapter in self._adapters:
                adapter.is_on = True

    def _pairs(self) -> Iterator[Pair]:
        return (pair for adapter in self._adapters for pair in adapter.pairs.values())  # type: ignore[misc]

    def _fill(self, pair: Pair, matrix: str, source: Given) -> None:
        parameter, name = getattr(pair, matrix), tensor_name(pair.name, matrix)
        part = pair.cuts[matrix].read(source, (name,), *tensor_rank(), self._sizes)
        if part.shape != parameter.shape:
            raise ValueError(
                f"{name} is {list(part.shape)} on this rank, and {list(parameter.shape)} are wanted; give an adapter of"
                " this model and of lora_rank"
            )
        with torch.no_grad():
            parameter.copy_(part)


def sharded_state(model: torch.nn.Module) -> dict[str, Any]:
    """Return the adapters of a model chunk as Megatron saves them: loadable in every layout."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, Pair):
            for matrix, cut in module.cuts.items():
                value, key = getattr(module, matrix), tensor_name(module.name, matrix)
                state[f"{path}.{matrix}"] = (
                    make_sharded_tensor_for_checkpoint(value, key)
                    if cut.dim is None
                    else make_tp_sharded_tensor_for_checkpoint(value, key, tp_axis=cut.dim)
                )
    return state


def last_part(name: str) -> str:
    """Return what a module is called inside the one that has it, such as q_proj."""
    return name.rpartition(".")[2]


def _mark(parameter: Any, cut: TensorSlice, sequence_parallel: bool) -> None:
    """Tell Megatron how a parameter is cut; what is whole sees a part of the tokens under sequence parallelism."""
    parameter.tensor_model_parallel = cut.dim is not None
    parameter.partition_dim, parameter.partition_stride = cut.dim or 0, 1
    parameter.sequence_parallel = sequence_parallel and cut.dim is None


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])
