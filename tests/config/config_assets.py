"""Tiny Hugging Face model directories, prompts and a base configuration, written without torch."""

import json
import struct
from pathlib import Path
from typing import Any

import yaml

VOCABULARY = {token: index for index, token in enumerate(["a", "b", "c", "ab", "<|end|>", "<|pad|>", "x", "y"])}


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
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes((seed + i) % 251 for i in range(offset)))


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
        "eos_token": changes.get("eos", "<|end|>"),
        "pad_token": "<|pad|>",
        "chat_template": changes.get("chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}"),
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(path: Path, *, seed: int = 0, tokenizer: dict[str, Any] | None = None, **config: Any) -> Path:
    """Write a model directory; `config` replaces entries of config.json (None removes one)."""
    path.mkdir(parents=True, exist_ok=True)
    values = {
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 32,
        "vocab_size": 8,
        "max_position_embeddings": 128,
        **config,
    }
    (path / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    write_safetensors(path / "model.safetensors", {"embed": (8, 16), "layer": (16, 32)}, seed)
    write_tokenizer(path, **(tokenizer or {}))
    return path


def base_values(root: Path) -> dict[str, Any]:
    """Return a small pure-distillation configuration whose files exist under `root`."""
    write_model(root / "student", seed=1)
    write_model(root / "teacher", seed=2)
    rows = [{"id": str(index), "messages": "[]", "tag": "math", "ground_truth": "1"} for index in range(3)]
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
    (directory / f"{name}.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return str(directory)
