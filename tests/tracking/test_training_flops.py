"""Model FLOPs of a step's updates, and their fraction of a GPU's peak rate."""

import stat
from dataclasses import replace
from pathlib import Path

import pytest
from tracking_assets import experience

from roll_opd.config.plan import Layout, LoraPlan, MicroBatchLimits, ModelPlan, OptimizerPlan, TrainPlan
from roll_opd.tracking.throughput import TrainingFlops, throughput_metrics

STUDENT = Path(__file__).parents[2] / "examples/demo/models/student"
LIMITS = MicroBatchLimits()
LEARNER = TrainPlan(
    name="student_train",
    model=ModelPlan(str(STUDENT), "bf16"),
    devices=(0, 1),
    layout=Layout(dp=2),
    forward_limits=LIMITS,
    train_limits=LIMITS,
    mini_batch_sequences=8,
    optimizer=OptimizerPlan(),
)


@pytest.fixture
def h100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver's tool that reports two H100."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'NVIDIA H100 80GB HBM3\\nNVIDIA H100 80GB HBM3\\n'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_flops_are_those_of_three_passes_over_every_sequence() -> None:
    """By hand for the demo's student: 3 layers of 2 heads of 32 over 96 numbers, a vocabulary of 320."""
    samples = [experience(number) for number in range(4)]
    wanted = 0
    for sample in samples:
        length = len(sample.tokens)
        matrices = 3 * (96 * 32 * (2 * 2 + 2 * 2) + 3 * 96 * 256)
        attention = 3 * 4 * 2 * 32 * length * (length + 1) // 2
        wanted += 2 * matrices * length + attention + 2 * 96 * 320 * sample.response_length
    assert TrainingFlops(LEARNER, 1).of_step(samples) == {"system/train_flops": 3 * wanted}
    adapted = replace(LEARNER, lora=LoraPlan(("q_proj",), 4, 8.0))
    assert TrainingFlops(adapted, 2).of_step(samples) == {"system/train_flops": 2 * 2 * wanted}


def test_utilisation_is_the_share_of_the_peak_of_all_devices(h100: None) -> None:
    row = throughput_metrics({"system/train_flops": 989e12, "time/train": 2.0})
    assert row == {"system/train_flops_per_second": 989e12 / 2}
    assert TrainingFlops(LEARNER, 1).utilisation(row) == {"system/mfu": 0.25}
    in_f32 = replace(LEARNER, model=ModelPlan(str(STUDENT), "fp32"))
    assert TrainingFlops(in_f32, 1).utilisation(row) == {} == TrainingFlops(LEARNER, 1).utilisation({})


def test_without_a_known_gpu_there_is_no_utilisation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert TrainingFlops(LEARNER, 1).utilisation({"system/train_flops_per_second": 1e12}) == {}
