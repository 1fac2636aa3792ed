"""Trackers in a run: consistent, resumed, failing, hanging, or written by the user."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.summary.writer import event_file_writer

from roll_opd.base.registry import argument_problems, arguments, defaults
from roll_opd.tracking import builtin
from roll_opd.tracking.metrics_writer import MetricsWriter, TrackerTimeouts
from roll_opd.tracking.run_directory import METRICS, SAMPLES, RunDirectory, read_jsonl
from roll_opd.tracking.tracker_registry import (
    TRACKERS,
    TrackerError,
    TrackerFacts,
    as_list,
    find,
    register,
    run_id,
)

IMPATIENT = TrackerTimeouts(opening=0.2, silence=0.2, closing=0.3, retries=(0.01,), rows=5)


PAGE = Path(__file__).parents[2] / "docs" / "trackers.md"
NEW_TRACKER = """
from roll_opd.tracking.tracker_registry import register

@register("notes", packages=("no_such_package",))
class NotesTracker:
    def __init__(self, run, resume_step, *, size: int = 3) -> None:
        self.file, self.size = run.path / "notes", size

    def log(self, step, metrics):
        self.file.write_text(f"{step} {self.size}")

    def close(self):
        pass
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "exp")


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(directory))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def logged(run: RunDirectory) -> list[int]:
    return [row["step"] for row in read_jsonl(run.metrics_file)]


def eventually(true: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


# the user's own, named by their dotted path `test_trackers.<class>`
sys.modules["test_trackers"] = sys.modules[__name__]


class Recorder:
    """Records its arguments."""

    made: "Recorder"

    def __init__(self, run: RunDirectory, resume_step: int | None, greeting: str = "") -> None:
        self.run, self.resume_step, self.greeting = run, resume_step, greeting
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        Recorder.made = self

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed += 1


class Flaky(Recorder):
    """Raises the first time it sees an even step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step % 2 == 0 and step not in self.__dict__.setdefault("seen", []):
            self.seen.append(step)
            raise OSError("connection lost")
        super().log(step, metrics)


class Failing(Recorder):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step >= 2:
            raise OSError("connection lost")

    def close(self) -> None:
        raise OSError("a dropped tracker is left alone")


class Exiting(Recorder):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise SystemExit("a library thinks that it is a program")


class NotClosing(Recorder):
    def close(self) -> None:
        raise OSError("disk full")


class NotOpening:
    def __init__(self, run: RunDirectory, resume_step: int | None) -> None:
        raise ConnectionError("no route to host")


class Hanging(Recorder):
    """Hangs in one of its three calls until the test releases it."""

    release: threading.Event

    def __init__(self, run: RunDirectory, resume_step: int | None, where: str) -> None:
        super().__init__(run, resume_step)
        self.where = where
        self._hang("open")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._hang("log")
        super().log(step, metrics)

    def close(self) -> None:
        self._hang("close")
        super().close()

    def _hang(self, call: str) -> None:
        if call == self.where:
            Hanging.release.wait(60)


class SlowThenFailing(Hanging):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step >= 2:
            raise OSError("connection lost")


@pytest.fixture
def release() -> threading.Event:
    Hanging.release = threading.Event()
    yield Hanging.release
    Hanging.release.set()


def test_trackers_agree_and_resume_replaces_later_steps(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    trackers = MetricsWriter.open(("tensorboard", "stdout"), run)
    assert trackers.names == ("jsonl", "tensorboard", "stdout")
    for step in (1, 2, 3):
        trackers.log(step, {"opd/x": float(step)})
    steps = [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert eventually(lambda: scalars(run.tensorboard) == {"opd/x": steps})  # before any close
    trackers.close()
    trackers.close()
    assert "step=3 opd/x=3" in capsys.readouterr().out
    trackers.log(4, {"opd/x": 4.0})  # after the end: for metrics.jsonl alone
    assert trackers.names == ("jsonl",)

    run = RunDirectory.resume(run.path, step=2)
    trackers = MetricsWriter.open(("tensorboard",), run, resume_step=2)
    trackers.log(3, {"opd/x": 30.0})
    trackers.close()
    assert scalars(run.tensorboard) == {"opd/x": [(1, 1.0), (2, 2.0), (3, 30.0)]}
    rows = [(row["step"], row["opd/x"]) for row in read_jsonl(run.path / METRICS)]
    assert rows == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_charts_go_on_after_resumes(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event files of an interrupted run are those of a run without a resume, also if steps are repeated."""
    # files of one second are read in the order of their names, and 10 is before 9
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))

    def metrics(step: int) -> dict[str, float]:
        late, early = float(step == 9), float(step == 1)
        return {
            **{"rollout/filtered_prompts": early, "actor/ratio_mean": 1.0 + late, "critic/clipfrac": 0.0},
            **{"opd/x": 0.1 * step, "opd/same": 0.1 * step, "opd/other": 0.1 * step + early},
        }

    def part(resume_step: int | None, last: int) -> None:
        trackers = MetricsWriter.open(("tensorboard",), run, resume_step=resume_step)
        for step in range((resume_step or 0) + 1, last + 1):
            trackers.log(step, metrics(step))
        trackers.close()

    part(None, 3)
    for resume_step, last in ((2, 5), (5, 9), (6, 12)):
        RunDirectory.resume(run.path, step=resume_step)
        part(resume_step, last)
    found = {name: [step for step, _ in points] for name, points in scalars(run.tensorboard).items()}
    charts = ("rollout/filtered_prompts", "actor/ratio_mean", "opd/x", "opd/other")
    assert found == {name: [*range(1, 13)] for name in charts}


