"""Runs with async rollouts: ages are within the bound; each prompt is trained once, despite kills."""

from pathlib import Path

import pytest
import torch
from ahead_checks import ahead, check_ahead
from runs import AGENTIC, RLVR, Run, launch, of_run
from safetensors.torch import load_file
from test_lora_runs import LORA
from test_self_distillation import FOLLOWERS, HINTS

from roll_opd.tracking.audit import audit
from roll_opd.tracking.run_directory import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

STEPS, PROMPTS = 6, 16
# engines on the second slot; student and teacher on the first
AHEAD = (
    "student_train.device_mapping=[0]",
    "student_infer.device_mapping=[1]",
    "teacher.device_mapping=[0]",
    f"rollout_batch_size={PROMPTS}",
    "student_train.training_args.gradient_accumulation_steps=1",
    "validation.data_args.file_name=examples/demo/data/val.jsonl",
    "validation.evaluate_teacher=false",
    "eval_steps=0",
    "save_steps=2",
    "max_ckpt_to_keep=5",
)


def trained(run: Run) -> list[str]:
    return [name for row in run.rows("prompts.jsonl") for name in row["ids"]]


def check_ages(run: Run, bound: int) -> None:
    rows = [row for row in run.rows("metrics.jsonl") if row["step"]]
    ages = [row["rollout/async/age_max"] for row in rows]
    assert max(ages) <= bound and max(ages) > 0
    assert all(row["rollout/async/trained_groups"] <= row["rollout/async/admitted_groups"] for row in rows)
    assert all(0 < row["rollout/mismatch/ess"] <= 1.0 + 1e-9 for row in rows)


def test_a_killed_run_trains_each_prompt_once(tmp_path: Path) -> None:
    """It draws the prompts with unfinished answers again, and no trained prompts."""
    settings = (*AHEAD, f"max_steps={STEPS}", "async_generation_ratio=1")

    def has_saved() -> bool:
        return any((tmp_path / "out").glob("demo/*/checkpoints/step_2/run_state.json"))

    killed = launch(tmp_path / "out", *settings, kill_when=has_saved)
    assert killed.code < 0
    run = launch(tmp_path / "out", *settings, "resume_from_checkpoint=true")
    assert run.code == 0, run.output[-4000:]
    assert len(trained(run)) == len(set(trained(run))) == STEPS * PROMPTS
    check_ages(run, 1)
    synchronous = launch(tmp_path / "turns", *AHEAD, f"max_steps={STEPS}")
    assert trained(run) == trained(synchronous)  # strict order: the same prompts, in the same order


