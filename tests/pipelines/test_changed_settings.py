"""A run resumed with changed settings: its training, output, checkpoint, model card and loading script."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import REPOSITORY, Run, launch
from safetensors.torch import load_file

from roll_opd.tracking.run_directory import STATE_FILE

SFT = {"launcher": "start_sft_pipeline.py", "config": ("demo", "sft")}
ARGS = "sft_train.training_args"
SETTINGS = (
    *("deterministic=true", "exp_name=demo", "save_steps=2", "max_ckpt_to_keep=0", "eval_steps=0", "max_steps=4"),
    *("train_batch_size=64", f"{ARGS}.lr_scheduler_type=constant", f"{ARGS}.warmup_steps=0"),
)


def learning_rates(run: Run) -> list[float]:
    return [row["actor/lr"] for row in run.rows("metrics.jsonl") if row["step"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, forks: None) -> Run:
    run = launch(tmp_path_factory.mktemp("whole") / "run", *SETTINGS, **SFT)
    assert run.code == 0, run.output[-4000:]
    return run


def fork(whole: Run, place: Path, *changes: str) -> Run:
    """Continue from step 2 of `whole` in another experiment."""
    run = launch(place, *SETTINGS, f"resume_from_checkpoint={whole.path / 'checkpoints/step_2'}", *changes, **SFT)
    assert run.code == 0, run.output[-4000:]
    return run


@pytest.mark.nightly  # on every push: what an optimizer takes, test_megatron_changed.py; what is named, test_history.py
@pytest.mark.extras
def test_changed_settings_are_taken_and_named(whole: Run, tmp_path: Path) -> None:
    changes = (f"{ARGS}.learning_rate=3e-4", f"{ARGS}.adam_beta1=0.7", f"{ARGS}.adam_epsilon=1e-6")
    run = fork(whole, tmp_path / "fork", *changes)
    assert learning_rates(whole) == [1e-3] * 4 and learning_rates(run) == [3e-4] * 2
    line = next(line for line in run.output.splitlines() if line.startswith("Settings changed after step 2: "))
    wanted = {"learning_rate: 0.001 → 0.0003", "adam_beta1: 0.9 → 0.7", "adam_epsilon: 1e-08 → 1e-06"}
    assert set(line.partition(": ")[2].split("; ")) == {f"{ARGS}.{change}" for change in wanted}
    assert line in (run.path / "console.log").read_text()
    parts = [{"first": 1, "last": 2}, {"first": 3, "last": 4}]
    for name in ("run.json", "summary.json"):
        found = json.loads((run.path / name).read_text())["parts"]
        assert found[1]["changed"][f"{ARGS}.learning_rate"] == [1e-3, 3e-4]
        assert [part["first"] for part in found] == [1, 3]
    saved = json.loads((run.path / "checkpoints/step_4" / STATE_FILE).read_text())["parts"]
    assert [{name: part[name] for name in ("first", "last")} for part in saved] == parts
    card = (run.path / "checkpoints/step_4/hf/README.md").read_text()
    assert f"| `{ARGS}.learning_rate` | 0.001 | 0.0003 |" in card
    assert "changed from step 3" in (run.path / "report.html").read_text()


@pytest.mark.nightly
def test_unchanged_settings_go_on_to_the_bit(whole: Run, tmp_path: Path) -> None:
    run = fork(whole, tmp_path / "fork", "logging_steps=2")
    assert "Settings are the same as in step 2" in run.output
    one, other = (load_file(each.path / "checkpoints/step_4/hf/model.safetensors") for each in (whole, run))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.nightly
@pytest.mark.parametrize("of", ["console", "card"])
@pytest.mark.extras
def test_the_snippet_runs_as_a_script(whole: Run, tmp_path: Path, of: str) -> None:
    """As printed, and as in the model card; on any machine."""
    model = whole.path / "checkpoints/step_4/hf"
    text = whole.output if of == "console" else (model / "README.md").read_text().partition("```python")[2]
    code = text[text.index("model_dir = ") :].partition("```")[0]
    lines = [line for line in code.splitlines() if not line or line.startswith(("model_dir", "prompt", "if ", " "))]
    script = tmp_path / "pasted.py"
    script.write_text("\n".join(lines[: max(n for n, line in enumerate(lines) if "print(" in line) + 1]))
    place = REPOSITORY if of == "console" else model
    done = subprocess.run([sys.executable, script], cwd=place, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip()
