"""Runs on teacher files: same loss as with the live teacher, learning, and refused configurations."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import REPOSITORY, Run, launch
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll_opd.commands import run as launcher
from roll_opd.config.plan import FilePlan, ObjectivePlan
from roll_opd.data.dataset import Prompt
from roll_opd.data.teacher_files import TeacherWriter
from roll_opd.data.teacher_scores import TeacherScores
from roll_opd.models.tokenizer_files import vocabulary_fingerprint
from roll_opd.teachers.file_teacher import file_checks

pytestmark = pytest.mark.usefixtures("forks")
MODELS = REPOSITORY / "examples/demo/models"
ROWS, K = 64, 8
SETTINGS = (
    *("exp_name=teachers", "deterministic=true", "num_gpus_per_node=1", "student_train.device_mapping=[0]"),
    "student_train.strategy_args.strategy_config.tensor_model_parallel_size=1",
    *("student_train.training_args.gradient_accumulation_steps=2", "eval_steps=0", "validation=null"),
)


def rows_of(file: Path, count: int) -> list[dict]:
    """Rows of the demo's SFT data as tokens."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "teacher")
    rows = []
    for number, line in enumerate(file.read_text().splitlines()[:count]):
        messages = json.loads(line)["messages"]
        texts = [
            tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True),
            tokenizer.apply_chat_template(messages, tokenize=False),
        ]
        prompt, whole = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        rows.append({"id": number, "tokens": whole, "prompt_length": len(prompt)})
    return rows


