"""Kills of a model's processes in a run that goes on: each prompt is trained once, with the same bits.

    .venv/bin/python tests/pipelines/test_lost_processes.py [--kills 50] [--steps 4] [--record FILE]

kills engines, their cores, ranks of teachers and of the student, at random moments of several kinds of runs, some by
SIGSTOP. Each run is compared with one without kills. `--steps` is the number of steps per kill. The record has, for
each kill, the seconds until the next step was logged, and for each loss the phase in which the run noticed it; beside
them stand the median of the steps without a kill, and the seconds after a kill of the driver, which restarts the whole
run.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import runs
from runs import RLVR, Run
from test_random_kills import SETTINGS as AHEAD
from test_random_kills import equal_steps

from roll_opd.tracking.audit import audit
from roll_opd.tracking.run_directory import read_jsonl

pytestmark = pytest.mark.slow

VICTIMS = {
    "engine": "ray::RolloutWorker",
    "core": "",
    "teacher": "ray::LogprobWorker",
    "student": "ray::TrainWorker",
}
DRIVER = "driver"
PURE = (
    "deterministic=true",
    "rollout_batch_size=16",
    "student_train.device_mapping=[0]",
    "teacher.strategy_args.strategy_config.tensor_model_parallel_size=2",
    "student_train.training_args.gradient_accumulation_steps=1",
    "student_train.training_args.lr_scheduler_type=constant",
    "validation=null",
    "eval_steps=0",
    "save_steps=3",
    "logged_samples_per_step=16",
)
KINDS: dict[str, tuple[str, ...]] = {
    "in turns": PURE,
    "top-k, two ranks": (
        *PURE,
        "opd_objective=topk",
        "opd_topk=8",
        "student_train.device_mapping=[0,1]",
        "student_train.training_args.per_device_train_batch_size=32",
    ),
    "whole vocabulary": (*PURE, "opd_objective=full"),
    "shared devices": (*PURE, "is_offload_states=true"),
    "ahead": (*AHEAD, "actor_infer.device_mapping=[0,1]"),
    "ahead, one engine": AHEAD,
}
HUNG_S = 12


class Killer:
    """Kills the next of `victims` after one or two further steps, at a random moment, while the run continues."""

    def __init__(self, out: Path, rng: random.Random, victims: Sequence[str]) -> None:
        self._out, self._rng, self._left = out, rng, list(victims)
        self.done: list[dict[str, Any]] = []
        self.step_seconds: list[float] = []  # of steps without a kill
        self._steps, self._at, self._struck = 0, 0.0, False
        self._plan()

    def _plan(self) -> None:
        self._after, self._due = self._steps + self._rng.randint(1, 2), self._rng.random()

    def __call__(self) -> bool:
        now, steps = time.monotonic(), max((row["step"] for row in self._logged()), default=0)
        if steps > self._steps:
            if self._struck and self.done[-1]["until the next step"] is None:
                self.done[-1]["until the next step"] = round(now - self.done[-1].pop("at"), 2)
            elif self._at and not self._struck:
                self.step_seconds.append(now - self._at)
            self._struck = False
        if steps != self._steps:
            self._steps, self._at = steps, now
        due = self._at + self._due * statistics.median(self.step_seconds or [0.5])
        waits = self._struck or not self._left or steps < self._after or now < due
        if not waits and (victims := self._victims(self._left[0].removesuffix(" hangs"))):
            name = self._left.pop(0)
            number = signal.SIGSTOP if name.endswith("hangs") else signal.SIGKILL
            victim = self._rng.choice(victims).pid
            os.kill(victim, number)
            self.done.append({"lost": name, "pid": victim, "after step": steps, "until the next step": None, "at": now})
            self._struck = True
            self._plan()
        return False  # the driver stays

    def _victims(self, name: str) -> list[psutil.Process]:
        if name == DRIVER:  # the child of the process that restarts it
            launched = runs.of_run(self._out, f"{sys.executable} {runs.REPOSITORY / 'examples/start_'}")
            return [each for each in launched if each.ppid() in {other.pid for other in launched}]
        if name != "core":
            return runs.of_run(self._out, VICTIMS[name])
        engines = runs.of_run(self._out, VICTIMS["engine"])
        try:  # cores are forks without a title of the server that has forked the engines
            server = engines[0].parent() if engines else None
            forks = server.children() if server else []
            return [each for each in forks if server and each.cmdline() == server.cmdline() and not each.children()]
        except psutil.Error:
            return []

    def _logged(self) -> list[dict]:
        return [row for file in self._out.glob("demo/latest/ledger.jsonl") for row in read_jsonl(file)]


def launched(out: Path, kind: str, steps: int, *more_settings: str, **more: Any) -> Run:
    is_ahead = kind.startswith("ahead")
    config, launcher = ("demo", "rlvr_opd" if is_ahead else "onpolicy_distill"), RLVR if is_ahead else runs.PURE
    settings = (*KINDS[kind], "exp_name=demo", f"max_steps={steps}", f"hang_timeout_s={HUNG_S}", *more_settings)
    return runs.launch(out, *settings, launcher=launcher, config=config, **more)


def survived(
    place: Path, kind: str, victims: Sequence[str], steps: int, seed: int, unbroken: Run | None = None
) -> dict[str, Any]:
    """Run with kills, and compare with the run without them, if it is given; return the record."""
    killer = Killer(place, random.Random(seed), victims)
    run = launched(place, kind, steps, f"max_restarts={len(victims) if DRIVER in victims else 0}", kill_when=killer)
    assert run.code == 0, run.output[-6000:]
    counts, errors = audit(run.path)
    assert errors == [] and counts["steps"] == steps
    if unbroken:
        assert equal_steps(run.path, unbroken.path) == steps
        weights = f"checkpoints/step_{steps}/hf/model.safetensors"
        assert (run.path / weights).read_bytes() == (unbroken.path / weights).read_bytes()
    losses = run.rows("losses.jsonl")
    if set(victims) != {DRIVER}:
        assert counts["lost processes"] == len(losses) > 0  # a kill may hit a unit that is being replaced
    assert len(killer.done) == len(victims)
    for each in killer.done:
        each.pop("at", None)
    return {
        "kind": kind,
        "kills": killer.done,
        "losses": [{key: row[key] for key in ("what", "phase", "remedy", "seconds")} for row in losses],
        "median step, s": round(statistics.median(killer.step_seconds or [0.0]), 2),
        "seconds": round(run.seconds, 1),
        "seconds of the unbroken run": round(unbroken.seconds, 1) if unbroken else None,
    }


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_survives_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    victims = ("core", "student", "teacher", "engine hangs")
    steps = 4 + 4 * len(victims)
    survived(tmp_path / "killed", kind, victims, steps, 2, launched(tmp_path / "unbroken", kind, steps))


@pytest.mark.nightly
def test_a_supervised_run_continues_after_the_loss_of_its_student(tmp_path: Path) -> None:
    def trained(out: Path, *, kills: bool) -> Run:
        def kill() -> bool:
            steps = [row["step"] for file in out.glob("demo/latest/metrics.jsonl") for row in read_jsonl(file)]
            if kills and not done and max(steps, default=0) >= 5:
                done.append(runs.of_run(out, VICTIMS["student"])[0])
                done[0].kill()
            return False

        done: list[psutil.Process] = []
        settings = ("exp_name=demo", "max_steps=12", "save_steps=3", "deterministic=true")
        return runs.launch(out, *settings, launcher="start_sft_pipeline.py", config=("demo", "sft"), kill_when=kill)

    one, other = (trained(tmp_path / str(kills), kills=kills) for kills in (False, True))
    assert one.code == other.code == 0, other.output[-4000:]
    assert len(other.rows("losses.jsonl")) == 1 and [r["step"] for r in other.rows("metrics.jsonl")] == [*range(13)]
    weights = "checkpoints/step_12/hf/model.safetensors"
    assert (one.path / weights).read_bytes() == (other.path / weights).read_bytes()


def multiples(launches: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return for each victim the median time until the next step, in steps of the same run."""
    found = defaultdict(list)
    for launch in launches:
        for kill in launch["kills"]:
            if kill["until the next step"]:
                found[kill["lost"]].append(kill["until the next step"] / launch["median step, s"])
    return {name: round(statistics.median(values), 2) for name, values in sorted(found.items())}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=4, help="steps per kill")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path, help="JSON file for the record")
    options = parser.parse_args(arguments)
    place, rng = Path(tempfile.mkdtemp(prefix="lost-")), random.Random(options.seed)  # remains after a failure
    victims = [*VICTIMS, *VICTIMS, "engine hangs", "teacher hangs", "student hangs"]
    chosen = [victims[number % len(victims)] for number in range(options.kills)]
    rng.shuffle(chosen)
    launches: list[dict[str, Any]] = []
    for number, kind in enumerate(KINDS):
        own = chosen[number :: len(KINDS)]
        steps = 4 + options.steps * len(own)
        unbroken = launched(place / f"unbroken{number}", kind, steps, seconds=1800.0)
        launches.append(survived(place / f"killed{number}", kind, own, steps, options.seed + number, unbroken))
        launches.append(survived(place / f"restarted{number}", kind, [DRIVER, DRIVER], steps, options.seed, unbroken))
        print(json.dumps(launches[-2:]), flush=True)
        done = Counter(each["lost"] for launch in launches for each in launch["kills"])
        noticed = Counter(loss["phase"] or "between phases" for launch in launches for loss in launch["losses"])
        record = {
            "kills in all": done.total(),
            "kills": dict(sorted(done.items())),
            "phases": dict(noticed.most_common()),
            "steps of a run until the next step, median": multiples(launches),
            "launches": launches,
        }
        if options.record:
            options.record.write_text(json.dumps(record, indent=1) + "\n")
    shutil.rmtree(place)


if __name__ == "__main__":
    main()
