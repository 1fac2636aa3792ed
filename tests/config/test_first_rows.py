"""The first rows of the files in a plan, and facts of a configuration that need one sentence each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_assets import base_values, set_key, write_config

from roll_opd.base.failures import ConfigError
from roll_opd.config.plan import RunPlan
from roll_opd.planner.load_plan import load_plan

Plan = Callable[..., RunPlan]
TRAIN, OPTIMIZER = "student_train.data_args", "student_train.training_args"


def test_a_plan_refuses_rows_that_a_run_refuses(plan: Plan, root: Path) -> None:
    for row in ('{"messages": 3}', '{"question": "a"}', "no json", '{"messages": [{"role": "user"}]}', '{"prompt": 3}'):
        (root / "train.jsonl").write_text(f'{{"prompt": "ab"}}\n{row}\n')
        with pytest.raises(ConfigError) as caught:
            plan(runnable=False)
        (problem,) = caught.value.problems
        assert problem.startswith(f"{TRAIN}.file_name: 1 of the first 2 rows") and "train.jsonl:2" in problem
        plan({"on_bad_row": "drop"}, runnable=False)
        plan({"on_bad_row": ...})


def test_a_named_column_that_no_row_has_is_refused(plan: Plan, root: Path) -> None:
    rows = ['{"prompt": "ab", "kind": "math"}'] * 99
    column = "absent"
    for name in ("messages", "prompt", "tag", "id", "ground_truth"):
        (root / "train.jsonl").write_text("\n".join(rows))
        for runnable in (True, False):  # otherwise a run would take the default, such as the tag math_rule
            with pytest.raises(ConfigError) as caught:
                plan({f"{TRAIN}.{name}": column}, runnable=runnable)
            (problem,) = caught.value.problems
            assert problem.startswith(f"{TRAIN}.{name}: ") and all(each in problem for each in (column, "kind"))
        value = '[{"role": "user", "content": "a"}]' if name == "messages" else '"a"'
        (root / "train.jsonl").write_text("\n".join([*rows, f'{{"prompt": "ab", "absent": {value}}}']))
        if name != "prompt":  # the last row has it
            plan({f"{TRAIN}.{name}": column})
        plan({f"{TRAIN}.{name}": ...})


def test_plain_prompts_are_stated_once_if_there_is_a_chat_template(plan: Plan, root: Path) -> None:
    def stated() -> list[str]:
        return [text for text in plan().warnings if "chat template" in text and TRAIN in text]

    assert not stated() and not plan().plain_prompts
    (root / "train.jsonl").write_text('{"prompt": "ab"}\n' * 3)
    assert stated() == [plan().plain_prompts]


def test_keys_of_precision_and_warm_up_agree_or_are_refused(plan: Plan) -> None:
    assert plan({"student_train.model_args.dtype": ..., f"{OPTIMIZER}.bf16": True}).student.model.dtype == "bf16"
    for changes in (
        {"student_train.model_args.dtype": "fp32"},
        {"student_train.model_args.dtype": ..., f"{OPTIMIZER}.fp16": True},
        {
            f"{OPTIMIZER}.bf16": ...,
            f"{OPTIMIZER}.fp16": ...,
            f"{OPTIMIZER}.warmup_steps": 2,
            f"{OPTIMIZER}.warmup_ratio": 0.1,
        },
    ):
        with pytest.raises(ConfigError) as caught:
            plan(changes)
        (problem,) = caught.value.problems
        assert problem.startswith(OPTIMIZER)


def test_a_pure_file_may_call_its_teacher_reference(root: Path) -> None:
    values: dict[str, Any] = base_values(root)
    named = load_plan(write_config(root, values), "run", pure=True)
    section = values.pop("teacher")
    for teachers in (section, {"one": section, "two": {**section, "opd_kl_coef": 0.5}}):
        values["reference"] = teachers
        renamed = load_plan(write_config(root, values), "run", pure=True)
        roles = [teacher.role for teacher in renamed.teachers if teacher.role]
        assert renamed.reference is None and {role.model for role in roles} == {named.teachers[0].role.model}
    values["reference"] = values["teacher"] = section
    set_key(values, "teacher.opd_kl_coef", 1.0)  # two names are two roles, and a pure run needs no reference policy
    both = load_plan(write_config(root, values), "run", pure=True)
    assert both.reference is None and len(both.teachers) == 1 and any("reference" in text for text in both.warnings)
