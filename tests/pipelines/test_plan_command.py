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


COSTS = "generate=4,teacher=1,train=2,weight_sync=0.1,spread=0.4"


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", "examples/demo/onpolicy_distill.yaml", *words])
    printed = capsys.readouterr()
    return code, printed.out, " ".join(printed.err.split())


@pytest.mark.extras
def test_plan_advises_a_bound_and_a_split(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("student_train.device_mapping=[0]", "teacher.device_mapping=[0]", "student_infer.device_mapping=[1]")
    code, text, _ = planned(capsys, *words, "--costs", COSTS, "--devices", "8")
    assert code == 0 and "fastest on 8 devices: async_generation_ratio: " in " ".join(text.split())
    code, text, _ = planned(capsys, *words, "--costs", COSTS, "--json")
    schedule = json.loads(text)["schedule"]
    assert schedule["configuration"]["step"] == pytest.approx(7.1, rel=0.05)
    assert schedule["fastest"]["2"]["step"] < 5


@pytest.mark.extras
def test_costs_of_a_run_are_medians_of_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first step is left out; stated costs replace measured ones."""
    rows = [
        {
            "step": step,
            "time/step": 9.0,
            "time/generate": 100.0 if step == 1 else float(step),
            "time/train": 2.0,
            "tokens/response_length/mean": 30.0,
            "tokens/response_length/max": 60.0,
        }
        for step in (1, 2, 3, 4)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, text, _ = planned(capsys, "--measured", str(tmp_path), "--costs", "teacher=0.5", "--json")
    costs = json.loads(text)["schedule"]["costs"]
    assert code == 0 and (costs["generate"], costs["teacher"], costs["train"]) == (3.0, 0.5, 2.0)
    assert 0 < costs["spread"] < 1


@pytest.mark.extras
def test_costs_that_mean_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ahead = {"step": 1, "time/step": 1.0, "rollout/async/age_mean": 1.0}
    (tmp_path / "metrics.jsonl").write_text(2 * (json.dumps(ahead) + "\n"))
    for words, message in (
        (["--costs", "generate=4"], "teacher, train, weight_sync are missing"),
        (["--costs", "speed=4"], "'speed=4' is not a cost"),
        (["--costs", f"{COSTS},fixed=2"], "'fixed=2' is not a cost"),
        (["--devices", "8"], "needs costs"),
        (["--costs", COSTS, "--devices", "many"], "are not numbers of devices"),
        (["--measured", str(tmp_path)], "has async rollouts"),
        (["--measured", str(tmp_path / "none")], "fewer than two steps"),
    ):
        code, _, error = planned(capsys, *words)
        assert code == 2 and message in error, (words, error)


def test_the_plan_is_refused_if_a_run_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What only this machine lacks is a warning; a missing correction of stale rewards is refused everywhere."""
    stale, cured = "async_generation_ratio=1", "+train_infer_correction={is_weight:{enabled:true}}"
    example = ["plan", "--json", "examples/demo/rlvr_opd.yaml", f"output_dir={tmp_path}"]
    for changes, code, said in (((stale,), 2, "async_generation_ratio"), ((stale, cured), 0, "")):
        assert main([*example, *changes]) == code
        printed = capsys.readouterr()
        assert said in printed.err and bool(printed.err) == bool(code)
        assert json.loads(printed.out)["roles"]
