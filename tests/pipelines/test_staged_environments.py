"""Runs in environments: trained on the sampled tokens, in all three modes, with faults, and resumed exactly."""

from collections import Counter
from pathlib import Path

import pytest
from runs import AGENTIC, Run, launch
from safetensors.torch import load_file
from stage import PURE, SHORT, WITH_REWARD, WITH_TEACHER, Stage, optimizer_of

from roll_opd.workers import outage

pytestmark = pytest.mark.extras

GROUP_SIZE = 4


def settings_of(games: str, game: str, role: str) -> tuple[str, ...]:
    kept = [setting for setting in SHORT if not setting.startswith(("num_return", "rollout_batch", "deterministic"))]
    return (
        *kept,
        *optimizer_of(role),
        games,
        "~rewards",
        "rollout_batch_size=64",
        "sequence_length=250",
        "deterministic=false",
        f"custom_envs={{Game: {{env_type: {game}, max_steps: 4, step_timeout: 2, env_config: {{}}}}}}",
        f"train_env_manager={{tags: [Game], num_env_groups: 16, group_size: {GROUP_SIZE}}}",
        "~num_return_sequences_in_group",
        f"{role.replace('train', 'infer')}.generating_args.num_return_sequences=1",
        "logged_samples_per_step=64",
        "max_steps=2",
    )


def played(stage: Stage, games: str, game: str, role: str, *more: str, config: tuple[str, str] = WITH_REWARD) -> Run:
    return stage.run(*settings_of(games, game, role), *more, config=config, name=f"game_{game}_{config[1]}")


@pytest.mark.nightly
def test_an_agentic_run_learns_from_rewards_alone(stage: Stage, games: str) -> None:
    run = played(
        stage,
        games,
        "sums",
        "actor_train",
        "reward_normalization={grouping: traj_group_id, method: mean_std}",
        "val_env_manager={tags: [Game], num_env_groups: 8, group_size: 1}",
        "eval_steps=2",
    )
    assert run.code == 0
    before, *rows = run.rows("metrics.jsonl")
    assert before["val/env/Game/turns"] == 2 and "env/Game/turns" not in before
    assert [row["workflow/runs"] for row in (before, *rows)] == [8, 64, 64 + 8]  # validation, none, validation
    for row in rows:
        assert row["workflow/calls_mean"] == 2 and row["env/Game/turns"] == 2
        assert row["env/Game/return"] == pytest.approx(row["critic/score/mean"])
        assert row["rollout/mismatch/logprob_diff_max"] < 1e-3 and row["actor/grad_norm"] > 0
    samples = run.rows("samples.jsonl")
    assert {sample["reward"] for sample in samples} <= {0.0, 1.0, 2.0}
    by_group: dict[str, set[str]] = {}
    for sample in samples:
        assert 0 < sum(sample["action_mask"]) < len(sample["action_mask"])
        by_group.setdefault(sample["id"].split("/")[1], set()).add(sample["prompt"])
    assert all(len(prompts) == 1 for prompts in by_group.values())  # a group begins alike
    before, after = load_file(stage.first_weights), load_file(run.path / "checkpoints/step_2/hf/model.safetensors")
    assert any((before[name] != after[name]).any() for name in before)


@pytest.mark.nightly  # on every push: whole trajectories below, and steps with a teacher at the end
@pytest.mark.parametrize(("config", "role"), [(PURE, "student_train"), (WITH_TEACHER, "actor_train")])
def test_an_agentic_run_learns_from_a_teacher(stage: Stage, games: str, config: tuple[str, str], role: str) -> None:
    run = played(stage, games, "sums", role, config=config)
    assert run.code == 0
    for row in run.rows("metrics.jsonl")[1:]:
        assert row["workflow/runs"] == 64 and row["opd/reverse_kl/mean"] > 0 and row["actor/grad_norm"] > 0
        assert row["rollout/mismatch/logprob_diff_max"] < 1e-3


@pytest.mark.nightly
def test_the_teacher_plays_what_validation_plays(stage: Stage, games: str) -> None:
    held_out = "val_env_manager={tags: [Game], num_env_groups: 32, group_size: 1}"
    asked = "validation={evaluate_teacher: true}"
    run = played(stage, games, "sums", "student_train", held_out, asked, "max_steps=1", "eval_steps=1", config=PURE)
    assert run.code == 0
    before, row = run.rows("metrics.jsonl")
    assert before["val_correct/teacher/mean"] > before["val_correct/all/mean"] + 0.3
    assert before["workflow/runs"] == 32 and row["workflow/runs"] == 64 + 32  # what the teacher played is not counted


@pytest.mark.nightly
@pytest.mark.parametrize(("steps", "least"), [(1, 16), (3, 50)])
def test_faults_end_their_own_trajectory_alone(
    stage: Stage, games: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, least: int
) -> None:
    """Each fault is counted once under its name, and every other trajectory is trained on once."""
    monkeypatch.setattr(outage, "DOUBT_S", 2.0)  # seconds in which a game's timeout may be an outage
    log = tmp_path / "faults"
    run = played(
        stage, games, "faulty_sums", "actor_train", f"custom_envs.Game.env_config={{log: {log}}}", f"max_steps={steps}"
    )
    assert run.code == 0
    rows = run.rows("metrics.jsonl")[1:]
    assert len(rows) == steps
    # the games of a group have one seed, and go wrong alike; each is played once more, in case of an outage
    seeds = Counter(note.partition("-")[0] for note in set(log.read_text().split()))
    injected = Counter({kind: GROUP_SIZE * number for kind, number in seeds.items()})
    assert len(injected) == 3 and injected.total() >= least
    counted: Counter[str] = Counter()
    for step, row in enumerate(rows, 1):
        kinds = {
            name.rpartition("environment_")[2]: n for name, n in row.items() if name.startswith("workflow/failed/")
        }
        counted.update(kinds)
        assert row["workflow/runs"] >= 64  # groups of which none is left are made up for
        assert row["rollout/mismatch/logprob_diff_max"] < 1e-3 and row["actor/grad_norm"] > 0
        ids = [sample["id"] for sample in run.rows("samples.jsonl") if sample["step"] == step]
        assert len(ids) == len(set(ids)) == row["workflow/runs"] - sum(kinds.values())
    assert counted == injected


