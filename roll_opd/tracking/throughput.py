"""Throughput and memory metrics of a step. `docs/metrics.md` lists every name."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil
import torch

from roll_opd.base.hardware import peak_flops
from roll_opd.config.plan import TrainPlan
from roll_opd.models.flops import TRAINED, TRAINED_ADAPTERS, sequence_flops
from roll_opd.models.model_info import read_model
from roll_opd.samples.sample import Sample
from roll_opd.tracking.summary import GENERATED_TOKENS, STEP_SECONDS, STEP_TOKENS

GIB = 2**30
TRAIN_FLOPS, TRAIN_RATE = "system/train_flops", "system/train_flops_per_second"


def throughput_metrics(row: Mapping[str, float]) -> dict[str, float]:
    """Return the rates of a step, in tokens per second and FLOPs per second.

    A rate is left out if `row` lacks the number of tokens or FLOPs, or the seconds.
    """
    rates = {
        "system/tps": (row.get(STEP_TOKENS), row.get(STEP_SECONDS)),
        "system/generate_tps": (row.get(GENERATED_TOKENS), row.get("time/generate")),
        TRAIN_RATE: (row.get(TRAIN_FLOPS), row.get("time/train")),
    }
    return {name: amount / seconds for name, (amount, seconds) in rates.items() if amount and seconds}


class TrainingFlops:
    """Model FLOPs of a learner's updates, and model FLOPs utilization (MFU).

    The FLOPs are computed by `models.flops`. The MFU is the achieved fraction of the devices' peak.
    """

    def __init__(self, learner: TrainPlan, epochs: int) -> None:
        self._info = read_model(Path(learner.model.path))
        self._passes = epochs * (TRAINED_ADAPTERS if learner.lora else TRAINED)
        peak = peak_flops() if learner.model.dtype != "fp32" else None
        self._peak = peak and peak * len(learner.devices)

    def of_step(self, samples: Iterable[Sample]) -> dict[str, float]:
        """Return the metric `system/train_flops`: the FLOPs of a step's updates on `samples`."""
        each = (sequence_flops(self._info, len(one.tokens), one.response_length) for one in samples)
        return {TRAIN_FLOPS: self._passes * sum(each)}

    def utilisation(self, row: Mapping[str, float]) -> dict[str, float]:
        """Return the metric `system/mfu`.

        The dict is empty if the FLOPs per second of the step or the peak of the devices are not known.
        """
        rate = row.get(TRAIN_RATE)
        return {"system/mfu": rate / self._peak} if rate and self._peak else {}


def memory_metrics() -> dict[str, float]:
    """Return the metrics `system/memory_gib` and `system/device_memory_gib`.

    - `system/memory_gib` is the resident private memory of this process and its descendants.
    - `system/device_memory_gib` is the used memory of the fullest device, over all processes. It is missing without a
      GPU.
    """
    here = psutil.Process()
    own = sum(map(_private_bytes, (here, *here.children(recursive=True))))
    return {"system/memory_gib": own / GIB, **_device_memory()}


def _device_memory() -> dict[str, float]:
    try:
        used = [torch.cuda.device_memory_used(number) for number in range(torch.cuda.device_count())]
    except Exception:  # a run must not end because NVML is missing or fails
        return {}
    return {"system/device_memory_gib": max(used) / GIB} if used else {}


def _private_bytes(process: psutil.Process) -> int:
    try:
        memory = process.memory_info()
    except psutil.Error:
        return 0  # the process has ended
    return memory.rss - getattr(memory, "shared", 0)  # only Linux reports shared memory
