"""Runs of workflows: a user's workflows in Trinity-RFT's forms, and the workflows of the package."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import Run
from safetensors.torch import load_file
from stage import PURE, SHORT, WITH_REWARD, Stage, optimizer_of

pytestmark = pytest.mark.extras


def reinforced(stage: Stage, mine: tuple[str, ...], name: str, *more: str) -> Run:
    *settings, rows = mine
    file = f"actor_train.data_args.file_name={rows.partition('=')[2]}"
    settings += [*SHORT, *optimizer_of("actor_train"), "deterministic=false", f"workflow={name}", file]
    return stage.run(*settings, "max_steps=2", "workflow_workers=1", *more, config=WITH_REWARD)


@pytest.mark.parametrize("name", ["documented", pytest.param("older", marks=pytest.mark.nightly)])
def test_a_workflow_of_trinitys_trains(stage: Stage, mine: tuple[str, ...], name: str) -> None:
    run = reinforced(stage, mine, name, "max_steps=1", "workflow_workers=2")
    assert run.code == 0
    rows = run.rows("metrics.jsonl")[1:]
    for row in rows:
        assert row["workflow/runs"] == 16 * 4 and row["workflow/restarts"] == 0
        assert 0 < row["critic/score/mean"] < 1 and row["actor/grad_norm"] > 0
        assert row["rollout/mismatch/logprob_diff_max"] < 1e-3  # what was sampled is what is trained on
    for sample in run.rows("samples.jsonl"):
        answer = sample["response"].removesuffix("<|end|>").split()[-1]
        assert sample["reward"] == float(answer == sample["ground_truth"])
    before, after = load_file(stage.first_weights), load_file(run.path / "checkpoints/step_1/hf/model.safetensors")
    assert all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.nightly
def test_the_first_workflow_of_the_page(stage: Stage, mine: tuple[str, ...]) -> None:
    run = reinforced(stage, mine, "sums", "actor_train.training_args.per_device_train_batch_size=32")
    assert run.code == 0
    for row in run.rows("metrics.jsonl")[1:]:
        assert row["workflow/runs"] == 16 * 4 and "workflow/failed/raised" not in row
    samples = run.rows("samples.jsonl")
    assert {0.0, 1.0} <= {sample["reward"] for sample in samples} <= {0.0, 0.5, 1.0}
    assert len({sample["id"] for sample in samples}) == len(samples)


def test_a_conversation_is_trained_on_as_it_was_sampled(stage: Stage, mine: tuple[str, ...]) -> None:
    """Engine and trainer compute the same log-probs for three turns with user messages between them."""
    run = reinforced(stage, mine, "talk", "response_length=200", "logged_samples_per_step=64", "max_steps=1")
    assert run.code == 0
    for row in run.rows("metrics.jsonl")[1:]:
        assert row["workflow/runs"] == 16 * 4 and row["workflow/calls_mean"] == 3
        assert row["workflow/branches_mean"] == pytest.approx(1, abs=0.1)
        assert row["rollout/mismatch/logprob_diff_max"] < 1e-3
    for sample in run.rows("samples.jsonl"):
        assert 0 < sum(sample["action_mask"]) < len(sample["action_mask"])


@pytest.mark.nightly
def test_64_openai_clients_of_every_kind_get_the_log_probs_that_are_trained_on(
    stage: Stage, mine: tuple[str, ...]
) -> None:
    run = reinforced(stage, mine, "clients", "response_length=200", "max_steps=1")
    assert run.code == 0
    (row,) = run.rows("metrics.jsonl")[1:]
    assert row["workflow/runs"] == 16 * 4 and not any(name.startswith("workflow/failed") for name in row)
    assert row["workflow/endpoint/200"] == 16 * 4 * 3 and row["workflow/calls_mean"] == 3
    assert row["rollout/mismatch/logprob_diff_max"] < 1e-3


@pytest.mark.nightly
def test_the_agent_of_the_page_is_trained(stage: Stage, mine: tuple[str, ...]) -> None:
    settings = "workflow_args={agent: my_agent.solve}", "response_length=120", "max_steps=1", "rollout_batch_size=8"
    batch = "actor_train.training_args.per_device_train_batch_size=32"
    run = reinforced(stage, mine, "agent_workflow", *settings, batch)
    assert run.code == 0
    for row in run.rows("metrics.jsonl")[1:]:
        assert row["workflow/runs"] == 8 * 4 and not any(name.startswith("workflow/failed") for name in row)
        assert row["actor/grad_norm"] > 0 and row["rollout/mismatch/logprob_diff_max"] < 1e-3
    assert {0.0, 1.0} <= {sample["reward"] for sample in run.rows("samples.jsonl")} <= {0.0, 0.5, 1.0}


@pytest.mark.nightly
def test_a_model_beside_the_student_is_asked(stage: Stage, mine: tuple[str, ...]) -> None:
    """The judge is the demo's teacher, which knows the sums that the student does not."""
    judge = (
        "model_args: {model_name_or_path: examples/demo/models/teacher, dtype: fp32},"
        " generating_args: {max_new_tokens: 48}, device_mapping: '[0]',"
        " strategy_args: {strategy_name: vllm, strategy_config: {max_num_seqs: 16, kv_cache_memory_bytes: 33554432}}"
    )
    judges = f"+auxiliary_models={{judge: {{{judge}}}}}"
    run = reinforced(stage, mine, "judged", "max_steps=1", judges)
    assert run.code == 0
    (row,) = run.rows("metrics.jsonl")[1:]
    assert row["workflow/runs"] == 16 * 4 and row["workflow/calls_mean"] == 1
    assert row["critic/score/mean"] > 0.8 and not any(name.startswith("workflow/failed") for name in row)


