"""Checkpoint tensors that contain all experts of a layer. They are split by expert when read, and joined when exported.

Qwen3.5 has two fused tensors per layer, which are read as `gate_proj`, `up_proj` and `down_proj` of each expert:

- `gate_up_proj`: [experts, 2 · width, hidden]
- `down_proj`: [experts, hidden, width]

gpt-oss has stacks, which are tensors of shape [experts, ...]. Each stack is read as one tensor per expert. Quantised
stacks are read in bf16 (MXFP4).

MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 four-bit floats (E2M1) with a common scale, a power of two.

Legend: N rows of a matrix, K blocks in a row, D = 32 · K columns.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from roll_opd.megatron.weights.source import FileSource
from roll_opd.models.families import FAMILIES
from roll_opd.models.model_files import KEPT
from roll_opd.models.model_info import ModelInfo, read_model

# value of each four-bit code: sign, two bits of exponent, one bit of mantissa
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127  # exponent bias of the scales
BLOCKS, SCALES = "_blocks", "_scales"  # name endings of the two tensors of a matrix


def dequantised(blocks_NKB: Tensor, scales_NK: Tensor) -> Tensor:
    """Return the matrix in bf16, [N, D].

    Args:
        blocks_NKB: uint8 [N, K, 16], two values per byte; the lower four bits are the first value.
        scales_NK: uint8 [N, K], biased exponents of the scales.
    """
    values = torch.tensor(VALUES, dtype=torch.bfloat16, device=blocks_NKB.device)
    codes = torch.stack([blocks_NKB & 15, blocks_NKB >> 4], -1).flatten(-2)
    exponents = scales_NK.to(torch.int32)[..., None] - EXPONENT_BIAS
    return torch.ldexp(values[codes.int()], exponents).flatten(-2)


EACH = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
FUSED = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj")
IN_STACK = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(\w+)")
STACK = re.compile(r"(.+\.mlp\.experts)\.(\w+)")


def as_stored(tensors: Iterable[tuple[str, Tensor]], model: ModelInfo) -> Iterable[tuple[str, Tensor]]:
    """Return the tensors of a model in the form of its checkpoint.

    If the checkpoint has fused or stacked experts, the tensors of the experts are joined.
    """
    if FAMILIES[model.model_type].stacks_experts:
        return _stacked(tensors, model.experts)
    return _fused(tensors, model.experts) if _has_fused_experts(model.tensors) else tensors


def expert_source(directory: Path) -> FileSource:
    """Return the weights of a model directory. Fused or stacked experts are split into one tensor per expert."""
    stacks = FAMILIES[read_model(directory).model_type].stacks_experts
    return StackSource(directory) if stacks else UnfusedSource(directory)


def _has_fused_experts(names: Iterable[str]) -> bool:
    return any(FUSED.fullmatch(name) and not name.startswith(KEPT) for name in names)


class UnfusedSource(FileSource):
    """`FileSource` that splits fused tensors into one tensor per expert."""

    @property
    def names(self) -> Iterable[str]:
        for name, stored in self._stored.items():
            match = FUSED.fullmatch(name)
            if match is None or name.startswith(KEPT):
                yield name
                continue
            for expert in range(stored.shape[0]):
                for part in match[2].split("_"):
                    yield f"{match[1]}.{expert}.{part}_proj.weight"

    def shape(self, name: str) -> tuple[int, ...]:
        if (found := self._fused(name)) is None:
            return super().shape(name)
        _, rows, columns = super().shape(found[0])
        return (rows, columns) if found[2] == "down" else (rows // 2, columns)

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        if (found := self._fused(name)) is None:
            return super().part(name, dim, start, stop)
        fused, expert, part = found
        whole = super().part(fused, 0, expert, expert + 1)[0]
        if part != "down":
            whole = whole.chunk(2)[part == "up"]
        return whole.narrow(dim, start, stop - start)

    def _fused(self, name: str) -> tuple[str, int, str] | None:
        """Return (fused tensor, expert, part) for the tensor of an expert. The part is gate, up or down.

        The result is None for other tensors, and for tensors that the checkpoint stores separately.
        """
        match = EACH.fullmatch(name)
        if match is None or name in self._stored:
            return None
        return f"{match[1]}.{'down' if match[3] == 'down' else 'gate_up'}_proj", int(match[2]), match[3]


class StackSource(FileSource):
    """`FileSource` that splits stacks into one tensor per expert.

    gpt-oss's MXFP4 tensors are read as bf16, and transposed.
    """

    @property
    def names(self) -> Iterable[str]:
        for name, stored in self._stored.items():
            match = STACK.fullmatch(name)
            if match is None:
                yield name
            elif not name.endswith(SCALES):
                yield from (f"{match[1]}.{expert}.{match[2].removesuffix(BLOCKS)}" for expert in range(stored.shape[0]))

    def shape(self, name: str) -> tuple[int, ...]:
        if (match := IN_STACK.fullmatch(name)) is None:
            return super().shape(name)
        stack = f"{match[1]}.{match[3]}"
        if stack + BLOCKS not in self._stored:
            return super().shape(stack)[1:]
        _, rows, blocks, packed = super().shape(stack + BLOCKS)
        return 2 * blocks * packed, rows

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        if (match := IN_STACK.fullmatch(name)) is None:
            return super().part(name, dim, start, stop)
        stack, expert = f"{match[1]}.{match[3]}", int(match[2])
        if stack + BLOCKS not in self._stored:
            return super().part(stack, 0, expert, expert + 1)[0].narrow(dim, start, stop - start)
        blocks = super().part(stack + BLOCKS, 0, expert, expert + 1)[0]
        scales = super().part(stack + SCALES, 0, expert, expert + 1)[0]
        if dim == 1:  # rows of the quantised matrix
            blocks, scales, start, stop = blocks[start:stop], scales[start:stop], 0, stop - start
        return dequantised(blocks, scales).T.narrow(dim, start, stop - start)


def _fused(tensors: Iterable[tuple[str, Tensor]], experts: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors. The tensors of all experts of a layer are joined into fused tensors.

    The fused tensors of a layer are yielded when the last of the layer's tensors has arrived. `experts`: number of
    experts.
    """
    held: dict[str, dict[tuple[str, int], Tensor]] = {}
    for name, tensor in tensors:
        if (match := EACH.fullmatch(name)) is None:
            yield name, tensor
            continue
        parts = held.setdefault(match[1], {})
        parts[match[3], int(match[2])] = tensor
        if len(parts) == 3 * experts:
            del held[match[1]]
            both = (torch.cat([parts["gate", expert], parts["up", expert]]) for expert in range(experts))
            yield f"{match[1]}.gate_up_proj", torch.stack(list(both))
            yield f"{match[1]}.down_proj", torch.stack([parts["down", expert] for expert in range(experts)])


def _stacked(tensors: Iterable[tuple[str, Tensor]], experts: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors. The tensors of all experts are joined into stacks.

    A stack is yielded when the tensor of its last expert has arrived. `experts`: number of experts.
    """
    held: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        if (match := IN_STACK.fullmatch(name)) is None:
            yield name, tensor
            continue
        stack = f"{match[1]}.{match[3]}"
        parts = held.setdefault(stack, {})
        parts[int(match[2])] = tensor
        if len(parts) == experts:
            del held[stack]
            yield stack, torch.stack([parts[expert] for expert in range(experts)])
