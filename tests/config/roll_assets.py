"""ROLL's YAML files in which only the paths of models and data are replaced: models of full size, without weights."""

import json
import re
from pathlib import Path

from config_assets import write_model
from plan_sources import sizes_of

STYLE = Path(__file__).parent / "roll_style"
MODEL = re.compile(r"(?:Qwen|virtuoussy)/([\w.-]+)")
DATA = re.compile(r"data/([\w-]+)\.jsonl")


def model_directory(root: Path, name: str, *, weights: bool = True) -> Path:
    """Write the model directory that replaces `name`."""
    layers, hidden, heads, kv_heads, intermediate = sizes_of(name)
    path = root / "models" / name
    write_model(
        path,
        seed=len(name) + layers,
        weights={"stand_in": (8, 16)},
        model_type="qwen3" if "Qwen3" in name else "qwen2",
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128 if "Qwen3" in name else hidden // heads,
        intermediate_size=intermediate,
        vocab_size=151936,
        max_position_embeddings=40960,
    )
    if not weights:
        (path / "model.safetensors").unlink()
    return path


def localise(root: Path, text: str, tags: dict[str, list[str]], *, weights: bool = True) -> str:
    """Return a YAML text in which model names and data files are replaced by existing ones under `root`.

    `tags` maps the name of a data file to the tags of its rows; the rows of other files have the tag math_rule.
    """
    for name in {match[1] for match in MODEL.finditer(text)}:
        model_directory(root, name, weights=weights)
    for name in {match[1] for match in DATA.finditer(text)}:
        rows = [
            {"id": str(index), "messages": [{"role": "user", "content": "ab"}], "tag": tag, "ground_truth": "1"}
            for index, tag in enumerate(tags.get(name, ["math_rule"]))
        ]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = MODEL.sub(lambda match: str(root / "models" / match[1]), text)
    return DATA.sub(lambda match: str(root / f"{match[1]}.jsonl"), text)