@cache
def network(model: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(MODELS / model, dtype=torch.float32)


def answer_logprobs(model: str, row: dict) -> torch.Tensor:
    """Log-probs of the whole vocabulary at every answer token, f64 [R, V], by Hugging Face's model."""
    with torch.no_grad():
        logits = network(model)(torch.tensor([row["tokens"]])).logits[0].double()
    return logits.log_softmax(-1)[row["prompt_length"] - 1 : -1]


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return rows_of(REPOSITORY / "examples/demo/data/sft_train.jsonl", ROWS)


@pytest.fixture(scope="module")
def file(rows: list[dict], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher file of the demo's teacher."""
    path = tmp_path_factory.mktemp("scores") / "scores.parquet"
    facts = {"teacher": "large", "tokenizer": vocabulary_fingerprint(MODELS / "teacher"), "temperature": 1.0}
    scores = []
    for row in rows:
        logprobs = answer_logprobs("teacher", row)
        best = logprobs.topk(K, dim=-1)
        tokens = torch.tensor(row["tokens"][row["prompt_length"] :])
        own = logprobs.gather(1, tokens[:, None])[:, 0]
        rest = torch.log1p(-best.values.exp().sum(1).clamp(max=1 - 1e-12))
        arrays = {"logprobs": own, "topk_logprobs": best.values, "topk_rest": rest}
        scores.append({"topk_ids": best.indices.int().numpy()} | {n: v.float().numpy() for n, v in arrays.items()})
    writer = TeacherWriter(path, facts, K, 320, {})
    writer.write(0, rows, scores)
    writer.finish()
    return path


def trained(path: Path, file: Path, *overrides: str) -> Run:
    settings = (*SETTINGS, f"teacher.files={file}", *overrides)
    run = launch(path, *settings, launcher="start_offline_distill_pipeline.py", config=("teachers", "topk_file"))
    assert run.code == 0, run.output[-4000:]
    return run


def test_the_loss_on_a_file_is_that_of_the_live_teacher(rows: list[dict], file: Path, tmp_path: Path) -> None:
    """Forward KL over the teacher's top-k and the rest, from both models' whole distributions; then it falls."""
    slowly = ("student_train.training_args.warmup_steps=0", "student_train.training_args.learning_rate=1e-4")
    run = trained(tmp_path / "run", file, "max_steps=3", *slowly)
    total, tokens = 0.0, 0
    for row in rows:
        teacher, student = (answer_logprobs(model, row) for model in ("teacher", "student"))
        ids = teacher.topk(K, dim=-1).indices
        p, q = (side.gather(1, ids).exp() for side in (teacher, student))
        p_rest, q_rest = (1 - side.sum(1, keepdim=True) for side in (p, q))
        p, q = torch.cat([p, p_rest], 1), torch.cat([q, q_rest], 1)
        total += float((p * (p / q).log()).nan_to_num(0.0).sum())
        tokens += len(p)
    metrics = run.rows("metrics.jsonl")
    assert metrics[1]["actor/opd_loss"] == pytest.approx(total / tokens, rel=1e-4)
    assert metrics[1]["actor/total_loss"] == pytest.approx(total / tokens, rel=1e-4)
    assert metrics[3]["actor/opd_loss"] < 0.95 * metrics[1]["actor/opd_loss"]
    assert metrics[1]["opd/log_ratio/mean"] != metrics[-1]["opd/log_ratio/mean"]
    names = {name for row in metrics for name in row}  # the student has not sampled the answers, so no KL is known
    assert not {name for name in names if "reverse_kl" in name or name.startswith("critic/kl")}
    assert "mass of the top-k" in run.output and "alignment" in run.output


@pytest.mark.nightly
def test_lightning_opd_recomputes_the_student(rows: list[dict], file: Path, tmp_path: Path) -> None:
    """The penalty of a later step has the student's log-probs of that step, and the teacher's of the file."""
    sampled = ("opd_objective=sampled", "max_steps=2", "student_train.training_args.warmup_steps=0")
    run = trained(tmp_path / "run", file, *sampled)
    gaps = []
    for row in rows:
        tokens = torch.tensor(row["tokens"][row["prompt_length"] :])[:, None]
        teacher, student = (answer_logprobs(model, row).gather(1, tokens) for model in ("teacher", "student"))
        gaps.append(student - teacher)
    metrics = run.rows("metrics.jsonl")
    assert metrics[1]["opd/reverse_kl/mean"] == pytest.approx(float(torch.cat(gaps).mean()), rel=1e-4)
    assert metrics[2]["opd/reverse_kl/mean"] != pytest.approx(metrics[1]["opd/reverse_kl/mean"], rel=1e-3)
    assert "teacher of the fine-tuning is unknown" in run.output


@pytest.mark.nightly
def test_the_commands_of_lightning_opd_lower_the_reverse_kl(tmp_path: Path) -> None:
    """docs/teacher-files.md: sample with the student, score with the teacher, train; f32 at each place."""
    rollouts, scores = tmp_path / "rollouts.jsonl", tmp_path / "scores.parquet"
    sample = [str(REPOSITORY / "examples/teachers/sample_rollouts.py"), str(MODELS / "student")]
    sample += [str(REPOSITORY / "examples/demo/data/train.jsonl"), str(rollouts), "--limit", "128"]
    score = ["-m", "roll_opd", "score", "--model", str(MODELS / "teacher"), "--input", str(rollouts)]
    score += ["--name", "my-teacher", "--output", str(scores)]
    for command in (sample, score):
        subprocess.run([sys.executable, *command], check=True, cwd=REPOSITORY)
    rows = [json.loads(line) for line in rollouts.read_text().splitlines()]
    assert len(rows) == 128 and all(len(row["tokens"]) > row["prompt_length"] > 1 for row in rows)
    gaps = []
    for row in rows[:16]:
        tokens = torch.tensor(row["tokens"][row["prompt_length"] :])[:, None]
        student, teacher = (answer_logprobs(model, row).gather(1, tokens) for model in ("student", "teacher"))
        gaps.append(student - teacher)
    assert float(torch.cat(gaps).mean()) > 0.05  # a reverse KL: the student sampled these answers
    settings = (f"teacher.files={scores}", *SETTINGS, "exp_name=teachers", "max_steps=12")
    launcher_name, config = "start_offline_distill_pipeline.py", ("teachers", "lightning_opd")
    run = launch(tmp_path / "run", *settings, launcher=launcher_name, config=config)
    assert run.code == 0, run.output[-4000:]
    metrics = run.rows("metrics.jsonl")
    assert metrics[-1]["opd/reverse_kl/mean"] < 0.8 * metrics[1]["opd/reverse_kl/mean"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("teacher.name=small", "its teacher is 'large', but teacher.name is 'small'"),
        ("opd_topk=9", "opd_topk: 9 is more than the 8 tokens in the files"),
        ("student_train.data_args.file_name=examples/demo/data/sft_train.jsonl", "the rows come from teacher.files"),
        ("opd_divergence=kl", "opd_divergence: should be"),
        ("+student_infer={}", "teacher.files: a teacher file has scores only of the answers in it"),
    ],
)
def test_what_cannot_work_is_refused(
    file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    override: str,
    expected: str,
) -> None:
    monkeypatch.chdir(REPOSITORY)
    settings = (*SETTINGS, f"teacher.files={file}", f"output_dir={tmp_path / 'out'}", "max_steps=1", override)
    arguments = ["--config_path", "teachers", "--config_name", "topk_file", *settings]
    assert launcher.main("test", arguments=arguments) == 2
    assert expected in " ".join(capsys.readouterr().err.split())


SOURCE = FilePlan("teacher", ("scores.parquet",))
SAMPLED = ObjectivePlan(opd_objective="sampled")


def prompts(change: Callable[[np.ndarray], np.ndarray]) -> tuple[list[Prompt], list[np.ndarray]]:
    """Rows of random log-probs, changed by `change`, and the student's, which are close to the unchanged ones."""
    rng, rows, students = np.random.default_rng(0), [], []
    for number in range(8):
        teacher = -rng.exponential(1.0, 30).astype(np.float32)
        students.append((teacher + rng.normal(0, 0.1, 30)).astype(np.float32))
        ids = np.zeros(30, np.int64)
        scores = TeacherScores(ids[:1], ids, logprobs=change(teacher), teacher="large", tokenizer="abc")
        rows.append(Prompt(str(number), number, "", ids[:1], answers=(ids,), scores=scores))
    return rows, students


def test_log_probs_of_shifted_tokens_fail_the_preflight() -> None:
    rows, students = prompts(lambda values: values)
    assert {check.verdict for check in file_checks(rows, students, replace(SOURCE, sft_teacher="large"), SAMPLED)} == {
        "ok"
    }
    for shift in (-1, 1):
        rows, students = prompts(lambda values, shift=shift: np.roll(values, shift))
        (found,) = [c for c in file_checks(rows, students, SOURCE, SAMPLED) if c.check == "alignment"]
        assert found.verdict == "failed" and f"{-shift:+d} places away" in found.meaning


def test_another_teacher_than_that_of_the_fine_tuning_fails_the_preflight() -> None:
    rows, students = prompts(lambda values: values)
    (found,) = [
        check
        for check in file_checks(rows, students, replace(SOURCE, sft_teacher="small"), SAMPLED)
        if check.check == "teacher consistency"
    ]
    assert found.verdict == "failed" and "large; fine-tuned on small" in found.value
