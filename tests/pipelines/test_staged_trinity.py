"""A run from a YAML file of Trinity-RFT's, with a workflow in the form of its developer guide."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import REPOSITORY, Run
from safetensors.torch import load_file
from stage import Stage

from roll_opd.pipelines import launch

WORKFLOW = '''
from typing import List, Optional

from roll_opd.workflows import WORKFLOWS, Experience, ModelWrapper, Task, Workflow


@WORKFLOWS.register_module("guided_workflow")
class GuidedWorkflow(Workflow):
    """A question, answered as often as asked, and a reward for the right sum."""

    can_reset: bool = True

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: Optional[List] = None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task):
        self.question = task.raw_task.get("question")
        self.answer = task.raw_task.get("answer")
        self.rollout_args = task.rollout_args
        self.scale = task.workflow_args["scale"]

    def run(self) -> List[Experience]:
        responses = self.model.chat(
            [{"role": "user", "content": f"{self.question}"}],
            n=self.rollout_args.n,
            temperature=self.rollout_args.temperature,
        )
        made = []
        for response in responses:
            right = response.response_text.split()[-1:] == [self.answer]
            made.append(
                Experience(
                    tokens=response.tokens,
                    prompt_length=response.prompt_length,
                    reward=self.scale * float(right),
                    logprobs=response.logprobs,
                )
            )
        return made
'''
THEIRS = """
mode: both
project: sums
name: from_trinity
checkpoint_root_dir: ${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}
algorithm:
  algorithm_type: grpo
  repeat_times: 4
  kl_loss_fn_args: {kl_coef: 0.0}
  optimizer: {lr: 3e-4, betas: [0.9, 0.95], weight_decay: 0}
model:
  model_path: ${oc.env:TRINITY_MODEL_PATH,Qwen/Qwen2.5-1.5B-Instruct}
  max_prompt_tokens: 32
  max_response_tokens: 48
cluster: {node_num: 1, gpu_per_node: 8}
buffer:
  batch_size: 16
  total_epochs: 1
  explorer_input:
    taskset:
      name: sums
      storage_type: file
      path: rows
      split: train
      format: {prompt_key: question, response_key: answer}
      rollout_args: {temperature: 1.0}
      workflow_args: {scale: 2.0}
    default_workflow_type: guided_workflow
  trainer_input:
    experience_buffer: {name: sums_buffer, storage_type: queue}
explorer:
  runner_per_model: 8
  rollout_model: {engine_num: 4, tensor_parallel_size: 1, dtype: bfloat16, seed: 42}
synchronizer: {sync_method: nccl, sync_interval: 1}
trainer: {trainer_type: verl, save_interval: 0, grad_clip: 1.0, use_dynamic_bsz: true, max_token_len_per_gpu: 4096}
"""
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
    """Epochs become steps, rows are found beside the file, and what is learned from is the workflow's reward."""
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path / "checkpoints"))
    monkeypatch.setenv("TRINITY_MODEL_PATH", str(REPOSITORY / "examples/demo/models/student"))
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/guided.py").write_text(WORKFLOW)
    (tmp_path / "rows").mkdir()
    rng = np.random.default_rng(0)
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in rng.integers(100, 999, (40, 2))]
    (tmp_path / "rows/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "theirs.yaml").write_text(THEIRS)

    words = ["--config", str(tmp_path / "theirs.yaml"), f"plugin_dir={tmp_path}/plugins", "samples_per_step=64"]
    code = launch.main("a run on a stage", arguments=[*words, *AS_STAGED])

    told, wrong = capfd.readouterr()
    assert code == 0, wrong
    assert "buffer.total_epochs -> max_steps: 2" in " ".join(told.split())
    run = Run(code, told, (tmp_path / "checkpoints/sums/from_trinity/latest").resolve())
    steps = run.rows("metrics.jsonl")[1:]
    assert len(steps) == 2  # of 16 of the 40 rows each
    for step in steps:
        assert step["workflow/runs"] == 16 * 4 and "workflow/failed/raised" not in step
        assert 0 < step["critic/score/mean"] < 2 and step["actor/grad_norm"] > 0
    assert {sample["reward"] for sample in run.rows("samples.jsonl")} == {0.0, 2.0}
    before, after = load_file(stage.first_weights), load_file(run.path / "checkpoints/step_2/hf/model.safetensors")
    assert all(not torch.equal(before[name], after[name]) for name in before)
