"""Demonstrations: their source, their number per update, and refused settings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll_opd.commands.describe import to_json
from roll_opd.commands.plan_text import to_text
from roll_opd.config.plan import RunPlan

Plan = Callable[..., RunPlan]
Problems = Callable[..., list[str]]


@pytest.fixture
def mix(values: dict[str, Any], root: Path) -> dict[str, Any]:
    """The base configuration with demonstrations: 8 prompts x 2 responses, mini-batches of 2 x 4 on 2 ranks."""
    values["actor_train"] = values.pop("student_train")
    values["actor_infer"] = values.pop("student_infer")
    del values["teacher"]
    rows = [{"q": f"{n}+1=", "output": str(n + 1)} for n in range(4)]
    (root / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values |= {
        "algorithm_type": "mix",
        "use_kl_loss": False,
        "demonstrations": {"data_args": {"file_name": str(root / "demonstrations.jsonl")}, "prompt_key": "q"},
    }
    return values


@pytest.mark.extras
def test_half_of_each_update_are_demonstrations(mix: dict[str, Any], plan: Plan, root: Path) -> None:
    run = plan({}, pure=False)
    expert = run.demonstrations
    assert (run.student.mini_batch_sequences, expert.rows_per_update, expert.updates) == (16, 8, 2)
    assert (run.sequences_per_step, expert.rows_per_step) == (16, 16)
    assert (run.student.optimizer.total_steps, run.objective.recompute_old_logprobs) == (20, True)
    assert expert.data.files == (str(root / "demonstrations.jsonl"),)
    assert (expert.data.schema, expert.data.prompt_length) == ("sft", 32 + 48)
    assert expert.data.columns == {"instruction": "q"}
    assert (expert.data.length_key, run.data.length_key) == ("prompt_length + response_length", "prompt_length")
    assert (run.objective.policy_loss, run.objective.adv_estimator) == ("mix", "grpo")
    assert to_json(run)["batch"]["demonstrations_per_step"] == 16
    assert to_json(run)["batch"]["updates_per_step"] == 2
    assert "demonstrations_per_step 16, demonstrations_per_update 8" in to_text(run)
    assert run.warnings == ()


@pytest.mark.extras
@pytest.mark.parametrize(
    ("share", "prompts", "rows", "updates"), [(0.25, 6, 4, 1), (0.75, 8, 12, 4), (0.125, 7, 2, 1), (None, 4, 8, 1)]
)
def test_any_share_of_demonstrations_gives_whole_rows_and_updates(
    mix: dict[str, Any], plan: Plan, share: float, prompts: int, rows: int, updates: int
) -> None:
    run = plan({"expert_data_ratio": share, "rollout_batch_size": prompts}, pure=False)
    assert (run.demonstrations.rows_per_update, run.demonstrations.updates) == (rows, updates)
    assert run.objective.recompute_old_logprobs == (updates > 1)
    assert run.student.optimizer.total_steps == 10 * updates


@pytest.mark.extras
def test_the_loss_alone_and_its_arguments(mix: dict[str, Any], plan: Plan) -> None:
    changes = {"algorithm_type": ..., "policy_loss_fn": "mix_chord", "adv_estimator": "grpo"}
    run = plan({**changes, "policy_loss_fn_args": {"mu_peak": 0.9, "clip_range": 0.1}}, pure=False)
    assert run.demonstrations.rows_per_update == 8
    arguments = run.objective.policy_loss_args
    assert (arguments["mu_peak"], arguments["clip_low"], arguments["dual_clip"]) == (0.9, 0.1, 3.0)


def test_a_loss_of_ones_own_may_read_them_too(
    mix: dict[str, Any], plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_mix.py").write_text("def loss(batch):\n    return -batch.action_logprobs_M\n")
    monkeypatch.syspath_prepend(tmp_path)
    changes = {"algorithm_type": "grpo", "policy_loss_fn": "my_mix.loss", "expert_data_ratio": 0.5}
    assert plan(changes, pure=False).demonstrations.rows_per_update == 8


@pytest.mark.extras
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"demonstrations": ...},
            "demonstrations: is missing; policy loss mix trains on rows with answers, a share of 0.5",
        ),
        ({"demonstrations": {}}, "demonstrations.data_args.file_name: is missing"),
        (
            {"demonstrations.data_args.file_name": "nowhere.jsonl"},
            "demonstrations.data_args.file_name: no file 'nowhere.jsonl'",
        ),
        ({"demonstrations.data_arg": {}}, "demonstrations.data_arg: unknown key; did you mean 'data_args'?"),
        ({"algorithm_type": "grpo"}, "demonstrations: policy loss ppo does not use it"),
        ({"algorithm_type": "grpo", "expert_data_ratio": 0.5}, "policy loss ppo would treat demonstrations as"),
        (
            {"expert_data_ratio": 0},
            "with expert_data_ratio 0 one of these two parts is empty; choose a ratio between 0 and 1",
        ),
        (
            {"expert_data_ratio": 1},
            "with expert_data_ratio 1 one of these two parts is empty; choose a ratio between 0 and 1",
        ),
        ({"expert_data_ratio": 1.5}, "expert_data_ratio: should be less than or equal to 1"),
        (
            {"expert_data_ratio": 0.3},
            "expert_data_ratio: 0.3 of the mini-batch 16 (per_device_train_batch_size 4 x"
            " gradient_accumulation_steps 2 x data-parallel size 2) is 4.8 demonstrations",
        ),
        (
            {"rollout_batch_size": 6},
            "rollout_batch_size: 6 prompts x 2 responses = 12 sequences per step are not a multiple of the 8 that 8"
            " demonstrations leave in actor_train's mini-batch of 16",
        ),
        ({"adv_estimator": "gae"}, "demonstrations are not sampled, so a critic cannot be trained on demonstrations"),
    ],
)
def test_mistakes_are_explained(mix: dict[str, Any], problems: Problems, changes: dict, message: str) -> None:
    found = problems(changes, pure=False)
    assert any(message in sentence for sentence in found), found


@pytest.mark.extras
def test_an_empty_file_is_refused(mix: dict[str, Any], problems: Problems, root: Path) -> None:
    (root / "demonstrations.jsonl").write_text("\n")
    (found,) = problems({}, pure=False)
    assert found.startswith("demonstrations.data_args.file_name: no row can be read in")
