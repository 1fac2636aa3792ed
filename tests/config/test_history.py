"""Settings of a run, differences between two runs, and the parts of a resumed run."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from roll_opd.config.plan import RunPlan
from roll_opd.pipelines import settings_history as history
from roll_opd.pipelines.settings_history import CONTENT, settings_of
from roll_opd.planner.load_plan import load_plan

DEMO = {"pure": "onpolicy_distill", "mixed": "rlvr_opd", "rl": "ppo", "sft": "sft", "dpo": "dpo"}


@cache
def plan_of(kind: str, *overrides: str) -> RunPlan:
    return load_plan("demo", DEMO[kind], overrides, pipeline=kind if kind in ("sft", "dpo") else None)


def changes(kind: str, *overrides: str) -> history.Changes:
    return history.differences(settings_of(plan_of(kind)), settings_of(plan_of(kind, *overrides)))


TRAIN = "student_train.training_args"
PLAIN_KEY = "sft_train.strategy_args.strategy_config.use_distributed_optimizer"
PLAIN, HALF = f"++{PLAIN_KEY}=false", "sft_train.model_args.dtype=bf16"


def test_one_changed_setting() -> None:
    """It is reported under its key with both values; None stands for a key that is not written."""
    for kind, override, key, before, now in [
        ("pure", f"{TRAIN}.learning_rate=3e-6", f"{TRAIN}.learning_rate", 2e-4, 3e-6),
        ("pure", f"{TRAIN}.adam_beta1=0.8", f"{TRAIN}.adam_beta1", 0.9, 0.8),
        ("pure", f"+{TRAIN}.lr_scheduler_kwargs={{min_lr: 1e-6}}", f"{TRAIN}.lr_scheduler_kwargs.min_lr", None, 1e-6),
        ("pure", "++opd_objective=topk", "opd_objective", None, "topk"),
        ("pure", "seed=3", "seed", 42, 3),
        ("pure", "opd_kl_coef=0.5", "opd_kl_coef", 1.0, 0.5),
        ("pure", "++tag_to_template.math=chatml", "tag_to_template.math", None, "chatml"),
        ("rl", "critic.training_args.learning_rate=5e-4", "critic.training_args.learning_rate", 1e-3, 5e-4),
        ("mixed", "++rewards.math_rule.weight=2", "rewards.math_rule.weight", None, 2),
        ("sft", HALF, "sft_train.model_args.dtype", "fp32", "bf16"),
        ("sft", PLAIN, PLAIN_KEY, True, False),
    ]:
        assert changes(kind, override) == {key: (before, now)}, override


@pytest.mark.extras
def test_a_setting_of_a_game() -> None:
    one, other = (
        settings_of(load_plan("examples/games", "frozen_lake_reward", overrides))
        for overrides in ([], ["custom_envs.FrozenLake.env_config.size=5"])
    )
    found = history.differences(one, other)
    assert list(found) == ["custom_envs.FrozenLake.env_config.size"]


def test_fields_without_influence_are_no_settings() -> None:
    other = ("output_dir=elsewhere", "exp_name=other", "save_steps=3", "logging_steps=5", "++max_restarts=2")
    assert changes("pure", *other, "track_with=[]", "++shutdown_timeout_s=5") == {}


def test_samples_are_made_again_after_changes_of_what_they_depend_on() -> None:
    """Also if the changed key only sets the defaults of others; not after changes of the update and of layouts."""
    infer, long = "+student_infer.generating_args={temperature: 0.7}", "prompt_length=40"
    hint, reward = "+teacher.hint=Think.", "++rewards.math_rule.weight=2"
    for kind, override, part in [
        *(("pure", words, "generating_args") for words in (infer, long, "num_return_sequences_in_group=8")),
        ("pure", "seed=3", "seed"),
        ("pure", "++opd_objective=topk", "opd_objective"),
        *(("pure", words, "teacher") for words in (hint, "teacher.model_args.dtype=bf16")),
        ("pure", "++workflow=simple_workflow", "workflow"),
        ("mixed", reward, "rewards"),
        *(("pure", words, None) for words in (f"{TRAIN}.learning_rate=3e-6", "max_steps=90", "eval_steps=7")),
        ("pure", "teacher.device_mapping='[0]'", None),
    ]:
        before = history.begun(plan_of(kind))
        assert resumed(before, plan_of(kind, override), 3).resampled == part, override


def test_other_content_under_the_same_path(tmp_path: Path) -> None:
    teacher, rows = tmp_path / "teacher", tmp_path / "val.jsonl"
    shutil.copytree("examples/demo/models/teacher", teacher)
    shutil.copy("examples/demo/data/val.jsonl", rows)
    overrides = (
        f"teacher.model_args.model_name_or_path={teacher}",
        f"validation.data_args.file_name={rows}",
    )
    before = settings_of(plan_of("pure", *overrides))
    weights = teacher / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(bytes(data))
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:-1]))
    found = history.differences(before, settings_of(plan_of("pure", *overrides)))
    keys = ["teacher.model_args.model_name_or_path", "validation.data_args.file_name"]
    assert list(found) == [key + CONTENT for key in keys]
    assert all("same path, different content" in text for text in history.changes_text(found))


def test_a_moved_file_is_one_change(tmp_path: Path) -> None:
    moved = tmp_path / "moved.jsonl"
    shutil.copy("examples/demo/data/val.jsonl", moved)
    found = changes("pure", f"validation.data_args.file_name={moved}")
    assert list(found) == ["validation.data_args.file_name"] and found.popitem()[1][1] == str(moved)


def test_an_added_section_is_one_change() -> None:
    reference = "++reference={model_args: {model_name_or_path: examples/demo/models/student}, device_mapping: '[1]'}"
    found = changes("mixed", "++use_kl_loss=true", "++kl_loss_coef=0.1", reference)
    assert found["reference.device_mapping"] == (None, "[1]") and found["kl_loss_coef"] == (None, 0.1)


def test_section_names_of_other_pipelines_are_mapped() -> None:
    """A fork of pure distillation into a mixed run: the same settings under other names are the same."""
    found = history.differences(settings_of(plan_of("pure")), settings_of(plan_of("mixed")))
    assert found["mode"] == ("pure", "mixed")
    assert not any(key.startswith("student_") or "learning_rate" in key for key in found)


def test_api_keys_are_not_saved() -> None:
    plan = plan_of("pure", "++system_envs={HF_TOKEN: hf_secret, WANDB_API_KEY: wb_secret, LEVEL: high}")
    text = json.dumps(settings_of(plan))
    assert "_secret" not in text and '"system_envs.LEVEL": "high"' in text


def resumed(before: history.History, plan: RunPlan, step: int) -> history.History:
    """Return the settings as a checkpoint stores them."""
    saved = json.loads(json.dumps(before.as_json(step)))
    return history.continued(history.parts_of(saved, step), plan, step)


def test_parts_over_several_resumes() -> None:
    rates = [plan_of("sft", f"sft_train.training_args.learning_rate={rate}") for rate in ("1e-3", "3e-4", "1e-4")]
    first = history.begun(rates[0])
    assert first.line == ""
    again = resumed(first, rates[0], 10)
    assert again.line == "Settings are the same as in step 10"
    second = resumed(again, rates[1], 20)
    key = "sft_train.training_args.learning_rate"
    assert second.line == f"Settings changed after step 20: {key}: 0.001 → 0.0003"
    back = resumed(second, rates[2], 25)
    parts = back.up_to(31)
    assert [(part.first, part.last) for part in parts] == [(1, 20), (21, 25), (26, 31)]
    assert [part.settings and part.settings[key] for part in parts] == [1e-3, 3e-4, 1e-4]
    assert [part["changed"] for part in back.as_facts(31)] == [{}, {key: [1e-3, 3e-4]}, {key: [3e-4, 1e-4]}]


@pytest.mark.parametrize(
    ("before", "now", "problem"),
    [
        ((), (PLAIN,), f"{PLAIN_KEY}: false cannot load"),
        ((PLAIN,), (), f"{PLAIN_KEY}: true cannot load"),
        ((PLAIN,), (PLAIN, HALF), "sft_train.model_args.dtype: bf16 cannot load"),
        ((), (HALF,), None),
        ((PLAIN,), (PLAIN, "sft_train.training_args.learning_rate=1"), None),
    ],
)
def test_an_incompatible_optimizer_state_is_refused(
    before: tuple[str, ...], now: tuple[str, ...], problem: str | None
) -> None:
    found = history.optimizer_problems(
        resumed(history.begun(plan_of("sft", *before)), plan_of("sft", *now), 3), Path("step_3")
    )
    assert len(found) == bool(problem)
    assert not problem or (found[0].startswith(problem) and "step_3" in found[0])


def test_many_changes_are_counted() -> None:
    learning = [f"{TRAIN}.{name}=0.5" for name in ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon")]
    others = ["opd_kl_coef=0.5", "max_grad_norm=2", "rollout_batch_size=128", "seed=1", "max_steps=9", "eval_steps=3"]
    more = [
        "prompt_length=40",
        "num_return_sequences_in_group=2",
        f"{TRAIN}.weight_decay=0.5",
        f"{TRAIN}.warmup_steps=1",
    ]
    line = resumed(history.begun(plan_of("pure")), plan_of("pure", *learning, *others, *more), 3).line
    assert line.startswith("Settings changed after step 3: ") and line.count("→") == history.SHOWN and "\n" not in line
    assert line.endswith(f"; and {4 + 6 + 4 + 1 - history.SHOWN} more, in run.json")


@pytest.mark.parametrize("saved", [None, [], "old", [{"first": 1}], [{"first": 1, "last": 3, "settings": 7}]])
def test_a_checkpoint_without_settings(saved: Any) -> None:
    """Of an earlier version, or damaged: nothing is claimed of its steps."""
    parts = history.parts_of(saved, 12)
    assert parts == (history.RunPart(1, 12, None),)
    now = history.continued(parts, plan_of("sft"), 12)
    assert "steps 1 to 12 are unknown" in now.line and len(now.parts) == 2
    assert [part["changed"] for part in now.as_facts()] == [None, None]


def test_hidden_files_are_no_part_of_a_model(tmp_path: Path) -> None:
    for name in ("model.safetensors", "._model.safetensors", "config.json", ".config.json"):
        (tmp_path / name).write_text("x")
    assert [file.name for file in history._model_files(tmp_path)] == ["config.json", "model.safetensors"]