def test_a_deterministic_run_ends_with_the_same_bits_after_a_kill(tmp_path: Path) -> None:
    """The resumed run trains the finished groups of its checkpoint, and updates wait for the answers that run."""
    settings = (*AHEAD, "max_steps=4", "async_generation_ratio=1", "deterministic=true", "logged_samples_per_step=64")

    def has_saved() -> bool:
        return any((tmp_path / "two").glob("demo/*/checkpoints/step_2/run_state.json"))

    whole = launch(tmp_path / "one", *settings)
    killed = launch(tmp_path / "two", *settings, kill_when=has_saved)
    assert killed.code < 0
    assert list((tmp_path / "two").glob("demo/*/checkpoints/step_2/finished_groups.pickle"))
    resumed = launch(tmp_path / "two", *settings, "resume_from_checkpoint=true")
    assert whole.code == resumed.code == 0, whole.output[-4000:] + resumed.output[-4000:]
    assert whole.rows("samples.jsonl") == resumed.rows("samples.jsonl") and whole.draws == resumed.draws
    one, other = (load_file(run.path / "checkpoints/step_4/hf/model.safetensors") for run in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert audit(resumed.path)[1] == []


def test_a_window_lets_finished_groups_pass(tmp_path: Path) -> None:
    settings = (*AHEAD, f"max_steps={STEPS}", "async_generation_ratio=2", "async_depth=1", "save_steps=0")
    run = launch(tmp_path / "out", *settings)
    assert run.code == 0, run.output[-4000:]
    assert len(trained(run)) == len(set(trained(run))) == STEPS * PROMPTS
    check_ages(run, 2)


TIS = "+train_infer_correction={is_weight: {enabled: true}}"


def test_an_adapter_is_trained_ahead_with_its_base_as_reference(tmp_path: Path) -> None:
    settings = (*LORA, TIS, *ahead(2, 1), "max_steps=4", "save_steps=2")
    run = launch(tmp_path / "out", *settings, launcher=RLVR, config=("demo", "rlvr"))
    check_ahead(run, 2, groups=8, steps=4)
    assert list(run.path.glob("checkpoints/step_4/adapter/*.safetensors"))


def test_teachers_follow_a_student_whose_generation_is_ahead(tmp_path: Path) -> None:
    """They score a batch after its generation, with the weights of the step before."""
    run = launch(tmp_path / "out", *FOLLOWERS, *ahead(2, 1), config=HINTS)
    check_ahead(run, 2, groups=4, steps=4)


def test_a_game_is_trained_ahead_with_rewards_and_a_teacher(tmp_path: Path) -> None:
    settings = (
        "exp_name=games",
        "student_train.device_mapping=[0]",
        "student_infer.device_mapping=[1]",
        "teacher.device_mapping=[0]",
        "rollout_batch_size=32",
        "student_train.training_args.gradient_accumulation_steps=1",
        "train_env_manager={tags: [FrozenLake], num_env_groups: 8, group_size: 4}",
        "logged_samples_per_step=64",
        "eval_steps=0",
        "validation.evaluate_teacher=false",
        "max_steps=4",
    )
    run = launch(
        tmp_path / "out", *settings, TIS, *ahead(2, 1), launcher=AGENTIC, config=("games", "frozen_lake_mixed")
    )
    check_ahead(run, 2, groups=8, steps=4)
    assert all(row["env/FrozenLake/turns"] >= 1 for row in run.rows("metrics.jsonl")[1:])


def test_a_resumed_run_may_have_other_engines_bound_and_batches(tmp_path: Path) -> None:
    """Two engines in place of one, S = 1 in place of 2, and 8 prompts in place of 16."""
    first = launch(tmp_path / "out", *AHEAD, *ahead(2), "max_steps=4", "logged_samples_per_step=64")
    assert first.code == 0, first.output[-4000:]
    before = trained(first)
    changes = ("student_infer.device_mapping=[0,1]", *ahead(1), "rollout_batch_size=8", "max_steps=7")
    step_2 = f"resume_from_checkpoint={first.path}/checkpoints/step_2"
    batch = "student_train.training_args.per_device_train_batch_size=32"
    resumed = launch(tmp_path / "out", *AHEAD, *changes, batch, "logged_samples_per_step=64", step_2)
    assert resumed.code == 0, resumed.output[-4000:]
    counts, errors = audit(resumed.path)
    assert errors == [] and counts["trained"] == 2 * PROMPTS + 5 * 8
    after = trained(resumed)
    assert len(after) == len(set(after)) and after[: 2 * PROMPTS] == before[: 2 * PROMPTS]
    ages = [row["rollout/async/age_max"] for row in resumed.rows("metrics.jsonl") if row["step"] > 2]
    assert max(ages) <= 1


def test_two_engines_with_tensor_parallelism_generate_ahead(tmp_path: Path) -> None:
    """The student is on slot 0; the engines are on slots 1 and 2, and 3 and 4."""
    devices = ("num_gpus_per_node=5", "student_infer.device_mapping=[1,2,3,4]")
    split = "+student_infer.strategy_args.strategy_config.tensor_parallel_size=2"
    settings = (*AHEAD, *devices, split, "max_steps=4", "logged_samples_per_step=64")
    run = launch(tmp_path / "out", *settings, *ahead(1))
    check_ahead(run, 1, groups=PROMPTS, steps=4)


def test_a_run_with_a_stopped_engine_ends_with_the_list_of_waits(tmp_path: Path) -> None:
    stopped: list[int] = []

    def has_stepped() -> bool:
        if not stopped and any(read_jsonl(file) for file in (tmp_path / "out").glob("demo/*/ledger.jsonl")):
            engine = of_run(tmp_path / "out", "ray::RolloutWorker")[0]
            stopped.append(engine.pid)
            engine.suspend()
        return False

    settings = (*AHEAD, "max_steps=50", "async_generation_ratio=1", "save_steps=0", "stall_timeout_s=6")
    run = launch(tmp_path / "out", *settings, kill_when=has_stepped)
    assert run.code == 1 and stopped
    assert "nothing has moved for 6 s (stall_timeout_s): " in run.output
    assert "the driver waits for student_infer, engine 0" in run.output


def test_training_continues_during_a_validation_on_a_reserved_engine(tmp_path: Path) -> None:
    """Training and validation have the bits of a run that waits for its validations, also after a kill in one."""
    longer = ("eval_steps=2", "save_steps=3", "validation.generating_args.num_return_sequences=4")
    settings = (*AHEAD, *longer, "max_steps=6", "async_generation_ratio=1", "deterministic=true")
    reserved = (*settings, "student_infer.device_mapping=[0,1]", "validation_engines=1", "logged_samples_per_step=64")

    def validates() -> bool:
        """Return whether the weights of step 4 are being validated."""
        (metrics, samples) = (
            [row["step"] for path in (tmp_path / "two").glob(f"demo/*/{name}.jsonl") for row in read_jsonl(path)]
            for name in ("metrics", "samples")
        )
        return 4 in samples and 4 not in metrics

    waits = launch(tmp_path / "one", *settings, "logged_samples_per_step=64")
    killed = launch(tmp_path / "two", *reserved, kill_when=validates)
    assert killed.code < 0
    run = launch(tmp_path / "two", *reserved, "resume_from_checkpoint=true")
    assert waits.code == run.code == 0, waits.output[-4000:] + run.output[-4000:]
    check_ahead(run, 1, PROMPTS, 6, resumed_after=3)
    assert waits.rows("samples.jsonl") == run.rows("samples.jsonl") and waits.draws == run.draws
    one, other = ({row["step"]: row for row in each.rows("metrics.jsonl")} for each in (waits, run))
    validated = [step for step in other if "val_correct/all/mean" in other[step]]
    assert validated == [0, 2, 4, 6]
    assert all(one[step]["val_correct/all/mean"] == other[step]["val_correct/all/mean"] for step in validated)
    answers = run.rows("validation_samples.jsonl")
    assert {(row["step"], version) for row in answers for version, _ in row["versions"]} == {(s, s) for s in validated}
    # steps 2 and 3 waited less than the validation took
    assert other[2]["time/validate"] + other[3]["time/validate"] < other[2]["val/seconds"]
