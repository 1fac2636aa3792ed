"""Keys of the distillation objective: accepted values, refused values with their reason, and keys without effect."""

from collections.abc import Callable
from pathlib import Path

import pytest
from config_assets import VOCABULARY, write_model

from roll_opd.commands.plan_text import to_text
from roll_opd.config.plan import RunPlan

Plan = Callable[..., RunPlan]
Problems = Callable[..., list[str]]


def test_sampled_tokens_are_the_default(plan: Plan) -> None:
    run = plan()
    assert run.objective.opd_objective == "sampled" and run.advantage_teachers == run.teachers
    assert "reverse_kl(teacher)" in to_text(run)


def test_every_key_reaches_the_plan(plan: Plan, root: Path) -> None:
    write_model(root / "teacher", seed=2, vocab_size=9)  # padded further than the student's
    keys = {
        "opd_objective": "topk",
        "opd_divergence": "skewed_forward_kl",
        "opd_topk": 5,
        "opd_topk_source": "student",
        "opd_jsd_beta": 0.3,
        "opd_skew_alpha": 0.2,
    }
    run = plan(keys)
    for key, value in keys.items():
        assert getattr(run.objective, key) == value
    assert run.objective.opd_vocab_size == 8
    assert run.teachers[0].source.vocab_size == 8
    assert run.advantage_teachers == ()
    assert "opd_jsd_beta" in run.warnings[0]  # of a divergence that is not the chosen one
    assert "1 * skewed_forward_kl(teacher) (alpha 0.2), over the student's 5 most likely tokens" in to_text(run)


def test_a_teacher_with_another_tokenizer_normalises_over_all_its_token_ids(plan: Plan, root: Path) -> None:
    write_model(root / "teacher", seed=2, vocab_size=9, tokenizer={"vocab": {**VOCABULARY, "z": 1}})
    run = plan({"teacher_tokenizer_check": "align"})
    assert run.teachers[0].tokenizer and run.teachers[0].source.vocab_size is None


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"opd_use_policy_gradient": False}, "whose gradient depends on no teacher"),
        ({"opd_divergence": "jsd"}, "jsd needs a sum over the vocabulary"),
        ({"opd_objective": "topk", "opd_topk": 5, "opd_use_policy_gradient": True}, "expected gradient is 0"),
        ({"opd_objective": "full", "opd_use_policy_gradient": True}, "expected gradient is 0"),
        ({"opd_objective": "full", "opd_kl_discount": 1.0}, "1 has no effect, as opd_objective: full"),
        ({"opd_objective": "full", "opd_advantage_fn": "math.fsum"}, "math.fsum has no effect, as opd_objective: full"),
        ({"opd_advantage_fn": "nothing"}, "unknown opd_advantage_fn 'nothing'"),
        ({"opd_advantage_fn_args": {"limit": 5}}, "opd_advantage_fn_args"),
        ({"opd_objective": "topk", "opd_topk": 9}, "9 is more than the 8 token ids"),
        ({"opd_objective": "full", "opd_skew_alpha": 1.0}, "opd_skew_alpha"),
        ({"opd_objective": "all"}, "opd_objective"),
    ],
)
def test_what_teaches_nothing_is_refused_with_the_reason(problems: Problems, keys: dict, reason: str) -> None:
    (problem,) = problems(keys)
    assert reason in problem


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"opd_kl_coef": 0}, "opd_kl_coef: 0 removes the teachers' part"),
        ({"opd_kl_coef": "1e-400"}, "opd_kl_coef: 0 removes the teachers' part"),
        ({"opd_kl_coef": 0, "opd_objective": "full"}, "opd_kl_coef: 0 removes the teachers' part"),
        ({"teacher.opd_kl_coef": 0}, "teacher.opd_kl_coef: 0 removes the teachers' part"),
        ({"opd_kl_coef": 0, "teacher.opd_kl_coef": 0.1}, None),
        ({"opd_kl_coef": 0, "entropy_loss_coef": 0.1}, None),
        ({"rewards.math_rule.weight": 0}, None),  # it looks on
    ],
)
def test_teachers_without_a_weight_teach_nothing(
    plan: Plan, problems: Problems, keys: dict, refused: str | None
) -> None:
    if refused is None:
        plan(keys)
        return
    (problem,) = problems(keys)
    assert problem.startswith(refused) and "(run.yaml:" in problem


def test_one_of_two_teachers_may_have_no_weight(plan: Plan, values: dict, root: Path) -> None:
    write_model(root / "other", seed=9)
    teacher = values["teacher"]
    other = {**teacher, "model_args": {"model_name_or_path": str(root / "other")}}
    run = plan({"teacher": {"a": {**teacher, "opd_kl_coef": 0}, "b": other}})
    assert [teacher.opd_kl_coef for teacher in run.teachers] == [0.0, 1.0]
