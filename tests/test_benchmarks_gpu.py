"""The benchmarks for GPUs: the whole of the one that needs no vLLM with a tiny model on a CPU, and their arithmetic."""

import copy
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
OBJECTIVE = {"loss": 1e-6, "gradient_norm": 1e-6}
AGREES = {
    "logprob_mean": 1e-7,
    "logprob_max": 1e-6,
    "fast_mean": 1e-7,
    "fast_max": 1e-6,
    "theirs_mean": 0.0,
    "export_equal": True,
    "twice_equal": True,
    "resumed_equal": True,
    "learned": True,
    "sampled": OBJECTIVE,
    "full jsd": OBJECTIVE,
}


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch):
    for directory in (BENCHMARKS, BENCHMARKS / "gpu"):
        monkeypatch.syspath_prepend(str(directory))
    yield importlib.import_module("measure")
    for name in ("measure", "shapes"):
        sys.modules.pop(name, None)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch):
    for directory in (BENCHMARKS, BENCHMARKS / "gpu"):
        monkeypatch.syspath_prepend(str(directory))
    yield importlib.import_module("loop")
    for name in ("loop", "limits", "models", "pipeline_run", "work", "machine_rates"):
        sys.modules.pop(name, None)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_tiny_model_on_a_cpu_agrees_with_hugging_face_in_every_objective_and_is_timed(tmp_path: Path) -> None:
    command = ["--device", "cpu", "--shapes", "tiny", "--peak-tflops", "0.1", "--json", str(tmp_path / "found")]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu/measure.py", *command],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all numbers as they should be" in done.stdout
    found = json.loads((tmp_path / "found").read_text())["tiny"]
    exact = found["numerics"]["fp32"]
    assert max(exact["logprob_max"], exact["fast_max"]) < 1e-5
    assert exact["twice_equal"] and exact["resumed_equal"] and exact["export_equal"]
    objectives = {name: values for name, values in exact.items() if isinstance(values, dict)}
    assert len(objectives) == 7
    assert all(max(values.values()) < 1e-4 for values in objectives.values()), objectives
    for part in ("train", "teacher"):
        assert found[part]["tokens_a_second"] > 0 and found[part]["flops_a_second"] > 0
    assert found["export"]["bytes"] > 2 * 64 * 307
    assert found["head"]["chunked"]["off"] < 0.05


@pytest.mark.parametrize(
    ("dtype", "name", "value", "told"),
    [
        ("fp32", "logprob_max", 2e-4, "a deterministic log-prob is off by 0.0002"),
        ("fp32", "resumed_equal", False, "resumed_equal is false"),
        ("fp32", "sampled", {"loss": 1e-6, "gradient_norm": 0.01}, "sampled: gradient_norm is off by 0.01"),
        ("fp32", "fast_max", 2e-4, "a fast log-prob is off by 0.0002"),
        ("bf16", "fast_mean", 1e-3, "fast log-probs are off by 0.001, Hugging Face's by 0.0005"),
        ("bf16", "full jsd", {"loss": 0.2, "gradient_norm": 0.0}, "full jsd: loss is off by 0.2"),
    ],
)
def test_a_number_that_is_off_is_told(measure, dtype: str, name: str, value: object, told: str) -> None:
    found = copy.deepcopy(AGREES) | (
        {"theirs_mean": 5e-4, "logprob_mean": 5e-4, "fast_mean": 5e-4} if dtype == "bf16" else {}
    )
    assert measure.off(dtype, found) == []
    [said] = measure.off(dtype, found | {name: value})
    assert told in said


def test_what_did_not_run_is_told_and_what_is_too_large_is_a_result(measure) -> None:
    failed = {"0.6B": {"train": {"failed": "...\nRuntimeError: no kernel"}, "numerics": {"failed": "x"}}}
    assert measure.problems(failed, ["0.6B"]) == ["0.6B train: RuntimeError: no kernel", "0.6B numerics: x"]
    large = {"8B": {"device": "X", "train": {"out_of_memory": "tried"}, "teacher": {}}}
    assert measure.problems(large, ["8B"]) == []
    assert measure.cell(large["8B"], "train", 1e15) == "too large"
    fast = {"train": {"tokens_a_second": 1000.0, "flops_a_second": 4e14}}
    assert measure.cell(fast, "train", 1e15) == "1000  40.0%"


