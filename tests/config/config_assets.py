"""Tiny Hugging Face model directories, prompts and a base configuration, written without torch."""

import json
import struct
from pathlib import Path
from typing import Any

import yaml

VOCABULARY = {token: index for index, token in enumerate(["a", "b", "c", "ab", "<|end|>", "<|pad|>", "x", "y"])}
SIZES: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 32,
    "vocab_size": 8,
    "max_position_embeddings": 128,
}

A_LAYER = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32 + 2 * 16 + 2 * 4  # attention, MLP, norms, norms of heads
PARAMETERS = 4 * A_LAYER + 2 * 8 * 16 + 16  # layers, embedding and output head, final norm


def write_safetensors(file: Path, shapes: dict[str, tuple[int, ...]], seed: int = 0) -> None:
    """Write a valid safetensors file of fp32 values that depend on `seed`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    values = bytes((seed + number) % 251 for number in range(251))
    file.write_bytes(struct.pack("<Q", len(text)) + text + (values * (offset // 251 + 1))[:offset])


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a Qwen3, Qwen2 or Llama model, as in their releases."""
    hidden, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    width, wide, vocabulary = config["head_dim"], config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in (f"model.layers.{number}" for number in range(config["num_hidden_layers"])):
        shapes[f"{layer}.self_attn.q_proj.weight"] = (heads * width, hidden)
        shapes[f"{layer}.self_attn.k_proj.weight"] = (kv * width, hidden)
        shapes[f"{layer}.self_attn.v_proj.weight"] = (kv * width, hidden)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, heads * width)
        shapes[f"{layer}.mlp.gate_proj.weight"] = shapes[f"{layer}.mlp.up_proj.weight"] = (wide, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, wide)
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if config["model_type"] == "qwen3":
            shapes[f"{layer}.self_attn.q_norm.weight"] = shapes[f"{layer}.self_attn.k_norm.weight"] = (width,)
        if config["model_type"] == "qwen2":
            for part, rows in (("q", heads), ("k", kv), ("v", kv)):
                shapes[f"{layer}.self_attn.{part}_proj.bias"] = (rows * width,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def write_tokenizer(path: Path, **changes: Any) -> None:
    """Write tokenizer.json and tokenizer_config.json; `changes` replace parts of them."""
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": 4, "content": changes.get("end", "<|end|>"), "special": True, "normalized": False},
            {"id": 5, "content": "<|pad|>", "special": True, "normalized": False},
        ],
        "normalizer": None,
        "pre_tokenizer": changes.get("pre_tokenizer", {"type": "ByteLevel"}),
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "vocab": changes.get("vocab", VOCABULARY),
            "merges": changes.get("merges", ["a b"]),
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": changes.get("eos", "<|end|>"),
        "pad_token": "<|pad|>",
        "chat_template": changes.get("chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}"),
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(
    path: Path,
    *,
    seed: int = 0,
    tokenizer: dict[str, Any] | None = None,
    weights: dict[str, tuple[int, ...]] | None = None,
    **config: Any,
) -> Path:
    """Write a model directory; `config` replaces entries of config.json (None removes one).

    `weights` are the shapes of its tensors; by default they match config.json.
    """
    path.mkdir(parents=True, exist_ok=True)
    values = {**SIZES, **config}
    usable = {key: value for key, value in values.items() if type(value) is type(SIZES.get(key, value))}
    (path / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    write_safetensors(path / "model.safetensors", weights or shapes_of(SIZES | usable), seed)
    write_tokenizer(path, **(tokenizer or {}))
    return path


def base_values(root: Path) -> dict[str, Any]:
    """Return a small pure-distillation configuration whose files exist under `root`."""
    write_model(root / "student", seed=1)
    write_model(root / "teacher", seed=2)
    rows = [
        {"id": str(index), "messages": [{"role": "user", "content": "ab"}], "tag": "math", "ground_truth": "1"}
        for index in range(3)
    ]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    student = str(root / "student")
    return {
        "hydra": {"run": {"dir": "."}, "output_subdir": None},
        "exp_name": "tiny",
        "output_dir": str(root / "output"),
        "num_gpus_per_node": 4,
        "rollout_batch_size": 8,
        "num_return_sequences_in_group": 2,
        "max_steps": 10,
        "prompt_length": 32,
        "response_length": 48,
        "student_train": {
            "model_args": {"model_name_or_path": student, "dtype": "fp32"},
            "training_args": {
                "learning_rate": 1e-3,
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
            },
            "data_args": {"file_name": [str(root / "train.jsonl")]},
            "strategy_args": {"strategy_name": "megatron_train", "strategy_config": {}},
            "device_mapping": "list(range(0,2))",
        },
        "student_infer": {
            "model_args": {"model_name_or_path": student, "dtype": "fp32"},
            "generating_args": {"max_new_tokens": "${response_length}", "temperature": 1.0},
            "strategy_args": {"strategy_name": "vllm", "strategy_config": {}},
            "device_mapping": "list(range(0,2))",
        },
        "teacher": {
            "model_args": {"model_name_or_path": str(root / "teacher"), "dtype": "fp32"},
            "strategy_args": {
                "strategy_name": "megatron_infer",
                "strategy_config": {"tensor_model_parallel_size": 2},
            },
            "device_mapping": "[2,3]",
        },
        "rewards": {"math_rule": {"worker_cls": "math_rule", "tag_included": ["math"]}},
    }


def set_key(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; `...` removes it."""
    *parents, last = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
    if value is ...:
        values.pop(last, None)
    else:
        values[last] = value


def write_config(root: Path, values: dict[str, Any], name: str = "run") -> str:
    """Write a configuration and return its directory."""
    directory = root / "config"
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.yaml").write_text(yaml.dump(values, Dumper=yaml.CSafeDumper, sort_keys=False))
    return str(directory)
