"""Defects of ROLL that a configuration can cause, by their numbers in the list of defects; none may occur here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from config_assets import write_config

from roll_opd.commands.main import main
from roll_opd.config.plan import RunPlan

Plan = Callable[..., RunPlan]
Problems = Callable[..., list[str]]


def _mixed(values: dict[str, Any]) -> None:
    values["actor_train"], values["actor_infer"] = values.pop("student_train"), values.pop("student_infer")
    values |= {"use_opd": True, "adv_estimator": "reinforce"}


def test_defect_01_top_level_coefficient_counts(plan: Plan, values: dict[str, Any]) -> None:
    assert [teacher.opd_kl_coef for teacher in plan({"opd_kl_coef": 0.5}).teachers] == [0.5]
    values["teacher"] = {"only": values["teacher"]}
    assert [teacher.opd_kl_coef for teacher in plan().teachers] == [0.5]
    _mixed(values)
    assert [teacher.opd_kl_coef for teacher in plan(pure=False).teachers] == [0.5]
    assert [teacher.opd_kl_coef for teacher in plan({"opd_kl_coef": 0}, pure=False).teachers] == [0.0]


def test_defect_02_teacher_with_only_model_args_is_one_teacher(plan: Plan, values: dict[str, Any], root: Path) -> None:
    """Such a section is the single-teacher form; the error names a missing key by its place in this form."""
    model_args = values["teacher"]["model_args"]
    del model_args["dtype"]
    run = plan({"teacher": {"model_args": model_args, "device_mapping": "[2,3]"}})
    assert [(teacher.name, teacher.source.model.path) for teacher in run.teachers] == [
        ("teacher", str(root / "teacher"))
    ]
    run = plan({"teacher": {"model_args": model_args}})
    (teacher,) = run.teachers
    assert teacher.source.model.path == str(root / "teacher")
    assert teacher.source.devices == run.student.devices
    assert any(text.startswith("teacher.device_mapping: is not written") for text in run.warnings)


def test_defect_02_misspelt_model_args_is_no_teacher_of_that_name(problems: Problems, values: dict[str, Any]) -> None:
    model_args = values["teacher"]["model_args"]
    for section in ({"model_arg": model_args}, {"model_arg": model_args, "device_mapping": "[2,3]"}):
        found = problems({"teacher": section})
        assert found[0].startswith("teacher.model_arg: unknown key; did you mean 'model_args'?")


def test_defect_03_a_missing_path_never_becomes_the_student(plan: Plan, problems: Problems, root: Path) -> None:
    """`pretrain` fills the student's roles, and each role keeps the path that is written for it."""
    other = str(root / "student")
    run = plan({"pretrain": other, "student_infer.model_args.model_name_or_path": ...})
    assert (run.student.model.path, run.rollout.model.path) == (other, other)
    assert run.teachers[0].source.model.path == str(root / "teacher")
    (found,) = problems({"teacher.model_args.model_name_or_path": ...})
    assert found.startswith("teacher.model_args.model_name_or_path: is missing")


def test_defect_04_unknown_keys_are_refused(problems: Problems) -> None:
    (found,) = problems({"opd_kl_coeff": 0.5})
    assert found.startswith("opd_kl_coeff: unknown key; did you mean 'opd_kl_coef'? (run.yaml:")


def test_defect_04_unknown_tags_are_refused(problems: Problems, values: dict[str, Any], root: Path) -> None:
    """ROLL gives a row with a tag that no reward has to math_rule."""
    rows = [
        {"id": "0", "messages": [{"role": "user", "content": "ab"}], "tag": tag, "ground_truth": "1"}
        for tag in ("math", "poetry")
    ]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _mixed(values)
    (found,) = problems(pure=False)
    assert found.startswith("rewards: no reward accepts tag 'poetry'")
    values["rewards"] = {"math_rule": {"worker_cls": "math_rule"}}
    values["teacher"] = {"math_teacher": {**values["teacher"], "tag_included": ["math"]}}
    (found,) = problems(pure=False)
    assert found.startswith("teacher: no teacher accepts tag 'poetry'")


def test_defect_13_command_line_overrides_work(root: Path, values: dict[str, Any], capsys: Any) -> None:
    arguments = ["plan", "--config_path", write_config(root, values), "--config_name", "run", "--json"]
    changes = [
        "max_steps=3",
        "teacher.opd_kl_coef=0.25",
        "+seed=7",
        "~rewards",
        "teacher.device_mapping=list(range(0,4))",
    ]
    assert main([*arguments, *changes]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["batch"]["steps"] == 3
    assert content["roles"]["teacher"]["opd_kl_coef"] == 0.25
    assert content["roles"]["teacher"]["devices"] == [0, 1, 2, 3]
    assert content["rewards"] == {}
