"""The arithmetic and the command lines of the benchmarks; only one small measurement is started."""

import importlib
import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from roll_opd.planner.load_plan import load_plan
from roll_opd.rewards.interface import RewardSample
from roll_opd.workers.reward_pool import RewardWorker
from roll_opd.workers.sampler import RolloutWorker

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def logprob_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("logprob_memory")
    sys.modules.pop("logprob_memory", None)


@pytest.fixture
def step_overhead(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("step_overhead")
    for name in ("step_overhead", "bare_parts", "pipeline_run"):
        sys.modules.pop(name, None)


@pytest.fixture
def in_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("in_turns")
    for name in ("in_turns", "pipeline_run"):
        sys.modules.pop(name, None)


def test_memory_of_a_transfer_is_reported_with_its_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    weight_sync = importlib.import_module("weight_sync")
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n")
    assert weight_sync.kilobytes(str(tmp_path / "status"), "VmHWM:") == 2 * 2**20
    found = {
        "model_bytes": 300 * 2**20,
        "sent_bytes": 300 * 2**20,
        "bucket_bytes": 64 * 2**20,
        "kept_bytes": {"student": 3 * 2**19},
        "new_shared_files": 0,
        "seconds": [0.2, 0.3, 0.4],
        "gigabytes_a_second": 1,
    }
    reported = weight_sync.table(found | {"growth_bytes": {"student": 130 * 2**20}, "together_bytes": 140 * 2**20})
    assert (
        "median 0.300" in reported
        and "student 130" in reported
        and "student 1.5; new files in /dev/shm: 0" in reported
        and "140 MiB; two buckets and the model are 428" in reported
    )
    for name in ("weight_sync", "process_memory", "models", "pipeline_run"):
        sys.modules.pop(name, None)


@pytest.fixture
def data_plane(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("data_plane")
    for name in ("data_plane", "driver_cost", "pipeline_run", "synthetic_roles"):
        sys.modules.pop(name, None)


def metrics(train: float, checkpoint: float) -> dict[str, float]:
    lap = {"generate": 0.5, "teacher": 0.25, "train": train, "validate": 1.0, "checkpoint": checkpoint, "other": 0.0}
    row = {f"time/{name}": seconds for name, seconds in lap.items()}
    return {**row, "time/step": sum(lap.values()), "step": 7, "rollout/generated_tokens": 100.0, "actor/lr": 1.0}


def test_validation_and_checkpoints_are_no_part_of_a_step(step_overhead):
    row = step_overhead.pipeline_row(metrics(train=0.75, checkpoint=30.0))
    assert row == {"generate": 0.5, "teacher": 0.25, "train": 0.75, "other": 0.0, "step": 1.5, "tokens": 100.0}


def test_the_ratio_is_the_median_step_over_the_median_sum_of_parts(step_overhead):
    pipeline = [step_overhead.pipeline_row(metrics(train, 0.0)) for train in (0.75, 0.85, 50.0)]  # one outlier
    parts = {"generate": 0.4, "teacher": 0.2}
    bare = [{**parts, "train": t, "step": 0.6 + t, "tokens": 100.0} for t in (0.7, 0.9, 0.65)]
    result = step_overhead.compare(pipeline, bare)
    assert result["ratio"] == pytest.approx((0.5 + 0.25 + 0.85) / (0.4 + 0.2 + 0.7))
    assert result["parts"]["train"] == {"bare": 0.7, "pipeline": 0.85}
    assert result["parts"]["other"] == {"bare": None, "pipeline": 0.0}
    assert result["tokens"] == {"bare": 300.0, "pipeline": 300.0}


def test_two_sides_have_their_own_settings(in_turns, capsys: pytest.CaptureFixture[str]):
    options, sides = in_turns.parse(["--window", "3", "seed=1", "--", "seed=2", "~workflow"])
    assert (options.window, options.steps, sides) == (3, 60, (["seed=1"], ["seed=2", "~workflow"]))
    for wrong in (["seed=1"], ["--window", "1", "--"]):
        with pytest.raises(SystemExit, match="2"):
            in_turns.parse(wrong)
    assert "write -- between" in capsys.readouterr().err


def test_sides_are_compared_by_their_means(in_turns):
    side = {"settings": [], "mean": 1.0, "median": 0.9, "steps": 9, "cpu": {"others": 1.5}}
    other = {**side, "mean": 1.1, "cpu": {"others": 1.5, "ray::WorkflowWorker": 0.5}}
    text = in_turns.table({"sides": [side, other], "ratio": 1.1})
    assert "second / first = 1.100" in text and "ray::WorkflowWorker" in text
    (line,) = (line for line in text.splitlines() if line.startswith("CPU, all processes"))
    assert line.split()[-3:] == ["1.500", "2.000", "1.333"]


def test_the_table_names_every_part_and_warns_of_unequal_work(step_overhead):
    pipeline = [step_overhead.pipeline_row(metrics(0.75, 0.0))]
    bare = [{"generate": 0.4, "teacher": 0.2, "train": 0.65, "step": 1.25, "tokens": 100.0}]
    text = step_overhead.table(step_overhead.compare(pipeline, bare))
    assert all(name in text for name in ("generate", "teacher", "train", "other", "= 1.200"))
    assert "WARNING" not in text
    bare[0]["tokens"] = 90.0
    assert "WARNING" in step_overhead.table(step_overhead.compare(pipeline, bare))


def test_arguments_of_step_overhead_are_read(step_overhead):
    options = step_overhead.parse(["--steps", "5", "--at-most", "1.15", "rollout_batch_size=8"])
    assert (options.steps, options.at_most, options.overrides) == (5, 1.15, ["rollout_batch_size=8"])
    assert step_overhead.parse([]).at_most is None


@pytest.mark.parametrize("arguments", [["--steps", "3"], ["--rounds", "0"], ["--warmup", "-1"]])
def test_nothing_left_to_measure_is_refused(step_overhead, arguments):
    with pytest.raises(SystemExit) as ended:
        step_overhead.parse(arguments)
    assert ended.value.code == 2


def test_log_probs_of_both_ways_are_compared(logprob_memory):
    one = {"logprobs": -10.0, "hidden_grad": 1.0, "weight_grad": 2.0}
    rounds = {
        "eager": [{**one, "seconds": seconds, "extra_bytes": 6000} for seconds in (2.0, 1.0, 9.0)],
        "chunked": [{**one, "seconds": seconds, "extra_bytes": 300} for seconds in (2.5, 3.0, 2.0)],
    }
    result = logprob_memory.compare(rounds)
    assert (result["memory_saving"], result["time_ratio"]) == (20.0, 1.25)
    rounds["chunked"] = [{**row, "weight_grad": 2.1} for row in rounds["chunked"]]
    with pytest.raises(ValueError, match="weight_grad"):
        logprob_memory.compare(rounds)


def test_what_a_step_of_the_driver_is_made_of(data_plane, capsys: pytest.CaptureFixture[str]):
    lengths_of = importlib.import_module("lengths").lengths_of
    assert set(lengths_of("fixed", 3, seed=1)) == {1024}
    assert set(lengths_of("short", 3, seed=1)) == {32}
    tail = lengths_of("tail", 5000, seed=1)
    assert tail.min() >= 16 and tail.max() == 16_384 and 2000 < tail.mean() < 2800
    commands = data_plane.overrides_of("pure", 1000, 4, 2, Path("out"))
    assert "rollout_batch_size=120" in commands  # of 8 answers: two mini-batches of 120 on each of 4 ranks
    assert "student_train.training_args.per_device_train_batch_size=120" in commands
    with pytest.raises(SystemExit, match="2"):
        data_plane.parse(["--sequences", "63"])
    assert "--sequences" in capsys.readouterr().err


def test_processes_without_a_model_are_called_as_real_ones(data_plane):
    synthetic = importlib.import_module("synthetic_roles")
    for stands, real in ((synthetic.Engine, RolloutWorker), (synthetic.Scorer, RewardWorker)):
        role = real.__ray_metadata__.modified_class
        shared = [name for name in vars(stands) if name in dir(role) and not name.startswith("_")]
        assert len(shared) > 1
        for name in shared:
            asked = [one for one in inspect.signature(getattr(role, name)).parameters if not one.startswith("_")]
            inspect.signature(getattr(stands, name)).bind(None, **dict.fromkeys(asked[1:]))  # Ray adds one with _


def test_cpu_time_belongs_to_the_innermost_part(data_plane):
    driver_cost = importlib.import_module("driver_cost")
    frames = {}
    inner = compile("frames['seen'] = sys._getframe()", "/x/roll_opd/samples/transport.py", "exec")
    outer = "def learn(code, names):\n    exec(code, names)\nlearn(code, names)"
    names = {"frames": frames, "sys": sys}
    exec(compile(outer, "/x/roll_opd/workers/student.py", "exec"), {"code": inner, "names": names})
    assert driver_cost.part_of(frames["seen"]) == "updates"
    assert driver_cost.part_of(sys._getframe()) == driver_cost.REST
    assert driver_cost.memory()["RssAnon"] > 2**20


@pytest.mark.nightly
@pytest.mark.slow
def test_memory_is_measured(logprob_memory):
    """One small round of each way in processes of their own: they agree, and the eager one holds its logits."""
    command = [sys.executable, str(BENCHMARKS / "logprob_memory.py"), "--rounds", "1", "--unbounded"]
    answer = subprocess.run([*command, "--tokens=512", "--hidden=16", "--vocab=40000"], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    eager = float(next(line for line in answer.stdout.splitlines() if line.startswith("eager")).split()[1])
    assert eager > 3 * 512 * 40_000 * 4 / 2**20 * 0.9  # log-probs, their gradient, the logits' gradient


def test_the_slow_reward_scores_as_the_quick_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    slow_reward = importlib.import_module("slow_reward")
    samples = [RewardSample("a", "3+4=7", "7", "t"), RewardSample("b", "3+4=8", "7", "t")]
    assert [score.value for score in slow_reward.slow(samples, seconds=0.001)] == [1.0, 0.0]
    sys.modules.pop("slow_reward", None)


@pytest.fixture
def async_table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("async_table")
    for name in ("async_table", "loglog", "pipeline_run"):
        sys.modules.pop(name, None)


def test_a_cell_of_the_async_table_has_its_bar_ages_and_alarm(async_table) -> None:
    shares = [1.0, 0.5, 0.2, 0.2, 0.1, 0.1]
    rows = [{"step": 0, "val_correct/all/mean": 0.1}]
    for step, share in enumerate(shares, 1):
        effective = {"rollout/mismatch/ess_sequence": share, "rollout/mismatch/k1": 0.02}
        rows.append({"step": step, "time/step": 2.0, "rollout/async/age_mean": 1.0, **effective})
    rows[3]["val_correct/all/mean"], rows[6]["val_correct/all/mean"] = 0.92, 0.7
    found = async_table.figures(rows, async_table.TASKS["demo"])
    assert [found[name] for name in ("first", "best", "last", "steps to the bar", "alarm at")] == [0.1, 0.92, 0.7, 3, 5]
    assert (found["mean age"], found["least ess"], found["seconds"]) == (1.0, 0.1, 12.0)
    line = async_table.table([{"cell": "demo", "S": 1.0, "seed": 42, **found}]).splitlines()[-1]
    assert line == "| demo | 1 | 42 | 0.1 | 0.92 | 0.7 | 0.9 | 3 | 1 | 0.1 | 5 |"


def test_throughput_is_relative_to_the_synchronous_run_and_its_longer_part(async_table, monkeypatch) -> None:
    def launched(task, *settings: str) -> list[dict[str, float]]:
        is_ahead = "async_generation_ratio=1" in settings
        parts = {"step": 2.0 if is_ahead else 3.5, "generate": 1.5, "teacher": 0.5, "train": 1.25, "weight_sync": 0.1}
        row = {**{f"time/{name}": value for name, value in parts.items()}, "rollout/generated_tokens": 70.0}
        return [{"step": step, **row} for step in range(1, 9)]

    monkeypatch.setattr(async_table, "launched", launched)
    synchronous, ahead = async_table.throughput([0, 1], 8, (), times=(0.75, 1.25))
    assert synchronous["speed-up"] == 1 and ahead["speed-up"] == pytest.approx(1.75)
    assert ahead["step / longer part"] == pytest.approx(2 / 1.75)
    assert ahead["simulated step"] == pytest.approx(1.85, rel=0.1)
    assert async_table.svg([synchronous, ahead, {**ahead, "S": 2}]).startswith("<svg")


@pytest.mark.nightly
def test_every_cell_of_the_async_table_has_a_valid_configuration(async_table, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(BENCHMARKS.parent)
    (tmp_path / "slow.py").write_text(async_table.SLOW_WORKFLOW)
    waiting = replace(
        async_table.TASKS["demo"], launcher=async_table.STATED, settings=(*async_table.DEMO, *async_table.stated(0.5))
    )
    for task, bound in [(task, 1) for task in (*async_table.TASKS.values(), waiting)] + [
        (t, 8) for t in async_table.SIGNALS.values()
    ]:
        plugins = [f"plugin_dir={tmp_path}"] if any("_answers" in word for word in task.settings) else []
        settings = [*task.settings, *plugins, f"async_generation_ratio={bound}", f"output_dir={tmp_path}/output"]
        plan = load_plan(*task.config, settings, pure=task.launcher != async_table.RLVR, runnable=False)
        assert (
            plan.async_generation_ratio == bound and plan.validation and (BENCHMARKS.parent / task.launcher).is_file()
        )
        assert plan.student.mini_batch_sequences == plan.rollout_batch_size * plan.rollout.sampling.n
