"""Edge cases of configurations: empty names, broken user modules, types that a signature hides."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from roll_opd.base.failures import ConfigError
from roll_opd.base.registry import argument_problems
from roll_opd.config.plan import RunPlan

RL = {"pure": False}


@pytest.mark.parametrize("key", ["adv_estimator", "policy_loss", "kl_loss_fn", "opd_divergence", "kl_penalty"])
def test_an_empty_name_is_no_name(problems: Callable[..., list[str]], key: str) -> None:
    found = problems({"is_pure_opd": False, key: ""}, **RL)
    assert [text for text in found if text.startswith(f"{key}: should be ")], found
    assert not [text for text in found if "needs a sum over the vocabulary" in text]


def test_an_option_with_a_quoted_annotation_passes(plan: Callable[..., RunPlan]) -> None:
    correction = {"train_infer_correction.is_weight.enabled": True}  # such an engine needs one
    key = "student_infer.strategy_args.strategy_config.quantization_config"
    assert plan({key: {"x": 1}, **correction}).rollout.engine_args["quantization_config"] == {"x": 1}  # type: ignore


@pytest.mark.parametrize("option", ["softmax_scale", "rotary_interleaved", "window_size", "perform_initialization"])
def test_what_would_change_the_model_is_refused(problems: Callable[..., list[str]], option: str) -> None:
    (found,) = problems({f"student_train.strategy_args.strategy_config.{option}": 1})
    assert "is set by the model's config.json" in found


@pytest.mark.parametrize("source", ["raise RuntimeError('boom')", "def f(:", "import no_such_module_at_all"])
def test_a_broken_module_is_no_traceback(
    plan: Callable[..., RunPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    (tmp_path / "broken_part.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with suppress(ConfigError):  # it may be refused here or before the run, in a sentence
        plan({"policy_loss_fn": "broken_part.f"})


def test_types_behind_a_signature(problems: Callable[..., list[str]]) -> None:
    changes = {"is_pure_opd": False, "policy_loss_fn": "ppo", "policy_loss_fn_args": {"clip_range_low": "abc"}}
    found = problems(changes, **RL)
    assert [text for text in found if "policy_loss_fn_args.clip_low" in text and "valid number" in text], found
    found = problems({"rewards.math_rule.args": {"no_such": 1}})
    assert [text for text in found if "no_such" in text], found


def test_frozen_lists_are_lists() -> None:
    from roll_opd.base.frozen import freeze

    def part(batch: object, *, names: list[str], table: dict[str, int]) -> None: ...

    assert not list(argument_problems(part, freeze({"names": ["a"], "table": {"b": 1}}), given_by_us=1))
