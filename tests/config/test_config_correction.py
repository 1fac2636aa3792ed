"""`train_infer_correction` and the adaptive KL coefficient: ROLL's keys and defaults, and contradictions."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from roll_opd.commands.plan_text import to_text
from roll_opd.config.plan import CorrectionPlan, RunPlan, TokenFilterPlan

Plan = Callable[..., RunPlan]
Problems = Callable[..., list[str]]
REFERENCE = {"strategy_args": {"strategy_name": "megatron_infer"}, "device_mapping": "[0]"}


def test_nothing_is_corrected_by_default(plan: Plan) -> None:
    assert plan().objective.correction is None
    written = {"is_weight": {"enabled": False, "upper_bound": 1.5}, "filters": [{"enabled": False, "ratio_low": 0.5}]}
    run = plan({"train_infer_correction": written})
    assert run.objective.correction is None and not run.objective.recompute_old_logprobs
    assert run.warnings == ()


def test_a_correction_that_is_not_enabled_is_reported(plan: Plan) -> None:
    run = plan({"train_infer_correction": {"is_weight": {"upper_bound": 2}, "filters": [{"ratio_high": 1.01}]}})
    assert run.objective.correction is None
    assert run.warnings == tuple(
        f"train_infer_correction.{key}: has no effect without enabled: true" for key in ("is_weight", "filters.0")
    )


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ({"is_weight": {"enabled": True}}, CorrectionPlan("tis", high=1.2)),
        (
            {"is_weight": {"enabled": True, "weight_type": "sequence", "upper_bound": "2.0", "detach": True}},
            CorrectionPlan("tis", "sequence", high=2.0),
        ),
        ({"is_weight": {"enabled": True, "upper_bound": None}}, CorrectionPlan("tis")),
        ({"is_weight": {"enabled": True, "method": "icepop"}}, CorrectionPlan("icepop", low=0.5, high=5.0)),
        (
            {"filters": [{"enabled": True, "agg_type": "geometric"}, {"enabled": False}]},
            CorrectionPlan(filters=(TokenFilterPlan("ratio", "geometric", 0.8, 1.2),)),
        ),
        (
            {"filters": [{"enabled": True, "ratio_low": None, "diff_enabled": True, "diff_low": -0.5}]},
            CorrectionPlan(
                filters=(
                    TokenFilterPlan("ratio", "token", None, 1.2),
                    TokenFilterPlan("difference", "token", -0.5, 0.2),
                ),
            ),
        ),
        (
            {"is_weight": {"enabled": False, "method": "icepop", "weight_type": "sequence"}, "negatives_delta": 0.1},
            CorrectionPlan(negatives_delta=0.1),
        ),
        ({"negatives_delta": 0.1}, CorrectionPlan(negatives_delta=0.1)),
    ],
)
def test_what_is_written_reaches_the_plan(plan: Plan, written: dict[str, Any], wanted: CorrectionPlan) -> None:
    run = plan({"train_infer_correction": written})
    assert run.objective.correction == wanted
    assert run.objective.recompute_old_logprobs and run.warnings == ()
    assert pickle.loads(pickle.dumps(run)) == run


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_weight": {"enabled": True, "lower_bound": 0.5}}, "is_weight.lower_bound: tis has"),
        (
            {"is_weight": {"enabled": True, "method": "icepop", "upper_bound": 0.1}},
            "is_weight: no token is between the lower bound 0.5 and the upper bound 0.1",
        ),
        (
            {"filters": [{"enabled": True}, {"enabled": True, "ratio_low": 2}]},
            "filters.1: no token is between the lower bound 2 and the upper bound 1.2",
        ),
        (
            {"filters": [{"enabled": True, "agg_typ": "token"}]},
            "filters.0.agg_typ: unknown key; did you mean 'agg_type'",
        ),
        ({"filters": [{"agg_type": "word"}]}, "filters.0.agg_type: should be 'token', 'segment', 'geometric'"),
        ({"is_weight": {"enable": True}}, "is_weight.enable: unknown key; did you mean 'enabled'"),
    ],
)
def test_contradicting_corrections_are_refused(problems: Problems, changes: dict[str, Any], message: str) -> None:
    assert any(f"train_infer_correction.{message}" in text for text in problems({"train_infer_correction": changes}))


@pytest.mark.parametrize("key", ["is_weight", "negatives_delta"])
def test_without_a_policy_loss_there_is_nothing_to_weigh(problems: Problems, plan: Plan, key: str) -> None:
    written: dict[str, Any] = {"is_weight": {"enabled": True}, "negatives_delta": 0.1}
    (found,) = problems({"opd_objective": "full", "train_infer_correction": {key: written[key]}})
    assert f"train_infer_correction.{key}: opd_objective: full in pure distillation has no policy loss" in found
    assert plan({"train_infer_correction": {"filters": [{"enabled": True}]}}).objective.correction.filters


def test_keys_without_effect_are_reported(plan: Plan) -> None:
    empty = {"enabled": True, "ratio_enabled": False}
    run = plan({"train_infer_correction": {"is_weight": {"enabled": True, "detach": False}, "filters": [empty]}})
    assert any("train_infer_correction.is_weight.detach" in text for text in run.warnings)
    assert any(text.startswith("train_infer_correction.filters.0: removes no token") for text in run.warnings)


def test_the_plan_says_what_is_corrected(plan: Plan) -> None:
    rule = {"enabled": True, "agg_type": "sequence", "ratio_low": None}
    text = to_text(plan({"train_infer_correction": {"is_weight": {"enabled": True}, "filters": [rule]}}))
    assert "policy loss * tis weight, the ratio train / infer of each token up to 1.2" in text
    assert "leaves out tokens whose ratio of train and infer, per sequence, is not up to 1.2" in text


def test_rolls_older_key_is_reported_separately(plan: Plan) -> None:
    (said,) = plan({"infer_correction": True}).warnings
    assert "use train_infer_correction instead" in said


@pytest.fixture
def mixed(values: dict[str, Any]) -> dict[str, Any]:
    """The base configuration in mixed mode with a token-level KL."""
    values["actor_train"] = values.pop("student_train")
    values["actor_infer"] = values.pop("student_infer")
    values |= {"use_opd": True, "adv_estimator": "grpo", "add_token_level_kl": True, "reference": REFERENCE}
    return values


def test_adaptive_kl_coefficient(mixed: dict[str, Any], plan: Plan) -> None:
    run = plan(pure=False)
    assert (run.objective.init_kl_coef, run.objective.target_kl) == (0.2, None)
    run = plan({"target_kl": 6.0}, pure=False)
    assert (run.objective.target_kl, run.objective.kl_horizon, run.warnings) == (6.0, 10000, ())
    assert plan({"kl_horizon": 500}, pure=False).objective.kl_horizon == 500


def test_adaptive_kl_coefficient_that_cannot_adapt(mixed: dict[str, Any], problems: Problems, plan: Plan) -> None:
    (found,) = problems({"target_kl": 6.0, "init_kl_coef": 0}, pure=False)
    assert "target_kl: with init_kl_coef 0, the coefficient stays 0" in found
    mixed["init_kl_coef"] = 0.1
    samples = plan(pure=False).sequences_per_step
    (found,) = problems({"kl_horizon": samples // 5}, pure=False)
    assert f"kl_horizon: {samples // 5} is too small: " in found and f"step of {samples} samples" in found
    plan({"kl_horizon": samples // 5 + 1}, pure=False)
    run = plan({"add_token_level_kl": False, "reference": None}, pure=False)
    assert any("kl_horizon" in text and "target_kl" in text for text in run.warnings)
    assert run.objective.target_kl is None
