"""Experts of a layer in one tensor, as in the releases of Qwen3.5: read as tensors of each expert, joined on export.

The tensors are `gate_up_proj` [experts, 2 · width, hidden] and `down_proj` [experts, hidden, width].
"""

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from roll_opd.megatron.weights.source import FileSource
from roll_opd.models.model_files import KEPT

EACH = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
FUSED = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj")


def has_fused_experts(names: Iterable[str]) -> bool:
    """Return whether a checkpoint with these tensors has all experts of a layer in one tensor."""
    return any(FUSED.fullmatch(name) and not name.startswith(KEPT) for name in names)


class UnfusedSource(FileSource):
    """`FileSource` with a tensor of each expert in place of fused ones."""

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
        """Return the fused tensor, the number and the part of an expert's tensor; None for another one."""
        match = EACH.fullmatch(name)
        if match is None or name in self._stored:
            return None
        return f"{match[1]}.{'down' if match[3] == 'down' else 'gate_up'}_proj", int(match[2]), match[3]


def fused(tensors: Iterable[tuple[str, Tensor]], experts: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, with those of the `experts` of a layer joined as soon as all are there."""
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
