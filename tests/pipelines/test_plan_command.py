"""`roll-opd plan` refuses user code that a run would refuse, with the same error."""

import json
from pathlib import Path

import pytest

from roll_opd.commands.main import main

WORKFLOW = "from roll_opd.workflows import WORKFLOWS, SimpleWorkflow\n\n\n@WORKFLOWS.register_module('NAME')\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["workflow=no_such_workflow"], "unknown workflow 'no_such_workflow'"),
        (["workflow=no_such_module.Mine"], "no_such_module cannot be imported"),
        (["workflow=simple_workflow", "workflow_reward=no_such_reward"], "unknown reward function 'no_such_reward'"),
        (["workflow=PLACE/NAME.py:Hooked"], "Hooked.compute_reward is never called"),
        (["workflow=NAME", "plugin_dir=PLACE"], "Hooked.compute_reward is never called"),
        (["workflow=NAME", "plugin_dir=PLACE/none"], "is not a directory"),
        (["workflow=agent_workflow", "+workflow_args={agent: PLACE/NAME.py:solve}"], "must take (row, base_url"),
        (["track_with=no_such_module.Tracker"], "no_such_module cannot be imported"),
    ],
)
def test_plan_refuses_user_code_that_a_run_refuses(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "class Hooked(SimpleWorkflow):\n    def compute_reward(self, response): ...\n\n\ndef solve(row): ...\n"
    name = f"hooked_{tmp_path.name}"  # of its own: modules stay imported
    (tmp_path / f"{name}.py").write_text((WORKFLOW + source).replace("NAME", name))
    given = [word.replace("PLACE", str(tmp_path)).replace("NAME", name) for word in words]
    code = main(["plan", "examples/demo/onpolicy_distill.yaml", "prompt_key=messages", *given])
    reported = " ".join(capsys.readouterr().err.split())
    assert code == 2 and message in reported


def test_what_a_module_prints_is_no_part_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"printing_{tmp_path.name}"
    source = WORKFLOW.replace("NAME", name) + "class Mine(SimpleWorkflow): ...\n\n\nprint('loading')\n"
    (tmp_path / f"{name}.py").write_text(source)
    own = [f"workflow={tmp_path}/{name}.py:Mine", "prompt_key=messages"]
    assert main(["plan", "--json", "examples/demo/onpolicy_distill.yaml", *own]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["mode"] == "pure" and "loading" in printed.err


def test_a_game_of_ones_own_is_looked_up(capsys: pytest.CaptureFixture[str]) -> None:
    game = "custom_envs.FrozenLake.env_type=no_such_module.Game"
    assert main(["plan", "examples/games/frozen_lake.yaml", game]) == 2
    assert "no_such_module cannot be" in " ".join(capsys.readouterr().err.split())
