"""`algorithm_type`, the names of advantages and losses, and their arguments: from the configuration to the plan."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll_opd.config.plan import RunPlan
from roll_opd.objective.algorithms import algorithm, algorithm_names

Plan = Callable[..., RunPlan]
Problems = Callable[..., list[str]]
REFERENCE = {"strategy_args": {"strategy_name": "megatron_infer"}, "device_mapping": "[0]"}
OF_ROLLOUTS = [
    name for name in algorithm_names() if algorithm(name).schema == "experience" and name != "on_policy_distill"
]


@pytest.fixture
def rl(values: dict[str, Any]) -> dict[str, Any]:
    """The base configuration as reinforcement learning with a reference policy."""
    values["actor_train"] = values.pop("student_train")
    values["actor_infer"] = values.pop("student_infer")
    del values["teacher"], values["num_return_sequences_in_group"]
    values["actor_train"]["training_args"]["per_device_train_batch_size"] = 1
    values["actor_train"]["training_args"]["gradient_accumulation_steps"] = 4
    return values


@pytest.mark.parametrize("name", OF_ROLLOUTS)
def test_a_row_fills_in_what_nobody_wrote(rl: dict[str, Any], plan: Plan, name: str) -> None:
    row = algorithm(name)
    changes = {"algorithm_type": name} | ({"reference": REFERENCE} if row.kl_loss else {})
    if row.advantage == "gae":
        changes["critic"] = {**rl["actor_train"], "data_args": None}
    if row.expert_data_ratio:
        changes["demonstrations"] = {"data_args": rl["actor_train"]["data_args"], "response_key": "ground_truth"}
    run = plan(changes, pure=False, runnable=False)
    assert bool(row.expert_data_ratio) == (run.demonstrations is not None)
    objective = run.objective
    assert run.rollout.sampling.n == (row.repeat or 1)
    assert objective.policy_loss == row.policy_loss
    assert objective.adv_estimator == (row.advantage or "reinforce")
    assert bool(objective.kl_loss_coef) == (row.kl_loss is not None) == (run.reference is not None)
    if row.kl_loss:
        assert (objective.kl_loss, objective.kl_loss_coef) == ("k2", 0.001)
    if row.advantage in ("gae", "reinforceplusplus"):
        assert (objective.gamma, objective.whiten_advantages) == (1.0, True)
    assert objective.lambd == (1.0 if row.advantage == "gae" else 0.95)
    # Trinity-RFT aggregates token-mean; the loss of gspo is a mean over sequences
    assert objective.loss_agg_mode == ("seq-mean-token-mean" if name == "gspo" else "token-mean")
    assert plan({"loss_agg_mode": "seq-mean-token-sum"}, pure=False).objective.loss_agg_mode == "seq-mean-token-sum"


def test_without_a_row_rolls_defaults_stay(rl: dict[str, Any], plan: Plan) -> None:
    critic = {"critic": {**rl["actor_train"], "data_args": None}, "adv_estimator": "gae"}
    objective = plan({"num_return_sequences_in_group": 2, **critic}, pure=False).objective
    assert (objective.loss_agg_mode, objective.lambd, objective.kl_loss) == ("seq-mean-token-mean", 0.95, "low_var_kl")
    for name in ("gae", "ppo"):  # its advantage under Trinity-RFT's key
        assert plan({"adv_estimator": ..., "advantage_fn": name}, pure=False).objective.lambd == 1.0
    objective = plan({"advantage_fn": "ppo", "advantage_fn_args": {"lam": 0.9}}, pure=False).objective
    assert objective.lambd == 0.9


@pytest.mark.parametrize("row", ["raft", None])
def test_rewards_that_teach_nothing_are_named(rl: dict[str, Any], plan: Plan, row: str | None) -> None:
    loss = {"algorithm_type": row} if row else {"policy_loss_fn": "sft", "adv_estimator": "reinforce"}
    names = [name for name in rl["rewards"]]

    def said(changes: dict[str, Any]) -> list[str]:
        return [text for text in plan(changes, pure=False, runnable=False).warnings if "teaches nothing" in text]

    found = said(loss)
    assert [text.split(":")[0] for text in found] == [f"rewards.{name}" for name in names] and "sft" in found[0]
    filtered = {"type": "mean_filter", "filter_args": {"threshold_down": 0.5, "threshold_up": 1.5}}
    one = {names[0]: {**rl["rewards"][names[0]], "response_filter_config": filtered}}
    assert not said({"rewards": {name: {**rl["rewards"][name], **one[names[0]]} for name in names}})


@pytest.mark.parametrize("name", ["sft", "dpo"])
@pytest.mark.parametrize("more", [{}, {"beta": 0.1, "sft_train": {}, "actor_infer": ...}])
def test_rows_with_answers_have_pipelines_of_their_own(
    rl: dict[str, Any], problems: Problems, name: str, more: dict[str, Any]
) -> None:
    (found,) = problems({"algorithm_type": name, **more}, pure=False)
    assert f"algorithm_type: {name} trains on rows of schema {name}, not on rollouts; run it with start_{name}" in found
    assert f"run it with start_{name}_pipeline.py" in found


def test_pure_distillation_by_its_row(plan: Plan, values: dict[str, Any]) -> None:
    del values["num_return_sequences_in_group"]
    run = plan({"algorithm_type": "on_policy_distill", "rollout_batch_size": 4})
    assert (run.objective.policy_loss, run.objective.adv_estimator) == ("ppo", "on_policy_distill")
    assert run.objective.policy_loss_args == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    assert run.objective.loss_agg_mode == "token-mean"
    assert (run.rollout.sampling.n, run.objective.kl_loss_coef) == (8, 0.0)
    clipped = plan({"policy_loss_fn": "ppo", "policy_loss_fn_args": {"clip_range": 0.1}}).objective
    assert clipped.policy_loss_args == {"clip_low": 0.1, "clip_high": 0.1, "dual_clip": 3.0}


@pytest.mark.extras
def test_written_keys_win_over_those_of_the_algorithm(rl: dict[str, Any], plan: Plan) -> None:
    written = {
        "num_return_sequences_in_group": 4,
        "policy_loss_fn": "gspo",
        "policy_loss_fn_args": {"clip_range_high": 0.01},
        "advantage_fn": "opmd",
        "advantage_fn_args": {"opmd_baseline": "logavgexp"},
        "use_kl_loss": False,
        "gamma": 0.5,
    }
    run = plan({"algorithm_type": "grpo", **written}, pure=False)
    objective = run.objective
    assert (run.rollout.sampling.n, run.reference, objective.gamma) == (4, None, 0.5)
    assert (objective.policy_loss, objective.policy_loss_args) == ("gspo", {"clip_high": 0.01})
    assert (objective.adv_estimator, objective.advantage_args) == ("opmd", {"opmd_baseline": "logavgexp"})


def test_arguments_of_the_tokens_are_keys_of_their_own(rl: dict[str, Any], plan: Plan) -> None:
    arguments = {"advantage_fn": "reinforceplusplus", "advantage_fn_args": {"gamma": 0.9}}
    objective = plan({"policy_loss_fn": "ppo", **arguments}, pure=False).objective
    assert (objective.gamma, objective.whiten_advantages) == (0.9, True)
    assert objective.advantage_args == {"mean_cal_level": None, "std_cal_level": None}


@pytest.mark.extras
def test_rolls_keys_and_the_table_meet(rl: dict[str, Any], plan: Plan) -> None:
    objective = plan({"adv_estimator": "grpo", "norm_std_type": "batch"}, pure=False).objective
    assert objective.advantage_args == {"mean_cal_level": "group", "std_cal_level": "batch"}
    objective = plan({"pg_variant": "cispo", "adv_estimator": "reinforce"}, pure=False).objective
    assert (objective.policy_loss, objective.policy_loss_args) == ("cispo", {"clip_low": 0.1, "clip_high": 0.1})
    objective = plan({"pg_variant": ..., "importance_sampling": "seq", "pg_clip": 0.3}, pure=False).objective
    assert objective.policy_loss_args == {
        "clip_low": 0.3,
        "clip_high": 0.3,
        "dual_clip": None,
        "ratio_type": "sequence",
    }


def test_a_users_own_algorithm(rl: dict[str, Any], plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_row.py").write_text(
        textwrap.dedent("""
            from roll_opd.objective.algorithms import Algorithm

            MINE = Algorithm(
                "my_row.loss", "my_row.advantage", policy_loss_args={"power": 2}, kl_loss=None
            )
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    changes = {"algorithm_type": "my_row.MINE", "policy_loss_fn_args": {"scale": 3.0}}
    objective = plan(changes, pure=False).objective
    assert (objective.policy_loss, objective.policy_loss_args) == ("my_row.loss", {"power": 2, "scale": 3.0})
    assert (objective.adv_estimator, objective.advantage_args) == ("my_row.advantage", {})


