"""Engine of a self-distillation teacher.

The weights are an exponential moving average (EMA) or a copy of the student's weights. The average is kept in f32 for
every model dtype. It is computed elementwise, so its bits do not depend on the layout.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from roll_opd.config.plan import FollowingPlan
from roll_opd.megatron.engine import MegatronEngine
from roll_opd.megatron.export import Written, save_hf
from roll_opd.megatron.model_builder import unwrapped
from roll_opd.megatron.weights.fused_experts import expert_source
from roll_opd.megatron.weights.model_weights import StreamedLoad
from roll_opd.models.device_phases import Part


class MegatronFollower(MegatronEngine):
    """Teacher model without an optimizer; its weights are an EMA or a copy of the student's weights."""

    plan: FollowingPlan

    def __init__(self, plan: FollowingPlan, *, seed: int, deterministic: bool = True) -> None:
        super().__init__(plan, seed=seed, deterministic=deterministic)
        self._models: list[torch.nn.Module] = [unwrapped(chunk) for chunk in self.chunks]
        self._parameters = list(dict.fromkeys(p for model in self._models for p in model.parameters()))
        self._average_of: dict[Tensor, Tensor] = {}  # parameter -> f32 average; empty for copies and f32 models
        self._load: StreamedLoad | None = None
        if plan.ema_decay and plan.model.dtype != "fp32":
            self._average_of = {p: torch.empty_like(p, dtype=torch.float32) for p in self._parameters}
            self.load(Path(plan.model.path))

    def follow(self, weights: Mapping[str, Tensor], *, last: bool) -> None:
        """Set the average to decay · average + (1 - decay) · weights. Without a decay, copy the weights.

        `weights` maps Hugging Face names to full tensors of the student. The weights arrive in parts, and `last` marks
        the last part. If the average equals the weights, its bits do not change.
        """
        self.memory.check("update its weights", Part.WEIGHTS)
        self._load = self._load or StreamedLoad(self.weights, self._models, self._update_average)
        self._load.add(weights)
        if last:
            self._load.finish()
            self._load = None

    def _update_average(self, parameter: Tensor, theirs: Tensor) -> None:
        average = self._average_of.get(parameter)
        own = parameter.data if average is None else average
        theirs = theirs.to(own)
        if self.plan.ema_decay and isinstance(parameter, torch.nn.Parameter):  # expert biases of routers are copied
            # three operations, each rounded: a fused multiply-add may round differently in vectors and in their
            # remainder
            own.add_((theirs - own).mul_(1 - self.plan.ema_decay))
        else:
            own.copy_(theirs)
        if average is not None:
            parameter.data.copy_(average)

    def save(self, directory: Path, *, later: bool = False) -> Written:
        """Save the averages as a model directory in f32 (see `save_hf`)."""
        with self._averages_as_weights():
            return save_hf(self, directory, later=later)

    def load(self, directory: Path) -> None:
        """Load averages that were saved in any layout. Collective."""
        with self._averages_as_weights():
            with expert_source(directory) as files:
                self.weights.load(self._models, files)

    def _tensors(self) -> dict[Part, list[Tensor]]:
        tensors = super()._tensors()
        tensors[Part.WEIGHTS] += self._average_of.values()
        return tensors

    @contextmanager
    def _averages_as_weights(self) -> Iterator[None]:
        """Use the f32 averages as weights inside the `with` block. Afterwards the weights are the rounded averages."""
        self.memory.check("use its weights", Part.WEIGHTS)
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
