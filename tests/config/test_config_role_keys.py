"""Keys in a section where they have no effect: hint and warning name the right place."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from roll_opd.base.failures import nearest
from roll_opd.config.plan import RunPlan
from roll_opd.config.schema import Section, Worker, keys_of

Plan = Callable[..., RunPlan]
Problems = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("tensor_model_parallel_size", "student_train.strategy_args.strategy_config.tensor_model_parallel_size"),
        ("tensor_parallel_size", "student_infer.strategy_args.strategy_config.tensor_parallel_size"),
        ("strategy_name", "student_train.strategy_args.strategy_name"),
        ("temperature", "student_infer.generating_args.temperature"),
        ("worker_cls", "rewards.NAME.worker_cls"),
        ("on_error", "rewards.NAME.on_error"),
        pytest.param("env_type", "custom_envs.NAME.env_type", marks=pytest.mark.extras),
    ],
)
def test_a_key_at_the_top_is_named_with_its_section(problems: Problems, key: str, place: str) -> None:
    (found,) = problems({}, overrides=(f"{key}=1",))
    assert found.startswith(f"{key}: unknown key at the top") and f" {place} (" in found


@pytest.mark.parametrize(
    ("key", "place"), [("file_name", "data_args.file_name"), ("temperature", "generating_args.temperature")]
)
def test_a_key_of_a_section_of_validation(problems: Problems, key: str, place: str) -> None:
    found = problems({f"validation.{key}": 1})
    assert any(
        text.startswith(f"validation.{key}: unknown key here; write it at validation.{place} (") for text in found
    )


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"student_train.opd_kl_coef": 0.5}, "student_train.opd_kl_coef: has no effect"),
        ({"student_train.opd_kl_coef": 9, "opd_kl_coef": 2}, "student_train.opd_kl_coef: has no effect"),
        ({"student_infer.opd_kl_coef": 0.2}, "student_infer.opd_kl_coef: has no effect"),
        ({"student_train.tag_included": ["a"]}, "student_train.tag_included: has no effect"),
        ({"student_infer.infer_batch_size": 3}, "have no effect here: of roles: infer_batch_size"),
        ({"teacher.max_tokens_per_microbatch_in_train": 9}, "of roles: max_tokens_per_microbatch_in_train"),
    ],
)
def test_a_key_that_another_role_reads_is_warned_of(plan: Plan, changes: dict[str, Any], warning: str) -> None:
    found = [text for text in plan(changes).warnings if warning in text]
    assert len(found) == 1
    assert "opd_kl_coef" not in warning or "write it at teacher.opd_kl_coef" in found[0]


def test_keys_that_a_role_reads_are_not_warned_of(plan: Plan) -> None:
    read = {"teacher.opd_kl_coef": 0.5, "teacher.infer_batch_size": 3, "student_train.infer_batch_size": 3}
    assert not any("opd_kl_coef" in text or "infer_batch_size" in text for text in plan(read).warnings)


def test_conditions_of_a_class_are_about_its_own_keys() -> None:
    sections = [Section]
    for section in sections:
        sections += section.__subclasses__()
        for names in vars(section).get("read_if", {}).values():
            assert names == "*" or set(names.split()) <= vars(section)["__annotations__"].keys()
    assert Worker in sections


def test_a_key_of_another_meaning_is_never_near() -> None:
    for name, other in (
        ("max_prompt_length", "val_prompt_length"),
        ("val_prompt_length", "prompt_length"),
        ("eval_batch_size", "rollout_batch_size"),
        ("input_length", "output_length"),
        ("min_length", "max_length"),
    ):
        assert nearest(name, [other], 0.5) is None, name
    for name, right in (
        ("rollout_batchsize", "rollout_batch_size"),
        ("num_return_sequences", "num_return_sequences_in_group"),
        ("tensor_parallel_size", "tensor_model_parallel_size"),
        ("temprature", "temperature"),
    ):
        assert nearest(name, [right]) == right


def test_a_derived_value_is_no_key(problems: Problems) -> None:
    names = {item.name for item in fields(Worker)} - keys_of(Worker).keys() - Worker.ignored
    found = problems({f"teacher.{name}": 1 for name in names})
    assert {"info", "layout", "devices"} < names
    assert {text.partition(":")[0] for text in found} == {f"teacher.{name}" for name in names}
