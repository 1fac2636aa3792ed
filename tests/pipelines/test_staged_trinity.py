"""A run from a YAML file of Trinity-RFT, with a workflow in the form of its developer guide."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import REPOSITORY, Run
from safetensors.torch import load_file
from stage import Stage

TRINITY = Path(__file__).parent / "trinity"
# of the stage, whose roles are there already: the student on one slot, the engine on the other
AS_STAGED = (
    "num_gpus_per_node=2",
    "actor_train.device_mapping=[0]",
    "actor_infer.device_mapping=[1]",
    "actor_train.training_args.per_device_train_batch_size=64",
    "actor_train.training_args.gradient_accumulation_steps=1",
    "actor_train.max_tokens_per_microbatch_in_infer=8192",
)


def test_a_yaml_of_trinitys_trains(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Epochs become steps, rows are found next to the file, and the workflow's reward is trained on."""
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path / "checkpoints"))
    monkeypatch.setenv("TRINITY_MODEL_PATH", str(REPOSITORY / "examples/demo/models/student"))
    (tmp_path / "rows").mkdir()
    rng = np.random.default_rng(0)
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in rng.integers(100, 999, (40, 2))]
    (tmp_path / "rows/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copy(TRINITY / "sums.yaml", tmp_path / "theirs.yaml")

    words = ["--config", str(tmp_path / "theirs.yaml"), f"plugin_dir={TRINITY}", "logged_samples_per_step=64"]
    code = stage.launch([*words, *AS_STAGED])

    reported, wrong = capfd.readouterr()
    assert code == 0, wrong
    assert "buffer.total_epochs -> max_steps: 2" in " ".join(reported.split())
    run = Run(code, reported, (tmp_path / "checkpoints/sums/from_trinity/latest").resolve())
    steps = run.rows("metrics.jsonl")[1:]
    assert len(steps) == 2  # of 16 of the 40 rows each
    for step in steps:
        assert step["workflow/runs"] == 16 * 4 and "workflow/failed/raised" not in step
        assert 0 < step["critic/score/mean"] < 2 and step["actor/grad_norm"] > 0
    assert {sample["reward"] for sample in run.rows("samples.jsonl")} == {0.0, 2.0}
    before, after = load_file(stage.first_weights), load_file(run.path / "checkpoints/step_2/hf/model.safetensors")
    assert all(not torch.equal(before[name], after[name]) for name in before)