def test_a_tracker_gets_its_own_arguments(run: RunDirectory, tmp_path: Path) -> None:
    args = {"tensorboard": {"log_dir": str(tmp_path / "tb")}, "test_trackers.Recorder": {"greeting": "hello"}}
    trackers = MetricsWriter.open(args, run, resume_step=7, args=args)
    trackers.log(8, {"x": 1.0})
    trackers.close()
    assert scalars(tmp_path / "tb") == {"x": [(8, 1.0)]}
    mine = Recorder.made
    assert (mine.run, mine.resume_step, mine.greeting) == (run, 7, "hello")
    assert (mine.rows, mine.closed) == ([(8, {"x": 1.0})], 1)


def test_close_writes_every_row_of_a_slow_tracker(run: RunDirectory) -> None:
    trackers = MetricsWriter.open(("test_trackers.Recorder",), run)
    for step in range(500):
        trackers.log(step, {"x": 1.0})
    trackers.close()
    assert [step for step, _ in Recorder.made.rows] == list(range(500))


def test_a_call_that_raises_is_retried(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    trackers = MetricsWriter.open(("test_trackers.Flaky",), run, timeouts=IMPATIENT)
    for step in (1, 2, 3, 4):
        trackers.log(step, {"x": 1.0})
    trackers.close()
    assert [step for step, _ in Recorder.made.rows] == [1, 2, 3, 4]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("tracker", "words"),
    [
        ("Failing", "failed at step 2 and is dropped: OSError('connection lost')"),
        ("Exiting", "failed at step 1 and is dropped: SystemExit("),
        ("NotOpening", "could not be opened: ConnectionError('no route to host')"),
        ("NotClosing", "could not be closed: OSError('disk full')"),
    ],
)
def test_a_tracker_that_raises_causes_one_warning_and_no_other_tracker_stops(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], tracker: str, words: str
) -> None:
    trackers = MetricsWriter.open((f"test_trackers.{tracker}", "stdout"), run, timeouts=IMPATIENT)
    for step in range(1, 5):
        trackers.log(step, {"x": 1.0})
    trackers.close()
    seen = capsys.readouterr()
    [warning] = seen.err.splitlines()
    assert warning.startswith(f"warning: tracker test_trackers.{tracker} {words}")
    assert "the run continues without it" in warning
    assert seen.out.count("step=") == 4
    assert logged(run) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("open", ["has not started after 0 s", "does not respond and is dropped at step 6;"]),
        ("log", ["has not responded for 0 s at step 2", "does not respond and is dropped at step 7;"]),
        ("close", ["was not closed 0 s after the last step"]),
    ],
)
def test_a_tracker_that_hangs_delays_no_step(
    run: RunDirectory,
    release: threading.Event,
    capsys: pytest.CaptureFixture[str],
    where: str,
    words: list[str],
) -> None:
    name = "test_trackers.Hanging"
    began = time.monotonic()
    trackers = MetricsWriter.open((name, "stdout"), run, args={name: {"where": where}}, timeouts=IMPATIENT)
    assert time.monotonic() - began < 2
    trackers.log(1, {"x": 1.0})
    time.sleep(2 * IMPATIENT.silence)
    slowest, printed, warned = 0.0, "", ""

    def stdout_has(step: int) -> bool:
        nonlocal printed, warned
        seen = capsys.readouterr()
        printed, warned = printed + seen.out, warned + seen.err
        return printed.count("step=") == step

    for step in range(2, 21):
        began = time.monotonic()
        trackers.log(step, {"x": 1.0})
        slowest = max(slowest, time.monotonic() - began)
        assert eventually(lambda step=step: stdout_has(step))  # a step of training: one that takes rows is never behind
    began = time.monotonic()
    trackers.close()
    assert slowest < 1 and time.monotonic() - began < 2  # it hangs until the test ends
    assert stdout_has(20)
    warnings = warned.splitlines()
    assert len(warnings) == len(words) and all(map(str.__contains__, warnings, words)), warnings
    assert logged(run) == list(range(1, 21))
    assert trackers.names == ("jsonl",)


