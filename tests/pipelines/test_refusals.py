"""Wrong input to the launcher: a message, exit code 2, nothing started, nothing written."""

import json
import shutil
from pathlib import Path

import pytest
from runs import REPOSITORY
from safetensors.torch import load_file, save_file

from roll_opd.commands import run as launcher

DEMO = REPOSITORY / "examples" / "demo"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)

    def nothing_may_start(*_: object) -> None:
        raise AssertionError("the run was started")

    monkeypatch.setattr("roll_opd.cluster.ray_runtime.ray_cluster", nothing_may_start)


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    arguments = ["--config_path", "demo", "--config_name", "onpolicy_distill"]
    code = launcher.main("test", pure=True, arguments=[*arguments, f"output_dir={tmp_path / 'out'}", *overrides])
    assert code == 2
    assert not (tmp_path / "out").exists()
    return capsys.readouterr().err


def rows_file(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "rows.jsonl"
    good = json.dumps({"id": "a", "messages": [{"role": "user", "content": "1+1="}], "ground_truth": "2"})
    path.write_text("\n".join([good, *lines]) + "\n")
    return f"student_train.data_args.file_name={path}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{not json", ":2"),
        (json.dumps({"id": "b", "ground_truth": "2"}), "messages"),
        (json.dumps({"id": "b", "messages": "{not a list"}), ":2"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, expected: str) -> None:
    message = refused(tmp_path, capsys, rows_file(tmp_path, line))
    assert expected in message and "rows.jsonl" in message and "on_bad_row" in message


def test_long_prompts_are_refused_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = json.dumps({"id": "long", "messages": [{"role": "user", "content": "9" * 100}], "ground_truth": "2"})
    message = refused(tmp_path, capsys, rows_file(tmp_path, long), "on_long_prompt=refuse")
    assert "long" in message and "prompt_length" in message


def test_a_held_out_row_that_cannot_be_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "held_out.jsonl"
    path.write_text(json.dumps({"id": "a", "messages": [{"role": "user", "content": "1+1="}]}) + "\n")
    message = refused(tmp_path, capsys, f"validation.data_args.file_name={path}")
    assert "held_out.jsonl:1" in message and "ground_truth" in message


def test_missing_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(tmp_path, capsys, "teacher.model_args.model_name_or_path=/no/such/model")
    assert "teacher" in message and "/no/such/model" in message


def test_teacher_equal_to_student(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(tmp_path, capsys, "teacher.model_args.model_name_or_path=examples/demo/models/student")
    assert "allow_self_teacher" in message


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """A copy of the demo's teacher, to be damaged."""
    return Path(shutil.copytree(DEMO / "models" / "teacher", tmp_path / "teacher"))


def test_tokenizers_that_differ(tmp_path: Path, teacher: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = teacher / "tokenizer.json"
    file.write_text(file.read_text().replace("<|user|>", "<|human|>"))
    message = refused(tmp_path, capsys, f"teacher.model_args.model_name_or_path={teacher}")
    assert "'<|user|>' in the student, '<|human|>' in the teacher" in message and "teacher_tokenizer_check" in message


def test_a_config_with_a_layer_fewer(tmp_path: Path, teacher: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    message = refused(tmp_path, capsys, f"teacher.model_args.model_name_or_path={teacher}")
    assert "num_hidden_layers is 3, but the weights have 4 layers" in message


def test_weights_that_were_lost(tmp_path: Path, teacher: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = load_file(teacher / "model.safetensors")
    weights["model.norm.weight"] *= 0
    weights["model.layers.2.mlp.up_proj.weight"][:300] = 0
    save_file(weights, teacher / "model.safetensors")
    message = refused(tmp_path, capsys, f"teacher.model_args.model_name_or_path={teacher}")
    assert "teacher: model.norm.weight in" in message and "all numbers are zero" in message
    assert "teacher: model.layers.2.mlp.up_proj.weight in" in message and "half of the numbers are zero" in message


def test_a_model_that_the_engine_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = tmp_path / "teacher"
    shutil.copytree(DEMO / "models" / "teacher", changed)
    config = json.loads((changed / "config.json").read_text())
    config |= {"attention_bias": True, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    (changed / "config.json").write_text(json.dumps(config))
    message = refused(tmp_path, capsys, f"teacher.model_args.model_name_or_path={changed}")
    assert "attention_bias" in message and "'dynamic'" in message


def test_a_reward_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no.such" in refused(tmp_path, capsys, "rewards.math_rule.worker_cls=no.such.reward")


def test_resuming_from_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "/no/such/run" in refused(tmp_path, capsys, "resume_from_checkpoint=/no/such/run")


def test_all_problems_are_reported_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(tmp_path, capsys, "max_stepz=3", "response_length=4096", "student_train.device_mapping=[7]")
    for part in ("max_stepz", "max_steps", "2048", "device_mapping"):
        assert part in message
