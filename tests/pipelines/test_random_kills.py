"""Random kills of a deterministic run with async rollouts: each prompt is trained once, with the same bits.

    .venv/bin/python tests/pipelines/test_random_kills.py [--kills 50] [--steps 200] [--minutes 60] [--record FILE]

kills the driver (also inside a save), an engine, the student, a teacher, the processes of rewards and workflows, or all
processes of the host, at random moments; resumes until all steps are complete, and audits after each launch. A second
run without kills, at the same time, must have the same samples and end with the same weights. After `--minutes` no part
is killed any more. The record is written after each launch.
"""

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import runs
from runs import RLVR, Run

from roll_opd.tracking.audit import audit
from roll_opd.tracking.run_directory import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

VICTIMS = {
    "engine": "ray::RolloutWorker",
    "student": "ray::TrainWorker",
    "teacher": "ray::LogprobWorker",
    "reward": "ray::RewardWorker",
    "workflow": "ray::WorkflowWorker",
}
KINDS = ("driver", "save", "host", *VICTIMS)
REAPER = "process_reaper"  # removes the files of a killed run, as the restart of a host does
PROMPTS, RUNS = 4, 2  # few: a deterministic engine answers one request of a workflow at a time
SETTINGS = (
    "exp_name=demo",
    "deterministic=true",
    "async_generation_ratio=1",
    "+train_infer_correction={is_weight: {enabled: true}}",
    "workflow=on_policy_distill_workflow",
    "prompt_key=messages",
    "workflow_workers=1",
    f"rollout_batch_size={PROMPTS}",
    f"num_return_sequences_in_group={RUNS}",
    f"actor_train.training_args.per_device_train_batch_size={PROMPTS * RUNS}",
    "actor_train.training_args.gradient_accumulation_steps=1",
    "actor_train.training_args.lr_scheduler_type=constant",
    "teacher.device_mapping=[0]",
    "teacher.strategy_args.strategy_config.tensor_model_parallel_size=1",
    "validation=null",
    "eval_steps=0",
    "save_steps=1",
    "max_ckpt_to_keep=2",
    f"logged_samples_per_step={PROMPTS * RUNS}",
)


class Killer:
    """Decides the kills of one launch; each waits for 1 to `most` steps that this launch has logged."""

    def __init__(self, out: Path, rng: random.Random, kinds: list[str], most: int, deadline: float) -> None:
        self._out, self._rng, self._kinds, self._most, self._deadline = out, rng, kinds, most, deadline
        self.done: list[str] = []
        self._plan()

    def _plan(self) -> None:
        self._after = self._steps() + self._rng.randint(1, self._most)
        self._polls = self._rng.randint(0, 150)  # of 10 ms, after the step

    def _steps(self) -> int:
        return sum(len(read_jsonl(file)) for file in self._out.glob("demo/latest/ledger.jsonl"))

    def __call__(self) -> bool:
        """Kill a part if its time has come; return whether the driver is the next part to kill."""
        if not self._kinds or time.monotonic() > self._deadline or self._steps() < self._after:
            return False
        self._polls -= 1
        kind = self._kinds[0]
        if kind == "save":
            if not list(self._out.glob("demo/latest/checkpoints/.partial_step_*")):
                return False
        elif self._polls > 0:
            return False
        if kind in VICTIMS:
            victims = runs.of_run(self._out, VICTIMS[kind])
            if not victims:
                return False
            os.kill(self._rng.choice(victims).pid, signal.SIGKILL)
        elif kind == "host":
            for process in runs.of_run(self._out, ""):
                with suppress(psutil.Error):
                    if not any(REAPER in word for word in process.cmdline()):
                        process.kill()
        self.done.append(self._kinds.pop(0))
        self._plan()
        return kind in ("driver", "save", "host")


def launched(out: Path, *settings: str, **more: Any) -> Run:
    config = ("demo", "rlvr_opd")
    return runs.launch(out, *SETTINGS, *settings, launcher=RLVR, config=config, seconds=3600.0, **more)