def test_the_whole_loop_has_a_configuration_for_one_gpu(loop, tmp_path: Path) -> None:
    from limits import LARGER
    from pipeline_run import ONLY_STEPS

    from roll_opd.planner.build import load_plan

    settings = [*ONLY_STEPS, f"output_dir={tmp_path}", "max_steps=6", *LARGER, "teacher_preflight=false"]
    plan = load_plan("demo", "onpolicy_distill", [*settings, *loop.SETTINGS], pure=True)
    roles = [plan.student, plan.teachers[0].source, plan.rollout]
    assert {role.devices for role in roles} == {(0,)} and {role.model.dtype for role in roles} == {"bf16"}
    assert plan.student.mini_batch_sequences == plan.sequences_per_step == 256
    assert plan.rollout.engine_args["max_num_seqs"] == 256


@pytest.fixture
def profiling(monkeypatch: pytest.MonkeyPatch):
    for directory in (BENCHMARKS, BENCHMARKS / "gpu"):
        monkeypatch.syspath_prepend(str(directory))
    names = ("events", "predicted", "parts", "shapes", "work")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_a_profile_of_a_tiny_model_on_a_cpu_has_every_family_and_all_of_the_time(tmp_path: Path) -> None:
    command = ["--device", "cpu", "--shape", "tiny", "--without", "all", "--json", str(tmp_path / "found")]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu/kernel_profile.py", *command, "--traces", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found").read_text())["passes"]
    learned = {"optimizer", "gradient accumulation", "gradient norm", "gradients finite"}
    both = {
        "products",
        "products of the head",
        "loss and softmax of the head",
        "attention",
        "norm",
        "SwiGLU",
        "residual",
    }
    assert both <= found["teacher"]["families"].keys() and not learned & found["teacher"]["families"].keys()
    assert both | learned <= found["train"]["families"].keys()
    for name, one in found.items():
        assert (tmp_path / f"{name}.json.gz").stat().st_size > 1000
        assert 0.2 * one["span_seconds"] < one["busy_seconds"] < 1.1 * one["span_seconds"]
        assert one["families"].get("other", {"seconds": 0})["seconds"] < 0.3 * one["busy_seconds"]
        assert one["predicted"].keys() >= both
    for name in ("loss", "grad_norm"):
        assert found["train"][name] == pytest.approx(found["train"]["without"]["all"][name], rel=1e-5)


def test_a_backward_kernel_belongs_to_its_forward_operators_part_and_gaps_are_between_kernels(profiling) -> None:
    events, prefix = profiling["events"], profiling["parts"].PREFIX
    forward = [
        events.Event(prefix + "norm", 0, 100),
        events.Event("aten::norm", 10, 90, number=1, sequence=7),
        events.Event("aten::mul", 20, 40, number=2),
    ]
    backward = [
        events.Event(events.BACKWARD + ": NormBackward0", 200, 300, thread=1, sequence=7),
        events.Event("aten::mul", 210, 220, thread=1, number=3),
        events.Event(events.BACKWARD + ": torch::autograd::AccumulateGrad", 300, 400, thread=1),
        events.Event("aten::add_", 310, 320, thread=1, number=4),
    ]
    operators = [*forward, *backward]
    events.nest(operators)
    parts = events.parts_of(operators)
    by_number = {event.number: event for event in operators if event.number}
    families = [events.family("elementwise", parts, by_number.get(number)) for number in (1, 2, 3, 4, 5)]
    assert families == ["norm", "norm", "norm", "gradient accumulation", "other"]
    assert events.family("nvjet_gemm", parts, by_number[2]) == "products"
    assert events.spans([events.Event("a", 0, 10), events.Event("b", 5, 20), events.Event("c", 50, 60)]) == (3e-8, [30])


def test_predicted_products_are_the_counted_flops_over_the_rate(profiling) -> None:
    shape = profiling["shapes"].SHAPES["1.7B"]
    lengths = [3000, 2000]
    found = profiling["predicted"].predicted(shape, lengths, 5000, 1, learns=True, rates=(1e12, 1e30))
    once = profiling["predicted"].predicted(shape, lengths, 5000, 1, learns=False, rates=(1e12, 1e30))
    matrices = 28 * (2048 * 4096 + 2048 * 2048 + 3 * 2048 * 6144)
    assert once["products"] == pytest.approx(2 * matrices * 5000 / 1e12)
    assert found["products"] == pytest.approx(3 * once["products"])
    assert found["products of the head"] == pytest.approx(4 * once["products of the head"])
    assert found["attention"] == pytest.approx(3.5 * once["attention"])