@pytest.mark.extras
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm_type": "gpro"}, "algorithm_type: unknown algorithm 'gpro'; known are asymre, cispo"),
        ({"algorithm_type": "nowhere.MINE"}, "algorithm_type: algorithm nowhere.MINE: the module nowhere cannot be"),
        ({"algorithm_type": "os.getcwd"}, "algorithm_type: algorithm os.getcwd: os has no Algorithm named getcwd"),
        (
            {"policy_loss_fn": "ppoo"},
            "policy_loss_fn: unknown policy loss 'ppoo'; did you mean 'ppo'? Known are cispo,",
        ),
        ({"advantage_fn": "mine"}, "advantage_fn: unknown advantage 'mine'; known are"),
        (
            {"policy_loss_fn": "gspo", "policy_loss_fn_args": {"tau": 1}},
            "policy_loss_fn_args.tau: is not an argument of policy loss gspo, which takes clip_low, clip_high",
        ),
        (
            {"advantage_fn": "rloo", "advantage_fn_args": {"tau": 1}},
            "advantage_fn_args.tau: is not an argument of advantage rloo, which takes none",
        ),
        ({"policy_loss_fn_args": {"tau": 1}}, "policy_loss_fn_args: need a loss"),
        (
            {"policy_loss_fn": "ppo", "policy_loss": "tis"},
            "policy_loss_fn: contradicts policy_loss; keep only one of these keys",
        ),
        ({"pg_variant": "ppo3"}, "pg_variant: 'ppo3' is unknown; use one of vanilla, ppo, tis"),
        (
            {"kl_loss_fn": "k1", "use_kl_loss": True, "reference": REFERENCE, "adv_estimator": "grpo"},
            "kl_loss_fn: k1 as a KL loss has the gradient of log π, which",
        ),
        ({"algorithm_type": "grpo"}, "use_kl_loss: true needs a reference policy; write a reference section"),
    ],
)
def test_mistakes_are_explained(rl: dict[str, Any], problems: Problems, changes: dict, message: str) -> None:
    assert any(message in sentence for sentence in problems(changes, pure=False))


def test_a_loss_that_reads_no_advantages_cannot_distil(problems: Problems) -> None:
    assert any("reads no advantages, so the teachers' term" in text for text in problems({"policy_loss": "sft"}))
