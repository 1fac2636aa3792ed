"""The benchmarks for GPUs: the whole of the one that needs no vLLM with a tiny model on a CPU, and their arithmetic."""

import copy
import importlib
import json
import os
import re
import shlex
import shutil
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
def large(monkeypatch: pytest.MonkeyPatch):
    for directory in (BENCHMARKS, BENCHMARKS / "gpu"):
        monkeypatch.syspath_prepend(str(directory))
    yield importlib.import_module("large")
    for name in ("large", "limits", "models", "pipeline_run", "work", "machine_rates", "bare_parts", "shapes"):
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
    assert "all numbers are within their bounds" in done.stdout
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
    ("dtype", "name", "value", "reported"),
    [
        ("fp32", "logprob_max", 2e-4, "a deterministic log-prob is off by 0.0002"),
        ("fp32", "resumed_equal", False, "resumed_equal is false"),
        (
            "fp32",
            "sampled",
            {"loss": 1e-6, "gradient_norm": 0.01},
            "sampled: gradient_norm has a relative error of 0.01",
        ),
        ("fp32", "fast_max", 2e-4, "a fast log-prob is off by 0.0002"),
        ("bf16", "fast_mean", 1e-3, "fast log-probs are off by 0.001, Hugging Face's by 0.0005"),
        ("bf16", "full jsd", {"loss": 0.2, "gradient_norm": 0.0}, "full jsd: loss has a relative error of 0.2"),
    ],
)
def test_a_number_that_is_off_is_reported(measure, dtype: str, name: str, value: object, reported: str) -> None:
    found = copy.deepcopy(AGREES) | (
        {"theirs_mean": 5e-4, "logprob_mean": 5e-4, "fast_mean": 5e-4} if dtype == "bf16" else {}
    )
    assert measure.off(dtype, found) == []
    [said] = measure.off(dtype, found | {name: value})
    assert reported in said


def test_a_case_that_did_not_run_is_reported_and_one_that_is_too_large_is_a_result(measure) -> None:
    failed = {"0.6B": {"train": {"failed": "...\nRuntimeError: no kernel"}, "numerics": {"failed": "x"}}}
    assert measure.problems(failed, ["0.6B"]) == ["0.6B train: RuntimeError: no kernel", "0.6B numerics: x"]
    large = {"8B": {"device": "X", "train": {"out_of_memory": "tried"}, "teacher": {}}}
    assert measure.problems(large, ["8B"]) == []
    assert measure.cell(large["8B"], "train", 1e15) == "too large"
    fast = {"train": {"tokens_a_second": 1000.0, "flops_a_second": 4e14}}
    assert measure.cell(fast, "train", 1e15) == "1000  40.0%"


def test_the_larger_loop_is_a_plan_for_one_gpu_with_roles_that_take_turns(large, tmp_path: Path) -> None:
    from pipeline_run import ONLY_STEPS

    from roll_opd.planner.load_plan import load_plan

    models = {role: ROOT / "examples/demo/models" / role for role in ("student", "teacher")}
    settings = large.settings_of(large.parse([]), models)
    plan = load_plan("demo", "onpolicy_distill", [*ONLY_STEPS, f"output_dir={tmp_path}", *settings], pure=True)
    roles = [plan.student, plan.teachers[0].source, plan.rollout]
    assert {role.devices for role in roles} == {(0,)} and {role.model.dtype for role in roles} == {"bf16"}
    assert plan.student.mini_batch_sequences == plan.sequences_per_step == 256
    assert plan.rollout.engine_args["max_num_seqs"] == 256 and plan.rollout.sampling.max_new_tokens == 1024
    assert "enforce_eager" not in plan.rollout.engine_args  # CUDA graphs are vLLM's default


@pytest.mark.nightly
@pytest.mark.slow
def test_the_larger_loop_runs_with_small_models_on_a_cpu_and_its_table_has_every_part(tmp_path: Path) -> None:
    command = ["--device", "cpu", "--student", "small", "--teachers", "small", "--steps", "3", "--warmup", "1"]
    few = ["rollout_batch_size=4", "response_length=12", "student_train.training_args.per_device_train_batch_size=16"]
    few.append("student_train.training_args.gradient_accumulation_steps=1")
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu/large.py", *command, *few, "--json", str(tmp_path / "found")],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "making models" in done.stdout and "step 1/3" in done.stdout.replace("  ", " ")  # the run's own lines
    [found] = json.loads((tmp_path / "found").read_text())["runs"].values()
    phases = {"generate", "teacher", "train", "weight_sync"}
    assert found["phases"].keys() == phases == found["bare"].keys() - {"step"}
    assert found["moves"].keys() == {"student", "teacher", "engines"}
    assert found["moves"]["student"]["bytes"] > found["moves"]["teacher"]["bytes"] > 0
    table = done.stdout.split("medians of 2 steps")[1]
    assert all(f"\n{name} " in table for name in (*phases, "other", "step")) and "no part runs in" in table


@pytest.fixture
def questions(large):
    """`questions.py`, beside the modules that the fixture `large` finds."""
    yield importlib.import_module("questions")
    sys.modules.pop("questions", None)


