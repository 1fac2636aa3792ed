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
from roll_opd.megatron.weights.model_weights import Arriving
from roll_opd.megatron.weights.source import Files
from roll_opd.models.device_phases import Part


class MegatronFollower(MegatronEngine):
    """A model that computes log-probs and takes over another one's weights."""

    plan: FollowingPlan

    def __init__(self, plan: FollowingPlan, *, seed: int, deterministic: bool = True) -> None:
        super().__init__(plan, seed=seed, deterministic=deterministic)
        self._models: list[torch.nn.Module] = [unwrapped(chunk) for chunk in self.chunks]
        self._parameters = list(dict.fromkeys(p for model in self._models for p in model.parameters()))
        self._average_of: dict[Tensor, Tensor] = {}  # of each parameter, where it is another than the parameter
        self._arriving: Arriving | None = None
        if plan.ema_decay and plan.model.dtype != "fp32":
            self._average_of = {p: torch.empty_like(p, dtype=torch.float32) for p in self._parameters}
            self.load(Path(plan.model.path))

    def follow(self, weights: Mapping[str, Tensor], *, last: bool) -> None:
        """Make each weight `decay` times itself and for the rest that of `weights`, whole and by Hugging Face's names.

        They come in parts, of which one is the `last`. A model that is equal to `weights` already stays it, to the bit.
        """
        self.memory.check("its weights", Part.WEIGHTS)
        self._arriving = self._arriving or Arriving(self.weights, self._models, self._take_over)
        self._arriving.take(weights)
        if last:
            self._arriving.end()
            self._arriving = None

    def _take_over(self, parameter: Tensor, theirs: Tensor) -> None:
        average = self._average_of.get(parameter)
        own = parameter.data if average is None else average
        theirs = theirs.to(own)
        if self.plan.ema_decay and isinstance(parameter, torch.nn.Parameter):  # biases of routers are copied
            # three roundings of each number, and no fused one, which vectors have and what is left of them has not
            own.add_((theirs - own).mul_(1 - self.plan.ema_decay))
        else:
            own.copy_(theirs)
        if average is not None:
            parameter.data.copy_(average)

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
        tensors[Part.WEIGHTS] += self._average_of.values()
        return tensors

    @contextmanager
    def _in_full(self) -> Iterator[None]:
        """Have averages, where they are apart, stand in for the weights; afterwards these are the averages, rounded."""
        self.memory.check("its weights", Part.WEIGHTS)
        rounded = [parameter.data for parameter in self._parameters]
        for parameter, own in zip(self._parameters, rounded, strict=True):
            parameter.data = self._average_of.get(parameter, own)
        try:
            yield
        finally:
            for parameter, own in zip(self._parameters, rounded, strict=True):
                if self._average_of:
                    own.copy_(parameter.data)
                parameter.data = own
