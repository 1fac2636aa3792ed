"""The core without `roll_opd/extras`: it plans, and scores with `remote`, `format` and a short `math_rule`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll_opd.rewards.interface import RewardSample, Score
from roll_opd.rewards.reward_registry import REWARDS, resolve

REPOSITORY = Path(__file__).resolve().parents[1]
PROGRAM = """
import json, sys
from roll_opd.config.schema import PIPELINES
from roll_opd.planner.build import load_plan
from roll_opd.rewards.interface import RewardSample
from roll_opd.rewards.reward_registry import REWARDS, resolve

words = ["+rewards.shape.worker_cls=format", "+rewards.shape.tag_included=[none]"]
words += ["+rewards.far.worker_cls=remote", "+rewards.far.url=http://127.0.0.1:9/", "+rewards.far.tag_included=[other]"]
plans = {name: load_plan("examples/demo", name, words if name == "rlvr_opd" else [])
         for name in ("onpolicy_distill", "rlvr_opd")}
samples = [RewardSample("a", text, "#### 12", "t") for text in sys.argv[1:]]
print(json.dumps({
    "rewards": REWARDS.builtin,
    "pipelines": sorted(PIPELINES),
    "math_rule": REWARDS.find("math_rule").__module__,
    "terms": sorted(term.worker for reward in plans["rlvr_opd"].rewards for term in reward.terms),
    "modes": [plan.mode for plan in plans.values()],
    "scores": [score.value for score in resolve("math_rule")(samples)],
}))
"""
ANSWERS = {r"\boxed{12}": 1.0, r"It is $\frac{24}{2}$.": 1.0, "The answer is 13.": 0.0, "<think> 12": 0.0, "none": 0.0}


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package without its extras, beside the examples."""
    root = tmp_path_factory.mktemp("core")
    (root / "roll_opd").mkdir()
    for part in (REPOSITORY / "roll_opd").iterdir():
        if part.name != "extras":
            (root / "roll_opd" / part.name).symlink_to(part)
    for part in ("examples", "configs"):
        (root / part).symlink_to(REPOSITORY / part)
    return root


@pytest.mark.slow
def test_the_core_plans_and_scores_without_extras(core: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *ANSWERS],
        capture_output=True,
        text=True,
        cwd=core,
        env={**os.environ, "PYTHONPATH": str(core)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"format", "length_penalty", "math_rule", "remote"} == set(found["rewards"])
    assert found["math_rule"] == "roll_opd.rewards.builtin.math_rule"
    assert found["pipelines"] == ["dpo", "offline_distill", "rlvr", "sft"]
    assert found["terms"] == ["format", "math_rule", "remote"] and found["modes"] == ["pure", "mixed"]
    assert found["scores"] == list(ANSWERS.values())


@pytest.mark.extras
def test_the_extras_answer_if_they_are_there() -> None:
    """The full grader has the name `math_rule`; it also knows units, which math-verify does not compare."""
    assert REWARDS.find("math_rule").__module__ == "roll_opd.extras.graders.rewards.math_rule"
    (score,) = resolve("math_rule")([RewardSample("a", r"\boxed{1.5\text{ km}}", r"\boxed{1500\text{ m}}", "t")])
    assert isinstance(score, Score) and score.value == 1.0
