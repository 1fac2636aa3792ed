"""A model whose weights follow those of one that learns: copies of it, or a moving average.

The average is kept in f32, whatever the model computes in. It is taken number by number, so that it has the same bits
in every layout.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from roll_opd.config.plan import FollowingPlan
from roll_opd.megatron.engine import MegatronEngine
from roll_opd.megatron.export import Written, save_hf
from roll_opd.megatron.model import unwrapped
from roll_opd.megatron.weights.source import Files, Given
from roll_opd.phases import Part


class MegatronFollower(MegatronEngine):
    """A model that computes log-probs and takes over another one's weights."""

    plan: FollowingPlan

    def __init__(self, plan: FollowingPlan, *, seed: int, deterministic: bool = True) -> None:
        super().__init__(plan, seed=seed, deterministic=deterministic)
        self._models: list[torch.nn.Module] = [unwrapped(chunk) for chunk in self.chunks]
        self._parameters = list(dict.fromkeys(p for model in self._models for p in model.parameters()))
        self._averages: list[Tensor] | None = None
        if plan.decay and plan.model.dtype != "fp32":
            self._averages = [torch.empty_like(p, dtype=torch.float32) for p in self._parameters]
            self.load(Path(plan.model.path))

    def follow(self, weights: Mapping[str, Tensor]) -> None:
        """Make each weight `decay` times itself and for the rest that of `weights`, whole and by Hugging Face's names.

        Collective; a model that is equal to `weights` already stays it, to the bit.
        """
        with self._in_full():
            before = [p.detach().clone() for p in self._parameters] if self.plan.decay else []
            self.weights.load(self._models, Given(weights))
            for parameter, own in zip(self._parameters, before, strict=False):
                # three roundings of each number, and no fused one, which vectors have and what is left of them has not
                step = (parameter.data - own).mul_(1 - self.plan.decay)
                parameter.data.copy_(own.add_(step))

    def save(self, directory: Path, *, later: bool = False) -> Written:
        """Do what `save_hf` does, of averages in f32."""
        with self._in_full():
            return save_hf(self, directory, later=later)

    def load(self, directory: Path) -> None:
        """Put back what `save` wrote, in this or another layout. Collective."""
        with self._in_full():
            with Files(directory) as files:
                self.weights.load(self._models, files)

    def _tensors(self) -> dict[Part, list[Tensor]]:
        tensors = super()._tensors()
        tensors[Part.WEIGHTS] += self._averages or []
        return tensors

    @contextmanager
    def _in_full(self) -> Iterator[None]:
        """Have averages, where they are apart, stand in for the weights; afterwards these are the averages, rounded."""
        self.memory.check("its weights", Part.WEIGHTS)
        rounded = [parameter.data for parameter in self._parameters]
        for parameter, average in zip(self._parameters, self._averages or rounded, strict=True):
            parameter.data = average
        try:
            yield
        finally:
            for parameter, own in zip(self._parameters, rounded, strict=True):
                if self._averages is not None:
                    own.copy_(parameter.data)
                parameter.data = own
