"""The works of all sides: the demo's configuration with overrides, and its plan as a file for the peers.

All settings of a peer are read from the plan of our run, so that all sides have the same settings. Models that are
larger than the demo's are made here, with random weights.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_opd.config.plan import RunPlan
from roll_opd.data.dataset import open_prompts
from roll_opd.data.prompt_source import PromptSource
from roll_opd.data.templates import load_tokenizer
from roll_opd.planner.load_plan import load_plan

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
UNMEASURED = ("++validation=null", "++eval_steps=0", "++save_steps=0", "exp_name=peers")  # nothing but steps
VALIDATED = ("++eval_steps=1", "++validation.evaluate_teacher=false", "++save_steps=0", "exp_name=peers")


@dataclass(frozen=True)
class RandomModels:
    """Shapes of a student and a teacher with random weights, and the size of their vocabulary."""

    vocabulary: int
    student: dict[str, Any]
    teacher: dict[str, Any]


@dataclass(frozen=True)
class Work:
    """A work: overrides of the demo, sequences in a peer's micro-batch, and the number of steps."""

    title: str
    overrides: tuple[str, ...]
    micro_batch: int
    steps: int  # of a round
    warmup: int  # first steps of a round, not counted
    models: RandomModels | None = None
    memory: bool = False  # whether memory is measured
    target: float | None = None  # a round ends at this accuracy
    sides: tuple[str, ...] = ("trl", "hf", "ours")


def shape(layers: int, hidden: int, intermediate: int, heads: int, key_value_heads: int, tied: bool) -> dict[str, Any]:
    """Return the arguments of a Qwen3 configuration."""
    names = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate}
    names |= {"num_attention_heads": heads, "num_key_value_heads": key_value_heads, "head_dim": hidden // heads}
    return {**names, "tie_word_embeddings": tied}


LARGER = RandomModels(
    vocabulary=320,
    student=shape(6, 512, 1536, heads=8, key_value_heads=4, tied=False),  # 19 M
    teacher=shape(7, 1024, 2560, heads=16, key_value_heads=8, tied=False),  # 78 M
)
VOCABULARY = RandomModels(
    vocabulary=151_936,
    student=shape(4, 256, 768, heads=4, key_value_heads=2, tied=True),
    teacher=shape(6, 256, 768, heads=4, key_value_heads=2, tied=True),
)
WORKS = {
    "demo": Work("demo", UNMEASURED, micro_batch=64, steps=18, warmup=3),
    "learn": Work("demo to 0.8 accuracy", VALIDATED, micro_batch=64, steps=20, warmup=0, target=0.8),
    "larger": Work(
        "20 M student, 80 M teacher, 64 x 256 tokens",
        (
            *UNMEASURED,
            "rollout_batch_size=16",
            "response_length=256",
            "student_train.training_args.per_device_train_batch_size=16",
            "student_train.max_tokens_per_microbatch_in_train=4352",  # 16 answers with their prompts, as in the peers
        ),
        micro_batch=16,
        steps=3,
        warmup=1,
        models=LARGER,
    ),
    "vocabulary": Work(
        "vocabulary of 151,936, 8,192 tokens",
        (
            *UNMEASURED,
            "rollout_batch_size=32",
            "num_return_sequences_in_group=1",
            "response_length=245",  # with 11 tokens of the prompt: 256
            "student_train.training_args.per_device_train_batch_size=16",
            "student_train.training_args.gradient_accumulation_steps=1",
            "student_train.max_tokens_per_microbatch_in_train=8192",
        ),
        micro_batch=32,
        steps=1,
        warmup=0,
        models=VOCABULARY,
        memory=True,
        sides=("trl", "ours"),  # no `hf`: the complete logits of a plain loop do not fit into memory
    ),
}


def make(work: Work, directory: Path) -> tuple[Path, tuple[str, ...]]:
    """Write the file for the peers, and random models if needed; return its path and the overrides of our run."""
    overrides = work.overrides
    if work.models:
        for role in ("student", "teacher"):
            make_model(getattr(work.models, role), work.models.vocabulary, directory / role)
        paths = {"student_train": "student", "student_infer": "student", "teacher": "teacher"}
        overrides += tuple(f"{role}.model_args.model_name_or_path={directory / name}" for role, name in paths.items())
    plan = load_plan("demo", "onpolicy_distill", overrides, pure=True)
    path = directory / "work.json"
    path.write_text(json.dumps(describe(plan, work)))
    return path, overrides


def describe(plan: RunPlan, work: Work) -> dict[str, Any]:
    """Return the plan for a peer: one update of `answers` x `prompts_per_step` sequences per step."""
    assert plan.rollout is not None and plan.student.mini_batch_sequences == plan.sequences_per_step
    optimizer, sampling = plan.student.optimizer, plan.rollout.sampling
    tokenizer = load_tokenizer(plan.student.model.path)
    prompts = PromptSource(open_prompts(plan.data, tokenizer)[0], plan.seed).take(work.steps * plan.rollout_batch_size)
    held_out = open_prompts(plan.validation.data, tokenizer)[0].all() if plan.validation else []
    texts = [tokenizer.decode(prompt.tokens) for prompt in prompts]
    assert all(tokenizer(t)["input_ids"] == p.tokens.tolist() for t, p in zip(texts, prompts, strict=True))
    return {
        "student": str(Path(plan.student.model.path).resolve()),
        "teacher": str(Path(plan.frozen_roles()[0].model.path).resolve()),
        "prompts": [prompt.tokens.tolist() for prompt in prompts],
        "texts": texts,
        "held_out": [prompt.tokens.tolist() for prompt in held_out],
        "truths": [prompt.ground_truth for prompt in held_out],
        "steps": work.steps,
        "prompts_per_step": plan.rollout_batch_size,
        "answers": sampling.n,
        "micro_batch": work.micro_batch,
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "learning_rate": optimizer.learning_rate,
        "betas": [optimizer.adam_beta1, optimizer.adam_beta2],
        "epsilon": optimizer.adam_epsilon,
        "weight_decay": optimizer.weight_decay,
        "warmup_steps": optimizer.warmup_steps,
        "total_steps": optimizer.total_steps,
        "max_grad_norm": optimizer.max_grad_norm,
        "seed": plan.seed,
    }


def make_model(shape: dict[str, Any], vocabulary: int, directory: Path) -> None:
    """Write a Qwen3 model with random weights that never ends a text, with the demo's tokenizer padded to its
    vocabulary."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = demo_tokenizer(vocabulary)
    torch.manual_seed(shape["num_hidden_layers"])  # different seeds for student and teacher
    config = Qwen3Config(
        vocab_size=vocabulary,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        # Hidden unit 0 has the same value in all layers, and lowers only the logit of the end token. So on every side,
        # all answers have the maximum length, also if a side's sampler has no option for this.
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            weight[:, 0] = 4.0
            weight[tokenizer.eos_token_id, 0] = -4.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def demo_tokenizer(vocabulary: int) -> Any:
    """Return the demo's tokenizer, padded to `vocabulary` with tokens that occur in no text."""
    sys.path.insert(0, str(EXAMPLES / "demo"))
    try:
        from make_assets import build_tokenizer
    finally:
        sys.path.pop(0)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(len(tokenizer), vocabulary)])
    return tokenizer
