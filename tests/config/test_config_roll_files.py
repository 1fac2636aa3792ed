"""Complete YAML files in ROLL's style pass `roll-opd plan`, with only the paths of models and data replaced."""

import json
from pathlib import Path

import pytest
from roll_assets import STYLE, localise

from roll_opd.base.failures import ConfigError
from roll_opd.commands.main import main
from roll_opd.config.plan import FilterPlan, Layout, RunPlan
from roll_opd.planner.load_plan import load_plan

pytestmark = pytest.mark.extras

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
def test_the_plan_command_accepts_rolls_files(root: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_rolls_agentic_configuration_is_planned(root: Path) -> None:
    run = _plan(root, "agentic_sokoban")
    assert (run.mode, run.pipeline, run.is_agentic) == ("rl", "agentic", True)
    assert (run.rollout_batch_size, run.rollout.sampling.n) == (128, 8)
    assert run.data.environments == {"SimpleSokoban": 128}
    assert run.validation.data.environments["SokobanDifferentGridVocab"] == 256
    assert (run.validation.data.limit, run.validation.sampling.n) == (1024, 1)
    assert run.workflow.workflow == "environment_workflow"
    assert run.workflow.workflow_args["environments"]["SimpleSokoban"]["max_tokens_per_step"] == 64
    assert run.data.prompt_length + run.rollout.sampling.max_new_tokens == 8192


def _changed(root: Path, *changes: str) -> RunPlan:
    directory = _write(root, "agentic_gigpo")
    return load_plan(directory, "agentic_gigpo", [f"output_dir={root}", *changes], runnable=False)


def test_what_validation_says_in_environments(root: Path) -> None:
    run = _changed(root, "+validation={evaluate_teacher: true, generating_args: {temperature: 0}}")
    assert run.validation.evaluate_teacher and not _changed(root).validation.evaluate_teacher
    assert "validation.generating_args: has no effect in environments: val_env_manager sets it" in run.warnings
    run = _changed(root, "+validation={evaluate_teacher: true}", "val_env_manager=null")
    assert "validation.evaluate_teacher: has no effect without games; write val_env_manager.tags" in run.warnings


def test_rolls_step_wise_agentic_configuration_is_planned(root: Path) -> None:
    run = _plan(root, "agentic_gigpo")
    assert run.objective.adv_estimator == "gigpo"
    assert run.objective.advantage_args == {
        "mean_cal_level": "group",
        "std_cal_level": None,
        "step_reward_gamma": 0.95,
        "episode_reward_weight": 1.0,
        "step_reward_weight": 1.0,
    }
    assert (run.objective.reward_groups, run.objective.reward_bounds) == ("prompt", None)
    assert run.reference is not None
    assert not any("not available" in text or text.startswith("adv_estimator") for text in run.warnings)
    assert "step_reward" not in _ignored(run)
    run = _changed(
        root, "adv_estimator=step_reinforce", "step_reward_gamma=1.0", "reward_normalization.method=mean_std"
    )
    assert run.objective.advantage_args == {
        "mean_cal_level": "group",
        "std_cal_level": "group",
        "step_reward_gamma": 1.0,
    }
    assert "step_reward_weight" in _ignored(run) and "step_reward_gamma" not in _ignored(run)
    run = _changed(root, "+advantage_fn=gigpo", "adv_estimator=null", "+advantage_fn_args={step_reward_gamma: 0.5}")
    assert run.objective.advantage_args["step_reward_gamma"] == 0.5


@pytest.mark.parametrize(
    ("grouping", "groups", "level"),
    [
        ("traj_group_id", "prompt", "group"),
        ("state", "prompt", "group"),
        ("tags", "tag", "group"),
        ("inductive", "tag", "group"),
        ("batch", "prompt", "batch"),
    ],
)
def test_what_a_trajectory_is_compared_with(root: Path, grouping: str, groups: str, level: str) -> None:
    methods = ("mean", (level, None)), ("asym_clip", (level, level)), ("identity", (None, None))
    names = "gigpo", "grpo", "agentic_reinforce"
    for (method, levels), name in zip(methods, names, strict=True):
        changes = f"reward_normalization.grouping={grouping}", f"reward_normalization.method={method}"
        objective = _changed(root, *changes, f"adv_estimator={name}").objective
        assert (objective.advantage_args["mean_cal_level"], objective.advantage_args["std_cal_level"]) == levels
        assert objective.reward_groups == groups
        assert objective.reward_bounds == ((-1.0, 3.0) if method == "asym_clip" else None)


def test_steps_need_a_manager_that_makes_them(root: Path) -> None:
    whole = "custom_env.FrozenLake.env_manager_cls=roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager"
    for name in ("gigpo", "step_reinforce"):
        with pytest.raises(
            ConfigError, match=f"adv_estimator: {name} reads the reward of each action, but a sample of FrozenLake"
        ):
            _changed(root, whole, f"adv_estimator={name}")
    reported = "custom_env.FrozenLake.agent_template='{observation}'"
    assert (
        _changed(root, whole, reported, "adv_estimator=agentic_reinforce").objective.adv_estimator
        == "agentic_reinforce"
    )
    concat = whole.replace("traj_env_manager.TrajEnvManager", "step_concat_env_manager.StepConcatEnvManager")
    assert _changed(root, concat).objective.adv_estimator == "gigpo"


def test_where_steps_are_compared_with_nothing_a_warning_says_so(root: Path) -> None:
    def said(*changes: str) -> list[str]:
        return [text for text in _changed(root, *changes).warnings if text.startswith("adv_estimator: gigpo")]

    (warning,) = said("reward_normalization.method=identity")
    assert "compares nothing while reward_normalization.method is identity" in warning
    (warning,) = said("train_env_manager.group_size=1")
    assert "set train_env_manager.group_size to 2 or more" in warning
    assert not said("train_env_manager.group_size=1", "reward_normalization.grouping=tags")


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
    """A laptop has only the configuration and the tokenizer of the model."""
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
