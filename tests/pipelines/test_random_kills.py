"""Random kills of a run whose generation runs ahead: after each, the ledger has every prompt once.

    .venv/bin/python tests/pipelines/test_random_kills.py [KILLS] [SEED]

kills driver, engine, student, teacher or reward worker of a tiny run at random moments, and the driver inside a save;
resumes until all steps are made, and audits after each launch.
"""

import os
import random
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import runs
from test_ahead_runs import AHEAD, PROMPTS, trained

from roll_opd.tracking.ledger import audit
from roll_opd.tracking.run_directory import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

VICTIMS = {
    "engine": "ray::RolloutWorker",
    "student": "ray::TrainWorker",
    "teacher": "ray::LogprobWorker",
    "reward": "ray::RewardWorker",
}
KINDS = ("driver", "save", *VICTIMS)


class Killer:
    """Decides the kills of one launch; each waits for a step that this launch has logged."""

    def __init__(self, out: Path, rng: random.Random, kinds: list[str]) -> None:
        self._out, self._rng, self._kinds = out, rng, kinds
        self.done: list[str] = []
        self._seen = self._steps()
        self._plan()

    def _plan(self) -> None:
        self._polls = self._rng.randint(0, 150)  # of 10 ms, after the step

    def _steps(self) -> int:
        return sum(len(read_jsonl(file)) for file in self._out.glob("demo/latest/ledger.jsonl"))

    def __call__(self) -> bool:
        """Kill what is due; return whether that is the driver."""
        if not self._kinds or self._steps() <= self._seen:
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
        self.done.append(self._kinds.pop(0))
        self._seen = self._steps()
        self._plan()
        return kind in ("driver", "save")


def killed(out: Path, kills: int, seed: int) -> Counter[str]:
    """Run to the end through `kills` kills; return their number by kind."""
    rng = random.Random(seed)
    kinds = [KINDS[number % len(KINDS)] for number in range(kills)]
    rng.shuffle(kinds)
    steps, done, launches = 2 * kills + 2, Counter[str](), 0
    settings = (*AHEAD, f"max_steps={steps}", "save_steps=1", "async_generation_ratio=1", "max_ckpt_to_keep=2")
    while True:
        left = list(kinds)
        killer = Killer(out, rng, left)
        resume = () if launches == 0 else ("resume_from_checkpoint=true",)
        run = runs.launch(out, *settings, *resume, kill_when=killer)
        launches += 1
        done.update(killer.done)
        kinds = left
        assert killer.done or run.code == 0, run.output[-4000:]
        counts, errors = audit(run.path)
        print(f"launch {launches}: {', '.join(killer.done) or 'no kill'}, exit {run.code}, {counts}", flush=True)
        assert errors == []
        if run.code == 0:
            break
    assert len(trained(run)) == len(set(trained(run))) == steps * PROMPTS
    return done


def test_random_kills_lose_and_repeat_no_prompt(tmp_path: Path) -> None:
    assert sum(killed(tmp_path / "out", 6, seed=1).values()) == 6


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(killed(Path(place) / "out", *map(int, [*sys.argv[1:], 50, 1][:2])))
