"""Whole YAML in ROLL's style pass `roll-opd plan` with nothing but model and data paths replaced."""

import json
from pathlib import Path

import pytest
from roll_assets import STYLE, localise

from roll_opd.cli import main
from roll_opd.config.build import load_plan
from roll_opd.config.errors import ConfigError
from roll_opd.config.plan import FilterPlan, Layout, RunPlan

DOMAINS = {
    "code_KodCode_data": ["KodCode"],
    "llm_judge_Multi-subject-RLVR_deal_new": ["RLVR"],
    "math_deepmath_deal": ["deepmath_103k"],
    "general_ifeval_train_deal": ["ifeval"],
    "general_CrossThink-QA_deal": ["crossthinkqa"],
    "math_benchmarks": ["MATH-500", "aime"],
    "math": ["math_dapo"],
}


def _write(root: Path, name: str, *, weights: bool = True) -> str:
    (root / f"{name}.yaml").write_text(localise(root, (STYLE / f"{name}.yaml").read_text(), DOMAINS, weights=weights))
    return str(root)


def _plan(root: Path, name: str) -> RunPlan:
    return load_plan(_write(root, name), name, [f"output_dir={root}"], runnable=False)


def _ignored(run: RunPlan) -> str:
    """Keys without effect are named together, in one warning only."""
    found = [text for text in run.warnings if "no effect" in text]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("name", sorted(path.stem for path in STYLE.glob("*.yaml")))
def test_the_command_accepts_it(root: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--config_path", _write(root, name), "--config_name", name, f"output_dir={root}"]
    assert main(arguments) == 0
    assert capsys.readouterr().err == ""
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["roles"]


def test_rlvr_with_five_domains(root: Path) -> None:
    run = _plan(root, "rlvr_multi_domain")
    assert (run.mode, run.pipeline, run.num_nodes) == ("rl", "rlvr", 2)
    assert (run.extra_prompts, run.rollout.max_running_requests) == (32, 128)
    rewards = {reward.domain: reward for reward in run.rewards}
    for domain in ("crossthinkqa", "ifeval", "math_rule", "code_sandbox", "llm_judge"):
        assert rewards[domain].terms[0].worker == domain
    assert rewards["crossthinkqa"].terms[0].args == {"reward_type": "soft", "response_length_penalty_coef": 0.0}
    assert rewards["llm_judge"].terms[0].args["judge_model_type"] == "inference"
    thresholds = {"threshold_up": 0.9, "threshold_down": 0.1}
    assert rewards["math_rule"].query_filter == FilterPlan("mean_filter", thresholds)
    assert rewards["code_sandbox"].query_filter == FilterPlan("std_filter", {"std_threshold": 0.0})
    objective = run.objective
    assert (objective.adv_estimator, objective.gamma, objective.whiten_advantages) == ("reinforce", 1.0, True)
    assert (objective.norm_mean_type, objective.norm_std_type) == ("batch", None)
    assert (objective.reward_clip, objective.advantage_clip, objective.dual_clip) == (10.0, 2.0, 1.4)
    assert run.reference is None  # written, and nothing compares with it
    assert any(text.startswith("reference: is written but not used") for text in run.warnings)
    assert objective.max_len_mask and objective.difficulty_mask
    assert (objective.difficulty_low_threshold, objective.difficulty_high_threshold) == (0.1, 0.95)
    assert run.student.optimizer.lr_scheduler_type == "linear"
    assert not any("reward worker" in text for text in run.warnings)
    judge = rewards["llm_judge"].engine
    assert (judge.engines, judge.tp, judge.sampling.max_new_tokens) == (len(judge.devices), 1, 100)


def test_agentic(root: Path) -> None:
    run = _plan(root, "agentic_sokoban")
    assert (run.mode, run.pipeline, run.is_agentic) == ("rl", "rlvr", True)
    assert (run.rollout_batch_size, run.rollout.sampling.n) == (128, 8)
    assert run.data.environments == {"SimpleSokoban": 128}
    assert run.validation.data.environments["SokobanDifferentGridVocab"] == 256
    assert (run.validation.data.limit, run.validation.sampling.n) == (1024, 1)
    assert run.workflow.workflow == "environment_workflow"
    assert run.workflow.workflow_args["environments"]["SimpleSokoban"]["max_tokens_per_step"] == 64
    assert run.data.prompt_length + run.rollout.sampling.max_new_tokens == 8192


def test_mixed_mode_in_its_documented_form(root: Path) -> None:
    run = _plan(root, "mixed_documented")
    assert (run.mode, run.num_nodes) == ("mixed", 3)
    assert [(teacher.name, teacher.opd_kl_coef, teacher.tags) for teacher in run.teachers] == [
        ("teacher_general", 0.0, None),
        ("teacher_math_specialist", 0.5, ("math_dapo", "aime")),
    ]
    assert run.rollout.sampling.max_new_tokens == 3072
    assert run.reference is not None
    assert (run.reference.name, run.reference.layout, run.reference.model.path) == (
        "reference",
        Layout(dp=4),
        run.student.model.path,
    )
    assert (run.objective.kl_penalty, run.objective.init_kl_coef) == ("low_var_kl", 0.01)
    for name, nearest in (("fsdp2_train", "megatron_train"), ("sglang", "vllm"), ("fsdp2_infer", "megatron_infer")):
        assert any(f"{name!r} does not exist here; {nearest!r}" in text for text in run.warnings)


def test_64_gpus_without_their_weights(root: Path) -> None:
    """What a laptop has of a model: its configuration and tokenizer."""
    directory = _write(root, "pure_64_gpus", weights=False)
    run = load_plan(directory, "pure_64_gpus", [f"output_dir={root}"], runnable=False)
    assert (run.num_nodes * run.devices_per_node, run.student.layout) == (64, Layout(tp=4, pp=2, dp=4))
    assert [teacher.opd_kl_coef for teacher in run.teachers] == [0.5]
    parameters = run.memory["student_train"][0]["weights"] / 2 * 8
    assert 7.5e9 < parameters < 9e9
    assert "reward_clip" in _ignored(run)
    with pytest.raises(ConfigError, match="has no weights") as caught:
        load_plan(directory, "pure_64_gpus", [f"output_dir={root}"])
    assert sum("has no weights" in text for text in caught.value.problems) == 2
