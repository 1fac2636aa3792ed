"""A run with a LoRA student: the weights of its engines, the roles that use the base model, and a resume."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from runs import REPOSITORY, RLVR, Run, launch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

pytestmark = pytest.mark.usefixtures("forks")
START = REPOSITORY / "examples/demo/models/student"
STEPS = 2
LORA = (
    "exp_name=demo",
    "deterministic=true",
    f"max_steps={STEPS}",
    "save_steps=1",
    "max_ckpt_to_keep=null",
    "eval_steps=0",
    "validation=null",
    "rollout_batch_size=8",
    "logged_samples_per_step=32",
    "actor_train.training_args.per_device_train_batch_size=32",
    "actor_train.training_args.gradient_accumulation_steps=1",
    "use_kl_loss=true",
    "kl_loss_coef=0.1",
    "+reference={model_args: {dtype: fp32}, strategy_args: {strategy_name: megatron_infer}}",
    "+actor_train.model_args.lora_target=all-linear",
    "+actor_train.model_args.lora_rank=4",
    "lora_sync=adapter",
    "actor_train.training_args.learning_rate=1.0e-2",
    "actor_train.training_args.warmup_steps=0",
)


def run_of(output: Path, *more: str) -> Run:
    run = launch(output, *LORA, *more, launcher=RLVR, config=("demo", "rlvr"))
    assert run.code == 0, run.output[-3000:]
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(tmp_path_factory.mktemp("lora") / "output")


@torch.no_grad()
def logprobs(model: PreTrainedModel | PeftModel, row: dict) -> np.ndarray:
    """Return the log-probs of the response's tokens, f64."""
    tokens = row["tokens"]
    table = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return np.array([float(table[place - 1, tokens[place]]) for place in range(row["prompt_length"], len(tokens))])


def distances(run: Run) -> dict[str, tuple[float, float]]:
    """Return the largest distances of the trainer's and of the engines' log-probs in step 2 from peft in float32 and in
    float64, and those of peft in float32."""
    models = []
    for dtype in (torch.float32, torch.float64):
        base = AutoModelForCausalLM.from_pretrained(START, dtype=torch.float32)
        models.append(PeftModel.from_pretrained(base, run.path / "checkpoints/step_1/adapter").to(dtype))
    found: dict[str, np.ndarray] = {}
    for row in run.rows("samples.jsonl"):
        if row["step"] == STEPS:
            single, exact = (logprobs(model, row) for model in models)
            for name, given in (
                ("trainer", row["student_logprobs"]),
                ("engine", row["rollout_logprobs"]),
                ("peft", single),
            ):
                here = [np.abs(np.array(given) - wanted).max() for wanted in (single, exact)]
                found[name] = np.maximum(found.get(name, 0.0), here)
    return {name: (float(to_single), float(to_exact)) for name, (to_single, to_exact) in found.items()}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("devices", "layout"),
    [
        (2, "{tensor_model_parallel_size: 2}"),
        (3, "{pipeline_model_parallel_size: 3}"),
        (4, "{tensor_model_parallel_size: 2, context_parallel_size: 2}"),
    ],
)
def test_trainer_and_engines_agree_with_peft_in_layouts(tmp_path: Path, devices: int, layout: str) -> None:
    """As far as engines with whole weights do (`test_layout_runs.py`); the update sends only the adapter.

    How far float32 is from the exact values depends on the sampled sequences, so peft in float32 is the measure.
    """
    on = f"[{','.join(map(str, range(devices)))}]"
    where = (f"num_gpus_per_node={devices}", f"actor_train.device_mapping={on}", f"reference.device_mapping={on}")
    split = (f"{role}.strategy_args.strategy_config={layout}" for role in ("actor_train", "reference"))
    run = run_of(tmp_path / "output", *where, *split)
    found = distances(run)
    assert found["trainer"][0] <= 2e-5 and found["engine"][0] <= 1e-4, found
    assert found["trainer"][1] <= 2 * found["peft"][1] and found["engine"][1] <= 3 * found["peft"][1], found
    adapter = load_file(run.path / "checkpoints/step_1/adapter/adapter_model.safetensors")
    padded = sum(-(-tensor.nbytes // 64) * 64 for tensor in adapter.values())
    assert [row["system/weight_sync_bytes"] for row in run.rows("metrics.jsonl")[1:]] == [padded] * STEPS


@pytest.mark.nightly
def test_the_base_is_the_reference_and_the_engines_have_the_adapter(whole: Run) -> None:
    """Log-probs of the second step, after an update: of the base, and of base and adapter together."""
    base = AutoModelForCausalLM.from_pretrained(START, dtype=torch.float32)
    adapter = whole.path / "checkpoints/step_1/adapter"
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(START, dtype=torch.float32), adapter)
    rows = [row for row in whole.rows("samples.jsonl") if row["step"] == STEPS]
    assert len(rows) == 32
    differ = 0.0
    for row in rows:
        student, reference = logprobs(adapted, row), logprobs(base, row)
        np.testing.assert_allclose(row["ref_logprobs"], reference, rtol=0, atol=1e-4)
        np.testing.assert_allclose(row["student_logprobs"], student, rtol=0, atol=1e-4)
        np.testing.assert_allclose(row["rollout_logprobs"], student, rtol=0, atol=1e-3)
        differ = max(differ, float(np.abs(student - reference).max()))
    assert differ > 1e-2  # or nothing of this says anything


@pytest.mark.nightly
def test_only_the_adapter_was_trained(whole: Run) -> None:
    """The merged model differs from the base in its linear layers alone."""
    before, after = (load_file(path / "model.safetensors") for path in (START, whole.path / "checkpoints/step_2/hf"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}
    config = json.loads((whole.path / "checkpoints/step_2/adapter/adapter_config.json").read_text())
    assert config["r"] == 4 and config["base_model_name_or_path"] == str(START)


@pytest.mark.nightly
def test_a_resumed_run_has_the_same_bits(whole: Run, tmp_path: Path) -> None:
    resumed = run_of(tmp_path / "output", f"resume_from_checkpoint={whole.path / 'checkpoints/step_1'}")
    for file in ("adapter/adapter_model.safetensors", "hf/model.safetensors"):
        one, other = (load_file(run.path / "checkpoints/step_2" / file) for run in (whole, resumed))
        assert all(torch.equal(one[name], other[name]) for name in one), file


@pytest.mark.nightly
def test_a_run_in_turns_has_the_same_bits(whole: Run, tmp_path: Path) -> None:
    """All roles on one device, from a checkpoint, with the base as reference policy, and background saves."""
    turns = ("is_offload_states=true", "async_save=true", "actor_infer.device_mapping=[0]")
    run = run_of(tmp_path / "output", f"resume_from_checkpoint={whole.path / 'checkpoints/step_1'}", *turns)
    for file in ("adapter/adapter_model.safetensors", "hf/model.safetensors"):
        one, other = (load_file(each.path / "checkpoints/step_2" / file) for each in (whole, run))
        assert all(torch.equal(one[name], other[name]) for name in one), file
    read = [
        [row["ref_logprobs"] for row in each.rows("samples.jsonl") if row["step"] == STEPS] for each in (whole, run)
    ]
    assert read[0] == read[1]