def killed(
    place: Path, kills: int, steps: int, seed: int, minutes: float, keep: Callable[[list], None]
) -> tuple[Run, list[dict[str, Any]]]:
    """Run `steps` steps through `kills` kills; return the run, and a row for each launch. `keep` receives all rows."""
    rng = random.Random(seed)
    kinds = [KINDS[number % len(KINDS)] for number in range(kills)]
    rng.shuffle(kinds)
    launches: list[dict[str, Any]] = []
    deadline, most = time.monotonic() + 60 * minutes, max(1, 2 * steps // kills - 3)
    while True:
        killer = Killer(place / "killed", rng, kinds, most, deadline)
        resume = ("resume_from_checkpoint=true",) if launches else ()
        run = launched(place / "killed", f"max_steps={steps}", *resume, kill_when=killer)
        assert killer.done or run.code == 0, run.output[-4000:]
        counts, errors = audit(run.path)
        launches.append({"kills": killer.done, "exit": run.code, "seconds": round(run.seconds, 1), **counts})
        launches[-1]["steps equal to the unbroken run's"] = equal_steps(run.path, place / "unbroken/demo/latest")
        print(f"launch {len(launches)}: {json.dumps(launches[-1])}", flush=True)
        keep(launches)
        assert errors == []
        if run.code == 0:
            return run, launches


def equal_steps(one: Path, other: Path) -> int:
    """Return how many steps both runs have; their draws, versions and samples must be equal."""
    draws, others = runs.draws_of(one), runs.draws_of(other)
    samples, other_samples = [read_jsonl(place / "samples.jsonl") for place in (one, other)]
    steps = min(len(draws), len(others))
    assert draws[:steps] == others[:steps]
    assert [row for row in samples if row["step"] <= steps] == [row for row in other_samples if row["step"] <= steps]
    return steps


def trained(run: Run) -> list[str]:
    return [name for row in run.rows("prompts.jsonl") for name in row["ids"]]


def record_of(launches: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    done = Counter(kind for launch in launches for kind in launch["kills"])
    return {**more, "kills": dict(sorted(done.items())), "kills in all": done.total(), "launches": launches}


def replayed(
    place: Path, kills: int, steps: int, seed: int, minutes: float = 60.0, keep: Callable[[dict], None] = print
) -> dict[str, Any]:
    """Compare a run with kills with an unbroken run; return the record."""
    settings: dict[str, Any] = {"steps": steps, "seed": seed}

    def keep_launches(rows: list[dict[str, Any]]) -> None:
        keep(record_of(rows, **settings))

    with ProcessPoolExecutor(1) as pool:
        running = pool.submit(launched, place / "unbroken", f"max_steps={steps}")
        run, launches = killed(place, kills, steps, seed, minutes, keep_launches)
        unbroken = running.result()
    assert unbroken.code == 0, unbroken.output[-4000:]
    assert equal_steps(run.path, unbroken.path) == steps and len(trained(run)) == steps * PROMPTS
    weights = f"checkpoints/step_{steps}/hf/model.safetensors"
    assert (run.path / weights).read_bytes() == (unbroken.path / weights).read_bytes()
    settings["same weights at the end as the unbroken run"] = True
    record = record_of(launches, **settings, **{"seconds of the unbroken run": round(unbroken.seconds, 1)})
    keep(record)
    return record


def test_random_kills_lose_and_repeat_no_prompt_and_change_no_bit(tmp_path: Path) -> None:
    assert replayed(tmp_path, len(KINDS), steps=2 * len(KINDS) + 2, seed=1)["kills in all"] == len(KINDS)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="no kills after this time")
    parser.add_argument("--record", type=Path, help="JSON file for the record")
    options = parser.parse_args(arguments)

    def keep(record: dict[str, Any]) -> None:
        if options.record:
            options.record.write_text(json.dumps(record, indent=1) + "\n")

    place = Path(tempfile.mkdtemp(prefix="kills-"))  # remains after a failure
    record = replayed(place, options.kills, options.steps, options.seed, options.minutes, keep)
    shutil.rmtree(place)
    print(json.dumps({name: value for name, value in record.items() if name != "launches"}, indent=1))


if __name__ == "__main__":
    main()
