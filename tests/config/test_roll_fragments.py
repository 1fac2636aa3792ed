"""The short configurations of ROLL's questions on mixed and pure runs, completed with models, data and devices."""

from pathlib import Path

import pytest
from config_assets import base_values

from roll_opd.base.failures import ConfigError
from roll_opd.commands.main import main
from roll_opd.planner.load_plan import load_plan

ROLES = ("actor_train", "actor_infer", "teacher")
ROLE = "{{model_args: {{model_name_or_path: {root}/{model}}}, strategy_args: {{strategy_name: {strategy}}}{more}}}"
DATA = ", data_args: {{file_name: {root}/train.jsonl}}, training_args: {{per_device_train_batch_size: 1}}"
REWARD = "rewards: {math_rule: {worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker}}"
COMMON = "{{rollout_batch_size: 2, prompt_length: 16, response_length: 16, max_steps: 2, output_dir: {root}/output}}"


def _file(root: Path, names: tuple[str, str, str], facts: str) -> str:
    roles = {
        names[0]: ROLE.format(root=root, model="student", strategy="megatron_train", more=DATA.format(root=root)),
        names[1]: ROLE.format(root=root, model="student", strategy="vllm", more=""),
        names[2]: ROLE.format(root=root, model="teacher", strategy="megatron_infer", more=""),
    }
    common = COMMON.format(root=root)[1:-1].replace(", ", "\n")
    return "\n".join([common, *(f"{name}: {text}" for name, text in roles.items()), facts])


MIXED = f"use_opd: true\nopd_kl_coef: 0.5\nadv_estimator: grpo\nnum_return_sequences_in_group: 2\n{REWARD}"


def test_mixed_and_pure_fragments_are_planned(root: Path) -> None:
    base_values(root)
    files = {
        "mixed": _file(root, ROLES, MIXED),
        "pure": _file(root, ("student_train", "student_infer", "teacher"), f"is_pure_opd: true\n{REWARD}"),
    }
    for mode, text in files.items():
        (root / f"{mode}.yaml").write_text(text)
        assert main(["plan", "--config_path", str(root), "--config_name", mode]) == 0
        plan = load_plan(str(root), mode, runnable=False)
        assert (plan.mode, len(plan.teachers)) == (mode, 1)


def test_a_missing_fact_is_one_error(root: Path) -> None:
    base_values(root)
    text = _file(root, ROLES, MIXED)
    roles = {name: next(line for line in text.splitlines() if line.startswith(name)) for name in ROLES}
    missing = roles | {
        "actor_train.data_args.file_name": f", data_args: {{file_name: {root}/train.jsonl}}",
        "teacher.model_args.model_name_or_path": f"model_name_or_path: {root}/teacher",
        "adv_estimator": "adv_estimator: grpo",
        "rewards": REWARD,
    }
    for key, part in missing.items():
        assert part in text
        (root / "mixed.yaml").write_text(text.replace(part, ""))
        with pytest.raises(ConfigError) as caught:
            load_plan(str(root), "mixed", runnable=False)
        (problem,) = caught.value.problems
        assert problem.startswith(f"{key}: ")