def test_a_tracker_that_returns_in_time_has_every_row(run: RunDirectory, release: threading.Event) -> None:
    name = "test_trackers.Hanging"
    trackers = MetricsWriter.open((name,), run, args={name: {"where": "open"}}, timeouts=IMPATIENT)
    for step in range(1, 5):
        trackers.log(step, {"x": 1.0})
    release.set()
    trackers.close()
    assert [step for step, _ in Recorder.made.rows] == [1, 2, 3, 4]
    assert Recorder.made.closed == 1


def test_a_tracker_that_was_slow_once_is_dropped_with_a_warning(
    run: RunDirectory, release: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "test_trackers.SlowThenFailing"
    trackers = MetricsWriter.open((name,), run, args={name: {"where": "open"}}, timeouts=IMPATIENT)
    release.set()
    for step in (1, 2, 3):
        trackers.log(step, {"x": 1.0})
    trackers.close()
    slow, dropped = capsys.readouterr().err.replace("\n  ", " ").splitlines()
    assert slow.startswith(f"warning: tracker {name} has not started after 0 s")
    assert dropped.startswith(f"warning: tracker {name} failed at step 2 and is dropped: OSError('connection lost')")


def test_metrics_after_a_failed_write_are_written(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    trackers = MetricsWriter.open((), run)
    run.metrics_file.mkdir()  # whatever keeps a file from being written
    trackers.log(1, {"x": 1.0})
    trackers.log(2, {"x": 1.0})
    run.metrics_file.rmdir()
    trackers.log(3, {"x": 1.0})
    assert capsys.readouterr().err.count("warning: metrics.jsonl cannot be written at step 1") == 1
    assert logged(run) == [3]


def test_unknown_tracker_names_are_errors() -> None:
    with pytest.raises(TrackerError, match="unknown tracker 'nowhere'; known are jsonl, mlflow"):
        find("nowhere")
    with pytest.raises(TrackerError, match=r"the module no\.such cannot be imported"):
        find("no.such.Tracker")
    with pytest.raises(TrackerError, match=r"test_trackers \(.*\) has no class named Nothing"):
        find("test_trackers.Nothing")


def test_a_name_is_registered_once() -> None:
    register("of_this_test")(Recorder)
    assert find("of_this_test") is Recorder
    with pytest.raises(TrackerError, match="'of_this_test' is already registered"):
        register("of_this_test")(Failing)


def test_a_run_keeps_its_id_at_a_service(run: RunDirectory) -> None:
    assert run_id(run, "wandb", lambda: "one") == "one"
    assert run_id(run, "wandb", lambda: "two") == "one"
    assert run_id(run, "mlflow", lambda: "three") == "three"


def test_a_new_tracker_is_one_file(tmp_path: Path, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.py").write_text(NEW_TRACKER)
    monkeypatch.setattr(builtin, "__path__", [*builtin.__path__, str(tmp_path)])
    try:
        assert "notes" in TRACKERS.builtin and "notes" in TRACKERS.known
        assert TRACKERS.facts("notes") == TrackerFacts(packages=("no_such_package",))
        assert set(arguments(find("notes"), given_by_us=2)) == {"size"}
        wrong = dict(argument_problems(find("notes"), {"size": 1.5}, given_by_us=2))
        assert wrong == {"size": "should be a valid integer, got 1.5"}
        trackers = MetricsWriter.open(("notes",), run, args={"notes": {"size": 5}})
        trackers.log(1, {"x": 1.0})
        trackers.close()
        assert (run.path / "notes").read_text() == "1 5"
    finally:
        TRACKERS._registered.pop("notes", None)
        sys.modules.pop("roll_opd.tracking.builtin.notes", None)


def test_arguments_are_annotated_and_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in TRACKERS.builtin:
        taken = arguments(find(name), given_by_us=2)
        assert all(one.annotation is not one.empty for one in taken.values())
        assert list(argument_problems(find(name), defaults(find(name), 2), given_by_us=2)) == []
        [row] = [line for line in page.splitlines() if line.startswith(f"| `{name}`")]
        assert [key for key in taken if f"`{key}`" not in row] == []


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_one_tag_is_a_list_of_one(name: str) -> None:
    for tags in ("one", ["one", "two"], ("one",)):
        assert list(argument_problems(find(name), {"tags": tags}, given_by_us=2)) == []
    [(key, problem)] = argument_problems(find(name), {"mode": "onlin"}, given_by_us=2)
    assert key == "mode" and "'online'" in problem and "'disabled'" in problem
    assert (as_list("one"), as_list(("one", "two"))) == (["one"], ["one", "two"])


def test_finding_a_tracker_imports_none_of_its_packages() -> None:
    program = (
        "import sys; from roll_opd.tracking.tracker_registry import TRACKERS\n"
        "needed = {'torch', *(p for name in TRACKERS.builtin for p in TRACKERS.facts(name).packages)}\n"
        "print(len(needed), needed & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "7 set()\n"


def test_tensorboard_shows_samples_and_the_configuration_as_text(run: RunDirectory) -> None:
    """Samples of the first and the last step, and of fewer and fewer steps between them."""
    run.write_config("max_steps: 20\n")
    tracker = find("tensorboard")(run, None)
    for step in range(1, 21):
        rows = [{"id": f"{step}-{n}", "prompt": "# 1+1", "response": "<b>2", "reward": 0.5} for n in range(4)]
        run.append_jsonl(SAMPLES, [{"step": step, **row} for row in rows])
        tracker.log(step, {"opd/reverse_kl/mean": 1 / step, "critic/kl": 1 / step, "actor/skipped_updates": 0.0})
    tracker.close()
    events = EventAccumulator(str(run.tensorboard), size_guidance={"tensors": 0})
    events.Reload()
    shown = {tag: events.Tensors(tag) for tag in events.Tags()["tensors"]}
    layout = layout_pb2.Layout.FromString(shown.pop("custom_scalars__config__")[0].tensor_proto.string_val[0])
    panels = [set(chart.multiline.tag) for category in layout.category for chart in category.chart]
    assert {"opd/reverse_kl/mean"} in panels and {
        "critic/score/mean",
        "val_correct/all/mean",
        "val/reward/all/mean",
    } in panels
    assert shown.keys() == {"config/text_summary", *(f"samples/{n}/text_summary" for n in range(3))}
    assert shown["config/text_summary"][0].tensor_proto.string_val[0] == b"    max_steps: 20"
    first = shown["samples/0/text_summary"]
    assert [event.step for event in first] == [1, 2, 3, 4, 5, 7, 9, 12, 15, 19, 20]
    text = first[0].tensor_proto.string_val[0].decode()
    assert "1-0" in text and "reward 0.5" in text and "\n    # 1+1\n" in text and "    <b>2" in text
    assert scalars(run.tensorboard).keys() == {"opd/reverse_kl/mean"}
