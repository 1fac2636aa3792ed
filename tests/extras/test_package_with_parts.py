"""An installed package brings a reward, a pipeline with its section, a command and a run hook."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
MODULE = '''
from collections.abc import Sequence
from dataclasses import dataclass

from argparse import ArgumentParser

from roll_opd.commands.main import Command
from roll_opd.config.schema import Many, Section, Top, ours
from roll_opd.rewards import RewardSample, register


@register("keyword", keeps_time=True)
def keyword(samples: Sequence[RewardSample], *, word: str = "please") -> list[float]:
    return [float(word in sample.response) for sample in samples]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--times", type=int)


GREET = Command("greet", add_arguments, lambda parsed: print("hello " * parsed.times) or 3)


@dataclass(frozen=True, kw_only=True)
class Curriculum(Section):
    """`curriculum`: the prompts of the first steps."""

    first: Many = ours(10, "number of steps with easy prompts")


@dataclass(frozen=True, kw_only=True)
class Staged(Top):
    """The pipeline staged."""

    pipeline = "staged"
    loop = "rlvr"
    own_keys = frozenset({"curriculum"})
    curriculum: Curriculum | None = ours(None, "the prompts of the first steps")
'''
ENTRIES = "[roll_opd.rewards]\nkeyword = my_parts:keyword\n\n[roll_opd.pipelines]\nstaged = my_parts:Staged\n"
ENTRIES += "\n[roll_opd.commands]\ngreet = my_parts:GREET\nbroken = my_parts:nothing\n"
PROGRAM = """
import json, sys
from roll_opd.base.failures import ConfigError
from roll_opd.commands.main import main
from roll_opd.planner.load_plan import load_plan

codes = [main(["greet", "--times", "2"]), main(["broken", "--times", "2"])]
words = ["+rewards.polite.worker_cls=keyword", "+rewards.polite.tag_included=[x]", "+rewards.polite.word=thanks"]
plan = load_plan("examples/demo", "rlvr_opd", [*words, "+curriculum.first=3"])
found = {"pipeline": plan.pipeline, "first": plan.pipeline_args["curriculum"].first}
found["terms"] = [[term.worker, dict(term.args), term.timeout] for reward in plan.rewards for term in reward.terms]
found |= {"problems": [], "codes": codes}
for wrong in ("+curriculum.first=0", "+rewards.polite.wrd=a"):
    try:
        load_plan("examples/demo", "rlvr_opd", [*words, wrong])
    except ConfigError as error:
        found["problems"] += error.problems
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_package_brings_a_reward_and_a_section(tmp_path: Path) -> None:
    (tmp_path / "my_parts.py").write_text(MODULE)
    (tmp_path / "my_parts-1.dist-info").mkdir()
    (tmp_path / "my_parts-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: my_parts\nVersion: 1\n")
    (tmp_path / "my_parts-1.dist-info" / "entry_points.txt").write_text(ENTRIES)
    path = os.pathsep.join(map(str, (REPOSITORY, tmp_path)))
    command = [sys.executable, "-c", PROGRAM]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["codes"] == [3, 2] and "hello hello" in done.stdout and "broken = my_parts:nothing" in done.stderr
    assert (found["pipeline"], found["first"]) == ("staged", 3)
    assert ["keyword", {"word": "thanks"}, None] in found["terms"]
    keys = [problem.partition(":")[0] for problem in found["problems"]]
    assert keys == ["curriculum.first", "rewards.polite.wrd"]
