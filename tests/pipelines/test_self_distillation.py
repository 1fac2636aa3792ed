"""A model that teaches itself with a hint: the file on the page, followers of every kind with a resume, and the
alarm in a run that collapses.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from runs import REPOSITORY, Run, launch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from roll_opd.extras.alarm.divergence_alarm import AGREEMENT, ENTROPY, READ
from tests.pages import blocks

# on every push: followers' weights in test_megatron_follower.py, a teacher's hint in test_staged_hints.py
pytestmark = [pytest.mark.usefixtures("forks"), pytest.mark.nightly]
START = REPOSITORY / "examples/demo/models/hinted"
HINTS = ("demo", "hints")


def alarms(run: Run) -> list[str]:
    warnings = json.loads((run.path / "summary.json").read_text())["warnings"]
    return [name for name in READ for text in warnings if text.startswith(f"{name}: ")]


def test_the_example_of_the_page(tmp_path: Path) -> None:
    """A student learns a task that neither student nor teacher can solve without the hint."""
    page, example = yaml.safe_load(blocks("teacher-context.md", "yaml")[0]), REPOSITORY / "examples/demo/hints.yaml"
    whole = yaml.safe_load(example.read_text(encoding="utf-8"))
    whole["teacher"] = {name: whole["teacher"][name] for name in page["teacher"]}
    assert page.items() <= whole.items()
    run = launch(tmp_path / "output", config=HINTS)
    assert run.code == 0, run.output[-3000:]
    run.path = (tmp_path / "output/hints/latest").resolve()
    rows = run.rows("metrics.jsonl")
    assert rows[0]["val_correct/all/mean"] == 0 and rows[0]["val_correct/teacher/mean"] < 0.02
    assert rows[-1]["val_correct/all/mean"] > 0.9 and not alarms(run)
    for answer in run.rows("validation_samples.jsonl"):  # held-out rows are read by nobody who has a hint
        assert answer["teacher_logprobs"] == {}


def test_a_live_teacher_with_a_hint_that_says_nothing_of_the_row_collapses(tmp_path: Path) -> None:
    settings = ("exp_name=demo", "max_steps=12", "validation.evaluate_teacher=false", "eval_steps=0")
    run = launch(tmp_path / "output", *settings, "+teacher.follows_student={}", 'teacher.hint="000"', config=HINTS)
    assert run.code == 0, run.output[-3000:]
    assert {ENTROPY, AGREEMENT} <= set(alarms(run)) and "follows_student.ema_decay" in run.output


FOLLOWS = {"slow": "{ema_decay: 0.75}", "late": "{update_interval: 3}", "live": "{}"}
LAYOUTS = {"slow": "tensor_model_parallel_size: 2", "late": "pipeline_model_parallel_size: 2", "live": ""}
STEPS, SAVED = 4, 2


def section(name: str) -> str:
    keys = (
        "model_args: {dtype: fp32}",
        f"strategy_args: {{strategy_name: megatron_infer, strategy_config: {{{LAYOUTS[name]}}}}}",
        f"device_mapping: '{'[0,1]' if LAYOUTS[name] else '[1]'}'",
        "hint: '{ground_truth}'",
        f"follows_student: {FOLLOWS[name]}",
    )
    return f"{name}: {{{', '.join(keys)}}}"


FOLLOWERS = (
    "exp_name=demo",
    "deterministic=true",
    f"max_steps={STEPS}",
    "save_steps=1",
    "eval_steps=0",
    "validation=null",
    "rollout_batch_size=4",
    "logged_samples_per_step=16",
    "student_train.training_args.per_device_train_batch_size=16",
    "student_train.training_args.lr_scheduler_type=constant",
    "student_train.training_args.warmup_steps=0",
    "~teacher",
    f"+teacher={{{', '.join(map(section, FOLLOWS))}}}",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = launch(tmp_path_factory.mktemp("whole"), *FOLLOWERS, config=HINTS)
    assert run.code == 0, run.output[-3000:]
    return run


def student(run: Run, step: int) -> Path:
    return run.path / f"checkpoints/step_{step}/hf" if step else START


def teacher(run: Run, name: str, step: int) -> Path:
    """Return the weights with which a teacher scores the samples of the step after `step`."""
    if name == "live" or not step:
        return student(run, step)
    return run.path / f"checkpoints/step_{step}/followers/teacher.{name}"


def weights(model: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in load_file(model / "model.safetensors").items()}


def test_followers_have_the_weights_that_they_should(whole: Run) -> None:
    average = weights(START)
    for step in range(1, STEPS + 1):
        own = weights(student(whole, step))
        average = {name: 0.75 * average[name] + 0.25 * own[name] for name in own}
        torch.testing.assert_close(weights(teacher(whole, "slow", step)), average, rtol=0, atol=1e-6)
        late = weights(student(whole, step // 3 * 3))
        assert all(torch.equal(late[name], found) for name, found in weights(teacher(whole, "late", step)).items())
        assert not (whole.path / f"checkpoints/step_{step}/followers/teacher.live").exists()  # it is the student's


def test_a_resumed_run_has_the_same_bits(whole: Run, tmp_path: Path) -> None:
    checkpoint = whole.path / f"checkpoints/step_{SAVED}"
    resumed = launch(tmp_path / "output", *FOLLOWERS, f"resume_from_checkpoint={checkpoint}", config=HINTS)
    assert resumed.code == 0, resumed.output[-3000:]
    for place in ("hf", "followers/teacher.slow", "followers/teacher.late"):
        one, other = (weights(run.path / f"checkpoints/step_{STEPS}" / place) for run in (whole, resumed))
        assert all(torch.equal(one[name], other[name]) for name in one), place


def test_a_checkpoint_without_the_teacher_is_refused(whole: Run, tmp_path: Path) -> None:
    checkpoint = whole.path / f"checkpoints/step_{SAVED}"
    slower = [text.replace("late: ", "other: ") for text in FOLLOWERS]
    refused = launch(tmp_path / "output", *slower, f"resume_from_checkpoint={checkpoint}", config=HINTS)
    assert refused.code == 2 and "has no weights of teacher.other, which follows the student" in refused.output


@torch.no_grad()
def table(model: PreTrainedModel, prompt: list[int], response: list[int]) -> torch.Tensor:
    """[R, V]: the distribution of each response token behind `prompt`."""
    return model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)


def test_they_teach_with_these_weights(whole: Run) -> None:
    """Log-probs and the divergence in the loss are those of Hugging Face's models, with the weights of each step."""
    tokenizer = AutoTokenizer.from_pretrained(START)
    metrics, samples = whole.rows("metrics.jsonl")[1:], whole.rows("samples.jsonl")
    for step in range(1, STEPS + 1):
        paths = {name: teacher(whole, name, step - 1) for name in FOLLOWS} | {"": student(whole, step - 1)}
        models = {name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for name, path in paths.items()}
        total, count = 0.0, 0
        for row in (row for row in samples if row["step"] == step):
            prompt, response = row["tokens"][: row["prompt_length"]], row["tokens"][row["prompt_length"] :]
            own, chosen = table(models[""], prompt, response), torch.tensor(response)[:, None]
            count += len(response)
            for name in FOLLOWS:
                other = table(models[name], tokenizer(row["teacher_prompts"][name])["input_ids"], response)
                naive = other.gather(1, chosen)[:, 0].numpy()
                np.testing.assert_allclose(row["teacher_logprobs"][name], naive, rtol=1e-5, atol=1e-5)
                total += float((other.exp() * (other - own)).sum())
        assert metrics[step - 1]["actor/opd_loss"] == pytest.approx(total / count, rel=1e-4)
