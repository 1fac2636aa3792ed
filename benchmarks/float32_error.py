"""Distances of log-probs in float32 from float64: of Hugging Face, of an engine, and of a rounding of the embeddings.

    python benchmarks/float32_error.py [MODEL] [--lengths 16 60 120] [--sequences 4] [--json OUT]

README.md explains the columns.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pipeline_run import machine
from torch import Tensor
from transformers import AutoModelForCausalLM

from roll_opd.config.plan import ModelPlan
from roll_opd.inference.vllm_engine import InferenceEngine

DEMO = Path(__file__).resolve().parents[1] / "examples/demo/models/student"
PROMPT = 8
ROUNDING = 2.0**-24  # largest relative error of one rounding to float32


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the distances."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(DEMO), help="model directory; default: the demo's student")
    parser.add_argument("--lengths", type=int, nargs="*", default=[16, 60, 120], help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=4, help="sequences of each kind and length")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    options = parser.parse_args(arguments)
    rows = asyncio.run(measured(options.model, options.lengths, options.sequences))
    print(f"{'tokens':10}{'length':>7}{'Hugging Face':>14}{'engine':>10}{'embeddings':>12}{'largest logit':>15}")
    for row in rows:
        figures = f"{row['hugging_face']:14.1e}{row['engine']:10.1e}{row['embeddings']:12.1e}{row['logit']:15.1f}"
        print(f"{row['tokens']:10}{row['length']:7}{figures}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "machine": machine()}, indent=1) + "\n")
    return 0


async def measured(path: str, lengths: Sequence[int], sequences: int) -> list[dict[str, Any]]:
    """Return the largest distances for random and for sampled tokens of each length."""
    torch.manual_seed(0)
    single, exact = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for _ in range(2))
    exact.double()
    engine = await InferenceEngine.start(ModelPlan(path, "fp32"), max_model_len=max(lengths) + 8, seed=0)
    rows = []
    for length in lengths:
        for kind, draw in (("random", drawn), ("sampled", sampled)):
            found = []
            for _ in range(sequences):
                tokens = draw(single, length)
                wanted, logit = logprobs(exact, tokens)
                of_engine = torch.from_numpy(await engine.prompt_logprobs(tokens)).double()
                with_rounding = logprobs(exact, tokens, rounded)[0]
                others = logprobs(single, tokens)[0], of_engine, with_rounding
                found.append([*(float((other - wanted).abs().max()) for other in others), logit])
            names = ("hugging_face", "engine", "embeddings", "logit")
            rows.append({"tokens": kind, "length": length, **dict(zip(names, map(max, *found), strict=True))})
    await engine.close()
    return rows


def drawn(model: Any, length: int) -> list[int]:
    """Return random tokens."""
    return torch.randint(2, model.config.vocab_size // 3, (length,)).tolist()


def sampled(model: Any, length: int) -> list[int]:
    """Return a random prompt with a response of the model."""
    more = {"max_new_tokens": length - PROMPT, "min_new_tokens": length - PROMPT, "do_sample": True, "top_k": 0}
    return model.generate(torch.tensor([drawn(model, PROMPT)]), **more)[0].tolist()


@torch.no_grad()
def logprobs(model: Any, tokens: list[int], change: Callable[[Tensor], Tensor] = torch.clone) -> tuple[Tensor, float]:
    """Return the log-probs of all tokens except the first, f64, and the largest logit. `change` changes embeddings."""
    given = change(model.get_input_embeddings()(torch.tensor([tokens])))
    logits = model(inputs_embeds=given).logits[0, :-1]
    found = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return found.double(), float(logits.abs().max())


def rounded(values: Tensor) -> Tensor:
    """Return values with relative errors as large as those of a rounding to float32."""
    return values * (1 + ROUNDING * (2 * torch.rand_like(values) - 1))


if __name__ == "__main__":
    sys.exit(main())
