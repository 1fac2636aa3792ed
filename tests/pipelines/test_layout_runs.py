"""Runs of pure distillation in many layouts: engines and trainer agree, and the student learns.

The models are made from the example's student: one more layer, or experts in place of its MLPs.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mixture import START, save, save_hybrid, save_mixture
from runs import Run, launch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("forks")
STEPS = 3
LEARNING_RATE = "student_train.training_args.learning_rate"
SETTINGS = (
    "exp_name=demo",
    f"max_steps={STEPS}",
    "save_steps=2",
    "max_ckpt_to_keep=null",
    "eval_steps=0",
    "validation=null",
    "rollout_batch_size=16",
    "student_train.training_args.gradient_accumulation_steps=1",
    "student_train.training_args.per_device_train_batch_size=64",
    f"{LEARNING_RATE}=3.0e-4",
    "student_train.training_args.warmup_steps=0",
)
STUDENT = "student_train.strategy_args.strategy_config"
TEACHER = "teacher.strategy_args.strategy_config"
R3 = ("+student_train.router_replay.mode=R3", "+student_infer.router_replay.mode=R3")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, which two virtual stages on two ranks need; the last one does next to nothing."""
    config = AutoConfig.from_pretrained(START)
    config.num_hidden_layers, config.layer_types = 4, ["full_attention"] * 4
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    weights = load_file(START / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    with torch.no_grad():
        for part in (model.model.layers[3].self_attn.o_proj, model.model.layers[3].mlp.down_proj):
            part.weight.mul_(1e-3)
    return save(model, tmp_path_factory.mktemp("deep"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model with four experts like the student's MLP, and routers whose logits differ only by rounding."""
    return save_mixture(tmp_path_factory.mktemp("mixture"))


def run_of(output: Path, *settings: str, model: Path = START) -> Run:
    roles = [f"{role}.model_args.model_name_or_path={model}" for role in ("student_train", "student_infer")]
    run = launch(output, *SETTINGS, *(roles if model != START else ()), *settings)
    assert run.code == 0, run.output[-3000:]
    kl = [row["opd/reverse_kl/mean"] for row in run.rows("metrics.jsonl")[1:]]
    assert kl[-1] < 0.9 * kl[0], kl
    return run


def apart(run: Run) -> float:
    """Return the largest difference of the engine's and the trainer's log-probs over all steps."""
    return max(row["rollout/mismatch/logprob_diff_max"] for row in run.rows("metrics.jsonl")[1:])


def agrees_with_hugging_face(run: Run) -> None:
    """The third step was sampled from the weights in the checkpoint after two steps."""
    model = AutoModelForCausalLM.from_pretrained(run.path / "checkpoints/step_2/hf", dtype=torch.float32)
    rows = [row for row in run.rows("samples.jsonl") if row["step"] == STEPS]
    for row in rows[:6]:
        np.testing.assert_allclose(row["student_logprobs"], hugging_faces(model, row), rtol=0, atol=2e-5)


def hugging_faces(model: Any, row: dict[str, Any]) -> np.ndarray:
    """Return the log-probs of a record's response, f32 [T-P], from a model of transformers."""
    with torch.no_grad():
        table = model(torch.tensor([row["tokens"]])).logits[0].float().log_softmax(-1)
    places = range(row["prompt_length"], len(row["tokens"]))
    return np.array([float(table[place - 1, row["tokens"][place]]) for place in places], np.float32)


@pytest.mark.nightly
def test_a_student_under_context_parallelism(tmp_path: Path) -> None:
    run = run_of(tmp_path / "output", f"+{STUDENT}.context_parallel_size=2")
    assert apart(run) <= 1e-4
    agrees_with_hugging_face(run)


@pytest.mark.nightly
def test_engines_of_two_ranks_inside_ray(tmp_path: Path) -> None:
    """After every update, they sample with the student's weights."""
    ranks = "+student_infer.strategy_args.strategy_config.tensor_parallel_size=2"
    run = run_of(tmp_path / "output", ranks, "student_train.device_mapping=[0]", "deterministic=true")
    assert apart(run) <= 1e-4
    agrees_with_hugging_face(run)


@pytest.mark.nightly
def test_a_student_in_virtual_stages_and_a_teacher_cut_twice(tmp_path: Path, deep: Path) -> None:
    """The teacher has four slots: tensor and context parallelism of two."""
    student = (f"{STUDENT}.pipeline_model_parallel_size=2", f"+{STUDENT}.virtual_pipeline_model_parallel_size=2")
    teacher = (f"{TEACHER}.tensor_model_parallel_size=2", f"+{TEACHER}.context_parallel_size=2")
    slots = ("num_gpus_per_node=4", "teacher.device_mapping='[0,1,2,3]'")
    run = run_of(tmp_path / "output", *student, *teacher, *slots, model=deep)
    assert apart(run) <= 1e-4
    agrees_with_hugging_face(run)


@pytest.mark.nightly
def test_a_student_that_learns_adapters_alone(tmp_path: Path) -> None:
    """The checkpoint's model is the base with the merged adapter, as in the engines."""
    keys = ("lora_target=all-linear", "lora_rank=8")
    adapters = (*(f"+student_train.model_args.{key}" for key in keys), f"{LEARNING_RATE}=1.0e-2")
    run = run_of(tmp_path / "output", *adapters, f"{STUDENT}.tensor_model_parallel_size=2")
    assert (run.path / "checkpoints/step_2/adapter/adapter_model.safetensors").is_file()
    assert apart(run) <= 1e-4
    agrees_with_hugging_face(run)


@pytest.mark.nightly
def test_a_mixture_of_experts_whose_routes_are_replayed(tmp_path: Path, mixture: Path) -> None:
    """Its router logits are almost equal: without replay, the trainer would choose other experts for many tokens."""
    experts = (f"+{STUDENT}.expert_model_parallel_size=2", "student_train.training_args.per_device_train_batch_size=32")
    run = run_of(tmp_path / "output", *experts, *R3, model=mixture)
    assert apart(run) <= 1e-4
    assert run.rows("metrics.jsonl")[1]["router/rerouted_tokens"] > 0.05


@pytest.mark.nightly
def test_a_hybrid_of_linear_and_full_attention_in_bf16(tmp_path: Path) -> None:
    """A Qwen3.5 with a dense teacher: trainer and engine differ no more than bf16 differs from f32 in transformers."""
    hybrid = save_hybrid(tmp_path / "hybrid")
    dtypes = [f"{role}.model_args.dtype=bf16" for role in ("student_train", "student_infer")]
    run = run_of(tmp_path / "output", *dtypes, f"{STUDENT}.tensor_model_parallel_size=2", model=hybrid)
    exported = AutoModelForCausalLM.from_pretrained(run.path / "checkpoints/step_2/hf", dtype=torch.float32)
    rows = [row for row in run.rows("samples.jsonl") if row["step"] == STEPS]
    exact = [hugging_faces(exported, row) for row in rows]
    rounded = [hugging_faces(exported.bfloat16(), row) for row in rows]
    bound = 3 * float(np.abs(np.concatenate(exact) - np.concatenate(rounded)).mean())
    assert 0 < run.rows("metrics.jsonl")[STEPS]["rollout/mismatch/logprob_diff_mean"] <= bound
    assert exported.config.layer_types[0] == "linear_attention"
