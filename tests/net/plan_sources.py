"""Configurations to plan, and substitutes for their models and rows.

Ours are all complete configurations in `examples/`, and the fragments of `configs/`, each in the demo. ROLL's are the
files of a checkout; none of them is stored here.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config_assets import write_model
from planner_adapter import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
DEMO = EXAMPLES / "demo" / "onpolicy_distill.yaml"
GSM8K = "examples/gsm8k/onpolicy_distill.yaml"  # its rows are downloaded
ENOUGH = ("num_gpus_per_node=16", "teacher.device_mapping=list(range(8,16))")  # devices for every layout
# of the multi-teacher example: data file -> tag of its rows
TAGS = {"dapo_math_17k": "math_dapo", "short_math": "math_short"}
TARGETS = {  # group of `configs/` -> where the demo takes one of its fragments; it has those of `models/` already
    "parallel": "parallel@teacher.strategy_args.strategy_config",
    "rollout": "rollout@student_infer.strategy_args.strategy_config",
    "trackers": "trackers",
}
IS_RUN = re.compile(r"^(?:student_train|actor_train|sft_train|student|mode|defaults)\s*:", re.MULTILINE)
MADE = " output/"  # before paths of files that the scripts of examples/real write
# models and rows of full size, by the names under which ROLL's files have them
MODEL = re.compile(r"(?<![\w./-])(?:Qwen|deepseek-ai|virtuoussy|meta-llama|zai-org)/([\w.-]+)")
ROWS = re.compile(r"(?<![\w/-])(?:data|\./data)/([\w./-]+)\.(jsonl?|parquet)")
VARIABLE = re.compile(r"\$\{oc\.env:(\w+)\}")
ROW_COUNT = 256
DENSE = {  # layers, hidden size, heads, key and value heads, intermediate size
    "0.5B": (24, 896, 14, 2, 4864),
    "0.6B": (28, 1024, 16, 8, 3072),
    "1.7B": (28, 2048, 16, 8, 6144),
    "3B": (36, 2048, 16, 2, 11008),
    "4B": (36, 2560, 32, 8, 9728),
    "8B": (36, 4096, 32, 8, 12288),
    "14B": (40, 5120, 40, 8, 17408),
    "32B": (64, 5120, 64, 8, 25600),
}
TIED = ("0.6B", "1.7B", "4B")  # the embedding is the output head, too
USUAL = (28, 3584, 28, 4, 18944)  # of 7B, and of whatever else
MIXTURES = {"30B-A3B": (48, 2048, 32, 4, 6144), "235B-A22B": (94, 4096, 64, 4, 12288)}
# hybrids by name: layers, hidden size, heads, key and value heads, intermediate size (0: experts only),
# value heads of linear attention, experts, experts per token, width of an expert
HYBRIDS = {
    "Qwen3-Next-80B-A3B": (48, 2048, 16, 2, 5120, 32, 512, 10, 512),
    "Qwen3.5-2B": (24, 2048, 8, 2, 6144, 16, 0, 0, 0),
    "Qwen3.5-27B": (64, 5120, 24, 4, 17408, 48, 0, 0, 0),
    "Qwen3.5-35B-A3B": (40, 2048, 16, 2, 0, 32, 256, 8, 512),
    "Qwen3.5-122B-A10B": (48, 3072, 32, 2, 0, 64, 256, 8, 1024),
    "Qwen3.5-397B-A17B": (60, 4096, 32, 2, 0, 64, 512, 10, 1024),
}
MIXTURE = {"num_experts": 128, "num_experts_per_tok": 8}


@dataclass(frozen=True)
class Source:
    """A configuration: its name in the records, its file, and overrides."""

    name: str
    file: Path
    overrides: tuple[str, ...] = ()


def our_sources(root: Path) -> Iterator[Source]:
    """Yield our configurations; substitutes and outputs are written below `root`."""
    sources = []  # a configuration may build on one that is written after it
    for file in sorted(EXAMPLES.rglob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        if not IS_RUN.search(text):
            continue
        name = str(file.relative_to(REPOSITORY))
        if MODEL.search(text) or ROWS.search(text) or MADE in text:
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            # models and rows that a reader has made are not found
            file.write_text(with_stand_ins(text, root).replace(MADE, f" {root}/{MADE.strip()}"), encoding="utf-8")
        rows = [f"student_train.data_args.file_name={_write_rows(root, 'gsm8k')}"] if name == GSM8K else []
        sources.append(Source(name, file, (f"output_dir={root}/output", *rows)))
    yield from sources
    for group, target in TARGETS.items():
        for fragment in sorted((REPOSITORY / "configs" / group).glob("*.yaml")):
            chosen = f"+{target}={fragment.stem}"
            yield Source(f"configs/{group}/{fragment.name}", DEMO, (chosen, *ENOUGH, f"output_dir={root}/output"))


def roll_sources(checkout: Path, root: Path) -> Iterator[Source]:
    """Yield the configurations of a checkout of ROLL, bare or not, copied below `root`."""
    copy = root / "ROLL"
    copy.mkdir()
    archive = subprocess.Popen(["git", "-C", checkout, "archive", "HEAD", "examples"], stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", copy], stdin=archive.stdout, check=True)
    if archive.wait():
        raise RuntimeError(f"{checkout} is no repository of ROLL: git archive ended with {archive.returncode}")
    files = sorted(copy.rglob("*.yaml"))
    for file in files:
        text = file.read_text(encoding="utf-8")
        file.write_text(with_stand_ins(text, root), encoding="utf-8")
    for file in files:
        if IS_RUN.search(file.read_text(encoding="utf-8")):
            yield Source(f"ROLL/{file.relative_to(copy)}", file, (f"output_dir={root}/output",))


def with_stand_ins(text: str, root: Path) -> str:
    """Return a YAML text in which models, rows and environment variables are replaced by existing ones below `root`."""
    for name in {found[1] for found in MODEL.finditer(text)}:
        _write_stand_in(root / "models" / name)
    for stem in {found[1] for found in ROWS.finditer(text)}:
        _write_rows(root, stem)
    text = MODEL.sub(lambda found: f"{root}/models/{found[1]}", text)
    text = VARIABLE.sub(lambda found: f"${{oc.env:{found[1]},{root}}}", text)
    return ROWS.sub(lambda found: f"{root}/data/{found[1]}.jsonl", text)


def _write_rows(root: Path, stem: str) -> Path:
    file = root / "data" / f"{stem}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    tag = TAGS.get(stem, "math_rule")
    answered = {"instruction": "ab", "input": "", "output": "c"}  # as in Alpaca's rows
    asked = {"messages": [{"role": "user", "content": "ab"}], "tag": tag, "ground_truth": "1"}
    rows = ({"id": str(n), **asked, **answered} for n in range(ROW_COUNT))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def sizes_of(name: str) -> tuple[int, int, int, int, int]:
    """Return the sizes of a model by its name; those of 7B for a name without a known number of parameters."""
    return next((sizes for part, sizes in (DENSE | MIXTURES).items() if f"-{part}" in name), USUAL)


def _write_stand_in(path: Path) -> None:
    """Write a model directory of full size without weights, according to the model's name."""
    if path.exists():
        return
    if (hybrid := hybrid_config(path.name)) is not None:
        write_model(path, seed=len(path.name), weights={"stand_in": (8, 16)})
        (path / "config.json").write_text(json.dumps(hybrid))
        return
    size = sizes_of(path.name)
    layers, hidden, heads, kv_heads, intermediate = size
    is_mixture = bool(re.search(r"\dB-A\d", path.name))
    qwen3 = "Qwen3" in path.name
    write_model(
        path,
        seed=len(path.name),
        weights={"stand_in": (8, 16)},
        model_type=("qwen3_moe" if is_mixture else "qwen3") if qwen3 else "qwen2",
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128 if qwen3 else hidden // heads,
        intermediate_size=intermediate,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=path.name.endswith(TIED),
        **(MIXTURE | {"moe_intermediate_size": intermediate // 8} if is_mixture else {}),
    )


def hybrid_config(name: str) -> dict[str, Any] | None:
    """Return the config.json of a Qwen3-Next or Qwen3.5 of this name, with the keys of the release; else None.

    Releases of Qwen3.5 are multimodal.
    """
    found = next((sizes for part, sizes in HYBRIDS.items() if name.startswith(part)), None)
    if found is None:
        return None
    layers, hidden, heads, kv_heads, intermediate, value_heads, experts, chosen, width = found
    model_type = "qwen3_next" if "Next" in name else "qwen3_5_moe_text" if experts else "qwen3_5_text"
    rope = {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25}
    text: dict[str, Any] = {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "vocab_size": 151936 if "Next" in name else 248320,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
        "layer_types": ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(layers)],
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": name.startswith("Qwen3.5-2B"),
        **({"intermediate_size": intermediate} if intermediate else {}),
        **({"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": width} if experts else {}),
        **({"shared_expert_intermediate_size": width} if experts else {}),
    }
    if "Next" in name:
        return text | {"decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": []}
    text |= {"attn_output_gate": True, "full_attention_interval": 4, "mamba_ssm_dtype": "float32"}
    text |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "partial_rotary_factor": 0.25}
    text["rope_parameters"] = rope | {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
    vision = {"depth": 27, "hidden_size": 1152, "model_type": f"{model_type.removesuffix('_text')}_vision"}
    return {"model_type": model_type.removesuffix("_text"), "text_config": text, "vision_config": vision}


def planned_in(source: Source) -> "chdir[Path]":
    """Return the context of the current directory of a source: the top of ROLL's checkout, or of the repository."""
    top = next((parent for parent in source.file.parents if parent.name == "ROLL"), REPOSITORY)
    return chdir(top)
