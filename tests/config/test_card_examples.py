"""`examples/cards` with models of their real sizes: the memory that `plan` computes fits, and is the page's."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from config_assets import shapes_of, write_model
from plan_sources import TIED, sizes_of

from roll_opd.base.paths import REPOSITORY
from roll_opd.models.memory import device_memory
from roll_opd.planner.load_plan import load_plan

CARDS = REPOSITORY / "examples/cards"
FILES = ("card_24gb", "card_24gb_lora", "node_8", "gpus_64")
PARAMETERS = {"0.6B": 0.596e9, "1.7B": 1.72e9, "4B": 4.02e9, "8B": 8.19e9, "32B": 32.8e9, "235B-A22B": 235e9}
EXPERTS, WIDTH = 128, 1536
MODEL = re.compile(r"Qwen/Qwen3-([\w.-]+)")


def write_sizes(path: Path, name: str) -> int:
    """Write a model directory with a file of tensors of the real shapes and no data; return its parameters."""
    layers, hidden, heads, kv_heads, intermediate = sizes_of(f"Qwen3-{name}")
    is_mixture = name == "235B-A22B"
    config: dict[str, Any] = {
        "model_type": "qwen3_moe" if is_mixture else "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "intermediate_size": intermediate,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": name in TIED,
    }
    shapes = shapes_of(config | {"model_type": "qwen3"})
    if is_mixture:
        config |= {"num_experts": EXPERTS, "num_experts_per_tok": 8, "moe_intermediate_size": WIDTH}
        shapes = {key: shape for key, shape in shapes.items() if ".mlp." not in key}
        for layer in range(layers):
            at = f"model.layers.{layer}.mlp"
            shapes[f"{at}.gate.weight"] = (EXPERTS, hidden)
            for expert in range(EXPERTS):
                for part in ("gate_proj", "up_proj"):
                    shapes[f"{at}.experts.{expert}.{part}.weight"] = (WIDTH, hidden)
                shapes[f"{at}.experts.{expert}.down_proj.weight"] = (hidden, WIDTH)
    write_model(path, weights={"replaced": (1,)}, **config)
    header, end = {}, 0
    for key, shape in shapes.items():
        size = 2
        for length in shape:
            size *= length
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)  # a hole: the file needs no disk
    return end // 2


def test_the_memory_of_each_card_file_fits_and_is_the_pages(tmp_path: Path) -> None:
    texts = {name: (CARDS / f"{name}.yaml").read_text() for name in FILES}
    assert {file.stem for file in CARDS.glob("*.yaml")} == set(FILES)
    for size in {size for text in texts.values() for size in MODEL.findall(text)}:
        assert write_sizes(tmp_path / f"Qwen3-{size}", size) == pytest.approx(PARAMETERS[size], rel=0.01)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "ab"}]}) + "\n")
    for name, text in texts.items():
        text = MODEL.sub(rf"{tmp_path}/Qwen3-\1", text).replace("data/gsm8k_train.jsonl", f"{tmp_path}/rows.jsonl")
        (tmp_path / f"{name}.yaml").write_text(text)
    page = (REPOSITORY / "docs/bigger-machine.md").read_text()
    for name in FILES:
        plan = load_plan(str(tmp_path), name, [f"output_dir={tmp_path}"], runnable=False)
        most = max(device_memory(plan, int(plan.device_memory_gb * 2**30)).values()) / 2**30
        assert most < plan.device_memory_gb
        [row] = re.findall(rf"\[{name}\.yaml\].*\| computed: ([\d.]+) of ([\d.]+) GiB \|", page)
        assert (f"{most:.1f}", f"{plan.device_memory_gb:g}") == row, name
