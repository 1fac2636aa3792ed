"""Models of any size with random weights, for measurements: the demo's architecture (Qwen3) and its tokenizer.

    python benchmarks/models.py DIRECTORY [--parameters 20e6] [--vocab 4096] [--seed 1]

The tokenizer is padded with words that no prompt contains, so that the vocabulary is similar to a real model's, and an
answer of an untrained model seldom ends early.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo" / "models"
VOCAB = 4096
HEAD_DIM, KV_HEADS = 32, 4  # 4 heads can be divided over up to four ranks
WIDTHS = range(128, 8193, 128)  # multiples of KV_HEADS x HEAD_DIM
ASPECT = 85  # target for hidden size divided by layers, as in published models of these sizes
MOST_LAYERS = 64
OFF_BY = 0.1  # allowed relative difference from the requested number of parameters


def shape_of(parameters: float, vocab: int = VOCAB) -> dict[str, int]:
    """Return the sizes in config.json of a model with this number of parameters, within `OFF_BY`. ValueError if there
    are none."""
    found = []
    for hidden in WIDTHS:
        layers = max(1, round((parameters - vocab * hidden) / _layer(hidden)))
        off = abs(vocab * hidden + layers * _layer(hidden) - parameters) / parameters
        if off <= OFF_BY and layers <= MOST_LAYERS:
            found.append((max(hidden / layers / ASPECT, ASPECT * layers / hidden), hidden, layers))
    if not found:
        raise ValueError(f"no shape has {parameters:.3g} parameters with a vocabulary of {vocab}; choose more")
    _, hidden, layers = min(found)
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": _intermediate(hidden),
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
    }


def _intermediate(hidden: int) -> int:
    return hidden * 11 // 4


def _layer(hidden: int) -> int:
    """Return the number of parameters in the matrices of a layer."""
    return 2 * hidden * hidden + 2 * hidden * KV_HEADS * HEAD_DIM + 3 * hidden * _intermediate(hidden)


def make_model(directory: Path, parameters: float, seed: int, vocab: int = VOCAB) -> Path:
    """Write a Hugging Face model directory and return it; the same arguments give the same weights."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "student")
    tokenizer.add_tokens([f"<|filler {number}|>" for number in range(vocab - len(tokenizer))])
    config = Qwen3Config(
        vocab_size=vocab,
        max_position_embeddings=tokenizer.model_max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape_of(parameters, vocab),
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def made_models(directory: Path, student: float, teacher: float) -> list[str]:
    """Write a student and a teacher of these sizes; return the overrides with which the demo's roles use them."""
    roles = {"student": ("student_train", "student_infer"), "teacher": ("teacher",)}
    overrides = ["teacher_preflight=false"]  # untrained models would not pass it
    for seed, (name, parameters) in enumerate({"student": student, "teacher": teacher}.items()):
        path = make_model(directory / name, parameters, seed)
        overrides += [f"{role}.model_args.model_name_or_path={path}" for role in roles[name]]
    return overrides


def main(arguments: Sequence[str] | None = None) -> int:
    """Write one model and print its description."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--parameters", type=float, default=20e6)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    make_model(options.directory, options.parameters, options.seed, options.vocab)
    print(f"{options.directory}: {shape_of(options.parameters, options.vocab)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