@pytest.mark.nightly
def test_steps_are_compared_by_the_last_one_of_their_run(stage: Stage, mine: tuple[str, ...]) -> None:
    """A wrong sum is tried again: naively, the rewards of the runs' last tries are compared, and all tries get that."""
    more = ("prompt_key=question", "workflow_reward=accuracy_reward", "workflow_args={max_steps: 2}")
    sizes = ("response_length=120", "logged_samples_per_step=512", "adv_estimator=step_wise_grpo", "max_grad_norm=1")
    run = reinforced(stage, mine, "try_again_workflow", *more, *sizes)
    assert run.code == 0
    samples = run.rows("samples.jsonl")
    assert {len(sample["id"].split(".")) for sample in samples} == {1, 2}  # some runs have two tries
    for step in (1, 2):
        groups: dict[str, dict[str, list[dict]]] = {}
        for sample in [sample for sample in samples if sample["step"] == step]:
            group, _, name = sample["id"].rpartition("/")
            groups.setdefault(group, {}).setdefault(name.partition(".")[0], []).append(sample)
        for runs in groups.values():
            last = {name: max(tries, key=lambda sample: sample["id"])["reward"] for name, tries in runs.items()}
            mean, deviation = np.mean(list(last.values())), np.std(list(last.values()), ddof=1)
            for name, tries in runs.items():
                assert all(sample["reward"] == 0 for sample in tries[:-1])
                for sample in tries:
                    np.testing.assert_allclose(
                        sample["advantages"][0], (last[name] - mean) / (deviation + 1e-6), atol=1e-5
                    )


def test_log_probs_that_a_workflow_brings_stand_in_for_the_teachers(stage: Stage, mine: tuple[str, ...]) -> None:
    *settings, rows = mine
    file = f"student_train.data_args.file_name={rows.partition('=')[2]}"
    settings += [*SHORT, *optimizer_of("student_train"), "deterministic=false", "workflow=taught", file]
    run = stage.run(*settings, "max_steps=1", "teacher_preflight=false", config=PURE)
    assert run.code == 0
    (row,) = run.rows("metrics.jsonl")[1:]
    assert row["opd/reverse_kl/mean"] == pytest.approx(0.25, abs=1e-4)