@pytest.mark.nightly
def test_a_game_that_ends_its_process_loses_and_repeats_no_trajectory(stage: Stage, games: str, tmp_path: Path) -> None:
    log = tmp_path / "grave"
    run = played(stage, games, "deadly", "actor_train", f"custom_envs.Game.env_config={{log: {log}}}", "max_steps=1")
    assert run.code == 0 and list(tmp_path.iterdir())
    (row,) = run.rows("metrics.jsonl")[1:]
    assert row["workflow/runs"] == 64 and row["workflow/restarts"] > 0
    ids = [sample["id"] for sample in run.rows("samples.jsonl")]
    assert len(ids) == len(set(ids)) == 64 - row.get("workflow/failed/worker_died", 0)


@pytest.mark.nightly
def test_killed_in_the_middle_of_its_games_and_resumed(stage: Stage, games: str, tmp_path: Path) -> None:
    """The same bits as a run without a kill."""
    turns, broken = tmp_path / "turns", tmp_path / "broken"  # 16 games of two turns a step
    settings = (*settings_of(games, "noted", "actor_train"), "deterministic=true", "save_steps=1", "max_ckpt_to_keep=1")
    settings = (
        *settings,
        "exp_name=demo",
        "max_steps=3",
        "rollout_batch_size=16",
        f"custom_envs.Game.env_config={{log: {turns}}}",
    )

    def in_step_3() -> bool:
        begun = any(path.read_text().count("\n") == 2 for path in broken.glob("demo/*/prompts.jsonl"))
        return begun and 2 * 32 + 4 < turns.read_text().count("\n") < 3 * 32 - 4

    killed = launch(broken, *settings, kill_when=in_step_3, launcher=AGENTIC, config=WITH_REWARD)
    assert killed.code == -9, killed.output[-4000:]
    assert not (killed.path / "checkpoints/step_3").exists()
    resumed = stage.run(*settings, "resume_from_checkpoint=true", config=WITH_REWARD, place=broken, name="demo")
    whole = stage.run(*settings, config=WITH_REWARD, place=tmp_path / "whole", name="demo")
    assert resumed.code == whole.code == 0 and resumed.path == killed.path.resolve()
    reported = [
        [
            (sample["id"], sample["tokens"], sample["reward"])
            for sample in one.rows("samples.jsonl")
            if sample["step"] == 3
        ]
        for one in (whole, resumed)
    ]
    assert reported[0] and sorted(reported[0]) == sorted(reported[1])
    weights = [load_file(one.path / "checkpoints/step_3/hf/model.safetensors") for one in (whole, resumed)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


def test_steps_are_compared_by_their_state_beside_a_teacher(stage: Stage, games: str) -> None:
    """For each action in samples.jsonl: the gigpo advantage from the rewards of its group's trajectories."""
    manager = "roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager"
    template = "agent_template: '{current_observation}'"
    run = played(
        stage,
        games,
        "sums",
        "actor_train",
        f"custom_envs={{Game: {{env_type: sums, max_steps: 4, env_manager_cls: {manager}, {template}}}}}",
        "adv_estimator=gigpo",
        "step_reward_gamma=0.5",
        "reward_normalization={grouping: traj_group_id, method: mean}",
        "rollout_batch_size=16",
        "logged_samples_per_step=100",
        "max_steps=1",
        config=WITH_TEACHER,
    )
    assert run.code == 0
    (row,) = run.rows("metrics.jsonl")[1:]
    assert row["workflow/runs"] == 16 and row["opd/reverse_kl/mean"] > 0 and row["actor/grad_norm"] > 0
    samples = run.rows("samples.jsonl")
    assert len(samples) == 32 and {sample["reward"] for sample in samples} == {0.0, 1.0}
    runs: dict[str, dict[str, list[dict]]] = {}
    for sample in samples:  # ids are group/run and group/run.1
        of_run = sample["id"].rpartition("/")[2].partition(".")[0]
        runs.setdefault(sample["group_id"], {}).setdefault(of_run, []).append(sample)
    assert [len(group) for group in runs.values()] == [4] * 4
    for group in runs.values():
        sums = [first["reward"] + second["reward"] for first, second in group.values()]
        firsts = [first["reward"] + 0.5 * second["reward"] for first, second in group.values()]
        seconds = [second["reward"] for _, second in group.values()]
        for place, steps in enumerate(group.values()):
            for returns, step in zip((firsts, seconds), steps, strict=True):
                worth = sums[place] - sum(sums) / 4 + returns[place] - sum(returns) / 4  # all see the same two sums
                assert all(step["action_mask"])
                assert step["external_advantages"] == pytest.approx([worth] * len(step["action_mask"]), abs=1e-6)
