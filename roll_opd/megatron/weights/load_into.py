"""Weights that come in parts, into a Megatron model: a parameter is filled as soon as all of its tensors are there."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from roll_opd.megatron.weights.source import Given
from roll_opd.megatron.weights.transfer import ModelWeights, parameters_of

Put = Callable[[Tensor, Tensor], None]  # a parameter, and what it is to take


class Arriving:
    """One set of weights on its way into this rank's model chunks."""

    def __init__(self, weights: ModelWeights, models: Sequence[torch.nn.Module], put: Put) -> None:
        self._weights, self._put = weights, put
        self._held: dict[str, Tensor] = {}  # of parameters that still wait for others
        self._waiting = [(place, parameter, weights.names_at(place)) for place, _, parameter in parameters_of(models)]

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill what can be filled now with whole `tensors`, by Hugging Face's names. They are not needed afterwards."""
        there = self._held | dict(tensors)
        waiting = []
        for place, parameter, names in self._waiting:
            if all(name in there for name in names):
                part = self._weights.part_at(place, Given(there))
                if part.shape != parameter.shape:
                    raise ValueError(f"{' and '.join(names)}: {list(part.shape)} came for {list(parameter.shape)}")
                self._put(parameter, part)
            else:
                waiting.append((place, parameter, names))
        self._waiting = waiting
        still = {name for _, _, names in waiting for name in names}
        self._held = {
            name: tensor.clone() if name in tensors else tensor for name, tensor in there.items() if name in still
        }

    def end(self) -> None:
        """Raise ValueError where something has not come."""
        if self._waiting:
            _, _, names = self._waiting[0]
            raise ValueError(f"weights did not arrive: {' and '.join(names)}, and {len(self._waiting) - 1} more")