@pytest.mark.nightly
def test_pure_distillation_by_workflow_is_that_of_the_launcher(stage: Stage) -> None:
    """The same prompts, seeds and tokens; with `deterministic`, also the same bits in two runs."""

    def pure(*more: str) -> Run:
        return stage.run(*SHORT, *optimizer_of("student_train"), "max_steps=1", *more, config=PURE)

    workflow = ("workflow=on_policy_distill_workflow", "prompt_key=messages")
    apart, one, other = pure(), pure(*workflow), pure(*workflow)
    assert apart.code == one.code == other.code == 0
    texts = [[sample["response"] for sample in run.rows("samples.jsonl")] for run in (apart, one, other)]
    assert texts[0] == texts[1] == texts[2]
    weights = [load_file(run.path / "checkpoints/step_1/hf/model.safetensors") for run in (one, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.nightly
def test_pure_distillation_records_the_rewards_of_a_hook_and_does_not_learn_from_them(
    stage: Stage, mine: tuple[str, ...]
) -> None:
    def pure(name: str) -> Run:
        *settings, rows = mine
        file = f"student_train.data_args.file_name={rows.partition('=')[2]}"
        settings += [*SHORT, *optimizer_of("student_train"), f"workflow={name}", "prompt_key=question", file]
        return stage.run(*settings, "max_steps=1", "teacher_preflight=false", "rewards=null", config=PURE)

    with_reward, without = pure("rewarded"), pure("unrewarded")
    assert with_reward.code == without.code == 0
    (row,), (other,) = (run.rows("metrics.jsonl")[1:] for run in (with_reward, without))
    samples = with_reward.rows("samples.jsonl")
    right = [float(s["response"].removesuffix("<|end|>").split()[-1:] == [s["ground_truth"]]) for s in samples]
    assert [sample["reward"] for sample in samples] == right and 0 < sum(right) < len(right)
    assert row["critic/score/mean"] == pytest.approx(row["workflow/own/accuracy"]) == pytest.approx(np.mean(right))
    assert "critic/score/mean" not in other and "workflow/own/accuracy" not in other
    weights = [load_file(run.path / "checkpoints/step_1/hf/model.safetensors") for run in (with_reward, without)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert json.loads((with_reward.path / "run.json").read_text())["pipeline"] == "workflow"


@pytest.mark.nightly  # on every push: a reward of a workflow's above, and the hooks in tests/workflows
@pytest.mark.parametrize(("name", "metric"), [("rewarded", "workflow/own/accuracy"), ("recorded", "example/reward")])
def test_rewards_of_trinitys_hooks_are_learned_from(
    stage: Stage, mine: tuple[str, ...], name: str, metric: str
) -> None:
    run = reinforced(stage, mine, name, "prompt_key=question", "max_steps=1")
    assert run.code == 0
    (row,) = run.rows("metrics.jsonl")[1:]
    assert row["workflow/runs"] == 16 * 4 and not any(key.startswith("workflow/failed") for key in row)
    assert row["critic/score/mean"] == pytest.approx(row[metric]) and 0 < row[metric] < 1
    assert row["actor/grad_norm"] > 0 and row["rollout/mismatch/logprob_diff_max"] < 1e-3


def test_a_workflow_that_never_works_ends_the_run(stage: Stage, mine: tuple[str, ...], capfd) -> None:
    run = reinforced(stage, mine, "simple_workflow", "prompt_key=questoin")
    reported = capfd.readouterr().err
    assert run.code == 1 and "the first 32 runs have all failed" in reported and "'questoin'" in reported


def test_a_plugin_that_fails_ends_the_run_before_it_starts(stage: Stage, tmp_path: Path, capfd) -> None:
    (tmp_path / "unready.py").write_text("import json\n\njson.loads('no')\n")
    settings = (*SHORT, *optimizer_of("student_train"))
    run = stage.run(*settings, "workflow=unready", f"plugin_dir={tmp_path}", config=PURE, name="unready")
    reported = capfd.readouterr().err
    assert run.code == 2 and "unready.py" in reported and "line 3" in reported and "JSONDecodeError" in reported
    assert not (stage.place / "unready").exists()
