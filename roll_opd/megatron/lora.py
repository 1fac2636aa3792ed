"""LoRA: trainable low-rank updates of frozen linear layers (Hu et al. 2021).

    y = W x + alpha / rank · B A x

Each Hugging Face linear layer has separate matrices A and B, as in `peft`. This is also the case if Megatron fuses
several layers into one, for example the projections of queries, keys and values.

One of the two matrices is sharded like the layer. In column-parallel layers, B is sharded by rows. In row-parallel
layers, A is sharded by columns. The other matrix is replicated on all tensor ranks. An expert with an adapter is on one
tensor rank, so neither of its matrices is sharded.

Legend: n tokens on this rank, I input features and O output features of a layer on this rank, R rank of the adapters.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
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
from roll_opd.megatron.parallel import tensor_rank
from roll_opd.megatron.weights.source import TensorSource
from roll_opd.megatron.weights.sync_plan import ParameterShard, SyncPlan
from roll_opd.megatron.weights.tensor_slices import SLICINGS, SliceSizes, TensorSlice
from roll_opd.models.adapter_files import module_of, tensor_name

ADAPTER = "lora"  # name of the adapter module in its layer


@dataclass(frozen=True)
class LinearLayer:
    """Linear layer of Megatron, with the names of the Hugging Face layers that are fused in this layer."""

    module: torch.nn.Module
    names: tuple[str, ...]  # names of the Hugging Face modules, in the order of their rows in the weight
    shapes: tuple[tuple[int, ...], ...]  # shapes of the modules' full weights
    slicing: TensorSlice  # slicing of the weight
    peers: tuple[tuple[str, ...], ...] = ()  # of an expert's layer: the names on each expert rank


class Pair(torch.nn.Module):
    """Matrices A and B of the adapter of one Hugging Face linear layer, and their slicing over tensor ranks."""

    def __init__(
        self,
        name: str,
        rank: int,
        shape: tuple[int, ...],
        outputs: int,
        slicings: tuple[TensorSlice, TensorSlice],
        weight: Tensor,
        peers: tuple[str, ...] = (),
    ) -> None:
        """Create A and B, filled with zeros.

        Args:
            shape: shape of the layer's full weight.
            weight: this rank's part of Megatron's fused weight.
            peers: of an expert's layer, its names on all expert ranks.
        """
        super().__init__()
        self.peers = peers
        self.name, self.inputs, self.slicings = name, shape[1], dict(zip("AB", slicings, strict=True))
        self.A = torch.nn.Parameter(weight.new_zeros(rank, weight.size(1)))
        self.B = torch.nn.Parameter(weight.new_zeros(outputs, rank))

    def product(self) -> Tensor:
        """Return B · A, f32 [O, I]."""
        return self.B.float() @ self.A.float()


class Adapter(torch.nn.Module):
    """Adapter of one Megatron linear layer.

    A Megatron layer may fuse several Hugging Face layers. The adapter adds the low-rank products of all of them to the
    layer's output.
    """

    is_on = True

    def __init__(self, layer: LinearLayer, plan: LoraPlan, sizes: SliceSizes) -> None:
        super().__init__()
        weight, config = layer.module.weight, layer.module.config
        assert isinstance(weight, Tensor)
        self._scale = plan.alpha / plan.rank
        is_expert = bool(layer.peers)
        self._slicing, self._sizes, self._ranks = layer.slicing, sizes, tensor_rank(expert=is_expert)[1]
        if is_expert and self._ranks > 1:
            raise ValueError("adapters of experts need expert_tensor_parallel_size 1")
        self._row_parallel = layer.slicing.dim == 1
        self._sequence_parallel = self._ranks > 1 and bool(getattr(config, "sequence_parallel", False))
        self._widths = [rows if self._row_parallel else rows // self._ranks for rows, _ in layer.shapes]
        self.pairs = torch.nn.ModuleDict()
        whole, rows, columns = SLICINGS["replicated"], SLICINGS["rows"], SLICINGS["columns"]
        slicings = (columns, whole) if self._row_parallel else (whole, rows)
        self._places = [n for n, name in enumerate(layer.names) if module_name(name) in plan.targets]
        for n in self._places:
            name = layer.names[n]
            peers = tuple(names[n] for names in layer.peers)
            pair = Pair(name, plan.rank, layer.shapes[n], self._widths[n], slicings, weight, peers)
            self.pairs[module_name(name)] = pair
            for parameter, slicing in zip((pair.A, pair.B), slicings, strict=True):
                _set_parallel_attributes(parameter, slicing, self._sequence_parallel, weight if is_expert else None)

    def forward(self, input_nI: Tensor) -> Tensor:
        """Return the adapter's output, [n, 1, O]. The forward hook adds it to the output of the layer."""
        pairs = self._pairs()
        hidden_nR = functional.linear(input_nI, torch.cat([pair.A for pair in pairs]))
        hidden = dict(zip(self._places, self._exchange(hidden_nR).chunk(len(pairs), -1), strict=True))
        by_place = dict(zip(self._places, pairs, strict=True))
        some = next(iter(hidden.values()))
        shares = [
            functional.linear(hidden[n], by_place[n].B) if n in by_place else some.new_zeros(*some.shape[:-1], width)
            for n, width in enumerate(self._widths)
        ]
        return self._slicing.arrange(shares, self._ranks, self._sizes, dim=input_nI.dim() - 1) * self._scale

    def merged(self, weight: Tensor) -> Tensor:
        """Return this rank's part of the layer's weight with the adapter merged, [O, I] in the dtype of `weight`."""
        products = dict(zip(self._places, (pair.product() for pair in self._pairs()), strict=True))
        shares = [
            products[n] if n in products else weight.new_zeros(width, weight.size(1), dtype=torch.float32)
            for n, width in enumerate(self._widths)
        ]
        return (weight + self._slicing.arrange(shares, self._ranks, self._sizes) * self._scale).to(weight.dtype)

    def attach(self, module: torch.nn.Module) -> None:
        """Register this adapter as a submodule and as a forward hook of `module`.

        `module`: a linear layer of Megatron.
        """
        module.add_module(ADAPTER, self)

        def add(_: torch.nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
            return (output[0] + self(inputs[0]), output[1]) if self.is_on else output

        module.register_forward_hook(add)

    def _pairs(self) -> list[Pair]:
        return list(self.pairs.values())  # type: ignore[arg-type]

    def _exchange(self, hidden_nR: Tensor) -> Tensor:
        """Communicate A · x between tensor ranks before the multiplication by B.

        For a row-parallel layer, the parts of A · x are summed over the ranks. For a column-parallel layer with
        sequence parallelism, the tokens of all ranks are gathered.
        """
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

    def __init__(self, layers: Sequence[LinearLayer], plan: LoraPlan, sizes: SliceSizes) -> None:
        self.plan, self._sizes = plan, sizes
        self._adapters = [Adapter(layer, plan, sizes) for layer in layers]
        for adapter, layer in zip(self._adapters, layers, strict=True):
            adapter.attach(layer.module)

    def initialise(self, seed: int) -> None:
        """Initialise the matrices like `peft`: B is zero, and A is uniform. The values are the same in every layout."""
        for pair in self._pairs():
            key = tensor_name(pair.name, "A")
            generator = torch.Generator().manual_seed(_seed_from(f"{seed} {key}"))
            whole = torch.rand(self.plan.rank, pair.inputs, generator=generator, device="cpu")
            self._fill(pair, "A", TensorSource({key: (2 * whole - 1) / math.sqrt(pair.inputs)}))

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Load the matrices of a `peft` checkpoint.

        Raises ValueError if a matrix is missing or has a wrong shape, and for a tensor that is no matrix of an adapter.
        `where`: name of the file in the error message.
        """
        wanted = {tensor_name(pair.name, matrix) for pair in self._pairs() for matrix in "AB"}
        if lacking := sorted(wanted - tensors.keys()):
            raise ValueError(f"{where} lacks {lacking[0]}, a tensor of its adapter_config.json; use a complete adapter")
        for name in sorted(tensors.keys() - wanted):  # other pipeline ranks load the other layers
            if module_name(module_of(name) or "") not in self.plan.targets:
                raise ValueError(f"{where} has {name}, which is no matrix of its adapter; use a plain LoRA adapter")
        for pair in self._pairs():
            for matrix in "AB":
                self._fill(pair, matrix, TensorSource(tensors))

    def sync_plan(self) -> SyncPlan:
        """Return the plan of the full matrices A and B of all adapters, with their names in `peft`. Collective."""
        shards = []
        for pair in self._pairs():
            for matrix, slicing in pair.slicings.items():
                value = getattr(pair, matrix)
                names = tuple((tensor_name(name, matrix),) for name in pair.peers or (pair.name,))
                shard = ParameterShard(names, slicing, value.shape, value.dtype, bool(pair.peers))
                shards.append((shard, lambda value=value: value))
        return SyncPlan(shards, self._sizes)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable all adapters inside the `with` block."""
        for adapter in self._adapters:
            adapter.is_on = False
        try:
            yield
        finally:
            for adapter in self._adapters:
                adapter.is_on = True

    def _pairs(self) -> Iterator[Pair]:
        return (pair for adapter in self._adapters for pair in adapter.pairs.values())  # type: ignore[misc]

    def _fill(self, pair: Pair, matrix: str, source: TensorSource) -> None:
        parameter, name = getattr(pair, matrix), tensor_name(pair.name, matrix)
        part = pair.slicings[matrix].read(source, (name,), *tensor_rank(expert=bool(pair.peers)), self._sizes)
        if part.shape != parameter.shape:
            raise ValueError(
                f"{name} is {list(part.shape)} on this rank, expected {list(parameter.shape)}; use an adapter of this"
                " model whose rank is lora_rank"
            )
        with torch.no_grad():
            parameter.copy_(part)


def sharded_state(model: torch.nn.Module) -> dict[str, Any]:
    """Return the sharded state dict of the adapters in a model chunk. It can be loaded in every layout."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, Pair):
            for matrix, slicing in module.slicings.items():
                value, key = getattr(module, matrix), tensor_name(module.name, matrix)
                if module.peers:
                    replica = 0, 0, parallel_state.get_expert_data_parallel_rank()
                    sharded = ShardedTensor.from_rank_offsets(key, value, replica_id=replica)
                elif slicing.dim is None:
                    sharded = make_sharded_tensor_for_checkpoint(value, key)
                else:
                    sharded = make_tp_sharded_tensor_for_checkpoint(value, key, tp_axis=slicing.dim)
                state[f"{path}.{matrix}"] = sharded
    return state


def module_name(name: str) -> str:
    """Return the last component of a module's path, such as q_proj."""
    return name.rpartition(".")[2]


def _set_parallel_attributes(parameter: Any, slicing: TensorSlice, sequence_parallel: bool, of_expert: Any) -> None:
    """Set Megatron's sharding attributes of a parameter.

    With sequence parallelism, they make Megatron sum the gradient of a replicated parameter over tensor ranks.
    `of_expert`: weight of the expert's layer, which has the same replicas; None for other layers.
    """
    if of_expert is not None:
        for name in ("tensor_model_parallel", "allreduce"):
            if hasattr(of_expert, name):
                setattr(parameter, name, getattr(of_expert, name))
        parameter.partition_dim, parameter.partition_stride, parameter.sequence_parallel = 0, 1, False
        return
    parameter.tensor_model_parallel = slicing.dim is not None
    parameter.partition_dim, parameter.partition_stride = slicing.dim or 0, 1
    parameter.sequence_parallel = sequence_parallel and slicing.dim is None


def _seed_from(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])
