"""Seconds of a weight sync over a wire with a stated rate: `roll-opd plan --wire GB/s`.

Each of two parts takes its bytes divided by the rate. The first part gathers, on the student's first rank, what other
ranks have of the sent tensors; for CUDA IPC every rank gathers them. The second part brings the tensors to the
engines: not at all with CUDA IPC, once with NCCL's broadcast, and through shared memory once to each other host with
engines. The parts overlap, so their sum is an upper bound. Loading the weights in the engines is not counted.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roll_opd.base.failures import ConfigError
from roll_opd.base.terminal import wrapped
from roll_opd.config.plan import RunPlan
from roll_opd.inference.plugin import CUDA_IPC, M2N, NCCL
from roll_opd.models.adapter_files import adapted_modules
from roll_opd.models.memory import BYTES, readable_bytes
from roll_opd.models.model_info import read_model
from roll_opd.weight_sync.choose_transport import choose_backend


@dataclass(frozen=True)
class WireEstimate:
    """The bytes of a weight sync and the seconds of its parts."""

    gigabytes_per_second: float
    bytes: int
    is_adapter: bool
    backend: str
    seconds: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self)

    def to_text(self, width: int) -> str:
        """Return the estimate as text."""
        what = "the adapter" if self.is_adapter else "all weights"
        parts = ", ".join(f"{part} {seconds:.3g} s" for part, seconds in self.seconds.items())
        line = (
            f"{what}, {readable_bytes(self.bytes)}, by {self.backend}: at most {sum(self.seconds.values()):.3g} s"
            f" ({parts})"
        )
        heading = f"Weight sync over a wire of {self.gigabytes_per_second:g} GB/s (computed, not measured)"
        return wrapped(f"{heading}\n  {line}", width)


def wire_estimate(plan: RunPlan, wire: str) -> WireEstimate:
    """Return the estimate of a plan, as if its devices were GPUs, for a rate in GB/s.

    Raises ConfigError for a rate that is no positive number, and for a plan without engines.
    """
    gigabytes_per_second = _positive(wire)
    rollout, student = plan.rollout, plan.student
    if rollout is None:
        raise ConfigError([f"--wire {wire}: the {plan.kind} pipeline sends no weights; leave --wire out"])
    model, size = read_model(Path(student.model.path)), BYTES[student.model.dtype]
    values, adapter = model.parameters, rollout.adapter
    if adapter:
        modules = adapted_modules(model, adapter.targets)
        values = adapter.rank * sum(sum(model.tensors[f"{module}.weight"].shape) for module in modules)
    engines = rollout.devices[: plan.training_engines * rollout.tp]
    backend = choose_backend(student.devices, engines, plan.weight_sync, on_gpu=not adapter)
    hosts = {device // plan.devices_per_node for device in engines} - {student.devices[0] // plan.devices_per_node}
    times = {CUDA_IPC: 0, NCCL: 1, M2N: 1}.get(backend, len(hosts))
    layout, second = student.layout, values * size / (gigabytes_per_second * 1e9)
    ranks = layout.world_size // (layout.dp * layout.cp)  # over which the weights are split
    seconds = {"gathering": 0 if backend == M2N else (1 - 1 / ranks) * second, "to the engines": times * second}
    return WireEstimate(gigabytes_per_second, values * size, bool(adapter), backend, seconds)


def _positive(wire: str) -> float:
    try:
        found = float(wire)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ConfigError([f"--wire {wire} must be a rate in GB/s above 0, such as 25"])
    return found
