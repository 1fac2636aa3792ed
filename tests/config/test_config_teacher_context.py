"""Keys for a teacher's prompt and weights: accepted values, and refusals with a remedy."""

from collections.abc import Callable
from pathlib import Path

import pytest
from config_assets import write_model

from roll_opd.commands.plan_text import to_text
from roll_opd.config.plan import FollowingPlan, RunPlan

Plan = Callable[..., RunPlan]
Problems = Callable[..., list[str]]
HINT = {"teacher.hint": "It is {ground_truth}."}


def follows(root: Path, **keys: object) -> dict:
    """Return a teacher that follows the student; it needs no model."""
    return {"teacher.model_args": {"dtype": "fp32"}, "teacher.follows_student": keys}


def test_a_teacher_reads_what_the_student_reads(plan: Plan) -> None:
    run = plan()
    assert run.teachers[0].context is None and run.data.contexts == ()
    assert not isinstance(run.teachers[0].source, FollowingPlan)


def test_every_key_reaches_the_plan(plan: Plan, root: Path) -> None:
    keys = {"teacher.system_prompt": "s", "teacher.template": "chatml", "teacher.tag_included": "math"}
    run = plan(HINT | keys)
    (context,) = run.data.contexts
    assert context == run.teachers[0].context
    assert (context.system_prompt, context.hint, context.template) == ("s", "It is {ground_truth}.", "chatml")
    assert (context.name, context.key, context.tags) == ("teacher", "teacher", ("math",))
    assert context.tokenizer == str(root / "teacher")
    assert "reads" in to_text(run) and "It is {ground_truth}." in to_text(run)


def test_how_long_a_hint_may_be(plan: Plan) -> None:
    """As long as a prompt and a second response, if micro-batches have room for it."""
    assert plan(HINT).data.contexts[0].prompt_length == 32 + 48
    tokens = {"teacher.use_dynamic_batching_in_infer": True, "teacher.max_tokens_per_microbatch_in_infer": 100}
    assert plan(tokens).data.contexts[0].prompt_length == 100 - 48
    assert plan({"teacher.prompt_length": 40}).data.contexts[0].prompt_length == 40


def test_several_teachers_each_with_its_own(plan: Plan, values: dict) -> None:
    teacher = values.pop("teacher")
    several = {"a": {**teacher, "hint": "{ground_truth}"}, "b": {**teacher, "system_prompt": "short"}, "c": teacher}
    run = plan({"teacher": several})
    assert [context.name for context in run.data.contexts] == ["a", "b"]
    assert len({run.serving(one.source).name for one in run.teachers}) == 1  # loaded once


def test_the_students_own_weights_teach_with_a_hint(plan: Plan, root: Path) -> None:
    itself = {"teacher.model_args.model_name_or_path": str(root / "student")}
    assert plan(itself | HINT).teachers[0].source.model.path == str(root / "student")


@pytest.mark.parametrize(
    ("keys", "every", "decay", "live"),
    [({}, 1, 0.0, True), ({"update_interval": 5}, 5, 0.0, False), ({"ema_decay": 0.99}, 1, 0.99, False)],
)
def test_keys_of_follows_student_make_the_follower(
    plan: Plan, root: Path, keys: dict, every: int, decay: float, live: bool
) -> None:
    worker = plan(follows(root, **keys) | HINT).teachers[0].source
    assert isinstance(worker, FollowingPlan) and worker.model.path == str(root / "student")
    assert (worker.update_interval, worker.ema_decay, worker.is_live) == (every, decay, live)


def test_followers_share_weights_with_those_that_follow_alike_alone(plan: Plan, values: dict, root: Path) -> None:
    teacher = {**values["teacher"], "model_args": {"dtype": "fp32"}, "hint": "{ground_truth}"}
    frozen = {**teacher, "model_args": {"dtype": "fp32", "model_name_or_path": str(root / "student")}}
    live, slow = ({**teacher, "follows_student": keys} for keys in ({}, {"ema_decay": 0.9}))
    values.pop("teacher")
    run = plan({"teacher": {"a": live, "b": slow, "c": live, "d": frozen}})
    assert [run.serving(one.source).name for one in run.teachers] == [
        "teacher.a",
        "teacher.b",
        "teacher.a",
        "teacher.d",
    ]


def test_a_lagged_teacher_without_a_hint_is_a_part_of_mixed_mode(plan: Plan, root: Path) -> None:
    assert plan(follows(root, update_interval=5) | {"allow_self_teacher": True}).teachers[0].context is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"teacher.template": "none"}, "teacher.template: should be 'native'"),
        ({**HINT, "teacher.prompt_length": 4000}, "exceed the positions of its model"),
        ({"teacher.follows_student.ema_decay": 1.0}, "teacher.follows_student.ema_decay: should be less than 1"),
        ({"teacher.follows_student.update_interval": 0}, "teacher.follows_student.update_interval"),
        ({**HINT, "teacher.follows_student.update_interval": 2}, "starts with the student's weights"),
        ({"student_train.hint": "x"}, "student_train.hint"),
        ({"hint": "x"}, "it is a key of a teacher"),
    ],
)
def test_teachers_that_cannot_follow_are_refused(problems: Problems, changes: dict, reason: str) -> None:
    (problem,) = problems(changes)
    assert reason in problem


@pytest.mark.parametrize(("keys", "reason"), [({}, "every reverse KL"), ({"ema_decay": 0.9}, "knows no more")])
def test_a_follower_that_knows_nothing_more(problems: Problems, root: Path, keys: dict, reason: str) -> None:
    (problem,) = problems(follows(root, **keys))
    assert reason in problem and "a hint or a system_prompt" in problem


@pytest.mark.extras
def test_a_workflow_makes_prompts_of_its_own(plan: Plan) -> None:
    run = plan(HINT | {"workflow": "simple_workflow"})
    assert run.teachers[0].context and not run.data.contexts


def test_a_length_without_a_context_is_reported(plan: Plan) -> None:
    assert any(
        "teacher.prompt_length: has no effect" in warning for warning in plan({"teacher.prompt_length": 9}).warnings
    )


def test_memory_counts_the_longer_prompt_and_the_averages(plan: Plan, root: Path) -> None:
    write_model(root / "teacher", seed=2)
    short = plan().memory["teacher"][0]
    assert plan(HINT).memory["teacher"][0]["activations"] > short["activations"]
    half = follows(root, ema_decay=0.9) | {"teacher.model_args.dtype": "bf16"}
    parts = plan(half).memory["teacher"][0]
    assert parts["averages"] == 2 * parts["weights"]