def test_every_question_about_a_loop_or_a_weight_sync_is_a_plan_for_its_cards(
    questions, large, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline_run import ONLY_STEPS

    from roll_opd.planner.load_plan import load_plan

    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (140 * 2**30, 141 * 2**30))
    models = {role: tmp_path / role for role in ("student", "teacher")}
    for role, model in models.items():  # with as many positions as the models of the questions
        shutil.copytree(ROOT / "examples/demo/models" / role, model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40_960}))
    seen = []
    for name, question in questions.QUESTIONS.items():
        asked = shlex.split(question.on_card.format(flops=1e12, tflops=1.0, bytes=1e11))
        names, settings = ("demo", "onpolicy_distill"), [word for word in asked if "=" in word]
        if question.file == questions.LOOP:
            options = large.parse(asked)
            names, settings = large.configuration(options), large.settings_of(options, models)
        elif question.file != questions.SYNC:
            continue
        plan = load_plan(*names, [*ONLY_STEPS, f"output_dir={tmp_path}", *settings], pure=True)
        roles = [plan.student, plan.teachers[0].source, plan.rollout]
        assert {role.model.dtype for role in roles} == {"bf16"}, name
        assert plan.devices_per_node == question.cards and plan.num_nodes == 1, name
        if question.file == questions.LOOP:
            assert {role.devices for role in roles} == {(0,)}, name
            assert plan.student.mini_batch_sequences == plan.sequences_per_step, f"{name}: one update per step"
        if "--memory" in asked:
            assert plan.rollout.engine_args["gpu_memory_utilization"] * 141 < 0.7 * 24
        seen.append(name)
    assert len(seen) >= 8


def test_a_question_is_answered_once_and_the_list_says_so(questions, tmp_path: Path) -> None:
    def called(*words: str) -> str:
        command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", str(tmp_path), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    called("nccl-one-card")
    kept = json.loads((tmp_path / "nccl-one-card.json").read_text())
    assert kept["found"]["arrived"] and kept["exit_code"] == 0 and kept["versions"]["torch"]
    called("nccl-one-card")
    assert json.loads((tmp_path / "nccl-one-card.json").read_text()) == kept
    states = {line.split()[0]: line.split()[-1] for line in called("--list").splitlines()}
    assert states == dict.fromkeys(questions.QUESTIONS, "open") | {"nccl-one-card": "recorded"}


def test_the_page_says_which_questions_a_card_has_answered(questions) -> None:
    page = (BENCHMARKS / "README.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE))
    assert list(rows) == list(questions.QUESTIONS)
    answered = {file.stem for file in (BENCHMARKS / "results/gpu").glob("*/*.json") if "found" in file.read_text()}
    assert {name for name, state in rows.items() if state != "not yet"} == answered & rows.keys()


def test_shown_lines_are_the_pipelines_own_each_once(large, tmp_path: Path) -> None:
    from pipeline_run import ShownLog

    log, said = tmp_path / "log", []
    log.write_text(
        "step 1/2  loss 0.5\n\x1b[36m(Worker pid=1)\x1b[0m hello\n\nUserWarning: old\n  warnings.warn(\nhalf of"
    )
    shown = ShownLog(log, said.append)
    shown.look()
    with log.open("a") as file:
        file.write(" a line\n")
    shown.look()
    shown.look()
    assert said == ["step 1/2  loss 0.5", "half of a line"]


@pytest.fixture
def profiling(monkeypatch: pytest.MonkeyPatch):
    for directory in (BENCHMARKS, BENCHMARKS / "gpu"):
        monkeypatch.syspath_prepend(str(directory))
    names = ("events", "predicted", "parts", "shapes", "work", "cures")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.nightly
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


def test_bytes_of_a_predicted_update_are_those_of_its_tensors(profiling) -> None:
    """An update of a model so small that its tensors can be listed: every weight, moment and gradient of AdamW."""
    import torch

    shape = profiling["shapes"].SHAPES["tiny"]
    found = profiling["predicted"].predicted(shape, [48], 43, 1, learns=True, rates=(1e30, 1.0))
    heads, groups, width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    of_layer = [
        (heads + 2 * groups, width),
        (width, heads),
        (2 * shape.intermediate, width),
        (width, shape.intermediate),
    ]
    masters = [torch.empty(size) for size in [(shape.vocab, width), *of_layer * shape.layers]]
    state = sum(2 * 3 * one.nbytes + one.nbytes for one in masters)  # weight and moments twice, the gradient once
    half = sum(one.nbytes // 2 for one in masters)
    assert found["optimizer"] == state + 2 * half + half  # the f32 weight is read again, and written in bf16
    logits = torch.empty(43, shape.vocab)
    assert found["loss and softmax of the head"] == 2 * logits.nbytes + logits.nbytes // 2
    assert found["residual"] == 6 * 48 * shape.layers * width * 2


def test_predicted_cures_are_below_what_was_measured_and_add_up_to_less_than_the_pass(profiling) -> None:
    cures = profiling["cures"]
    found = cures.cures(json.loads(cures.RECORD.read_text()))
    assert {one.work for one in found} == {"train", "teacher"}
    assert all(0 < one.predicted < one.measured <= one.whole for one in found)
    flash3 = {one.work: one for one in found if "flash" in one.cure}
    # a scoring pass has no backward kernels
    assert flash3["teacher"].predicted == pytest.approx(flash3["teacher"].measured / cures.FLASH3_FORWARD, rel=0.01)
    assert flash3["teacher"].saved == pytest.approx(0.087, abs=0.001)


def test_a_predicted_step_scales_with_the_teacher_and_counts_moves_by_their_bytes(profiling) -> None:
    cures, shapes = profiling["cures"], profiling["shapes"].SHAPES
    one, other = (cures.predicted_loop(shapes["0.6B"], shapes[name]) for name in ("1.7B", "4B"))
    assert other["train"] == one["train"] and other["teacher"] > 2 * one["teacher"]
    parameters = 151_936 * 1024 + 28 * (1024 * 4096 + 2048 * 1024 + 3 * 1024 * 3072)
    assert one["student to the host"] == pytest.approx(14 * parameters / 54e9)
    assert one["engine awake, level 1"] == pytest.approx(2 * parameters / 49e9)
    assert all(name in "\n".join(cures.table([], {"a": one, "b": other})) for name in one)
