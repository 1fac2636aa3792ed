"""Inference engines with different options: seconds until an engine is ready, tokens per second, and the difference of
its log-probs from those of the training engine.

    python benchmarks/gpu/generation.py [--shape 0.6B] [--variants eager graphs fp8 fp8_kv ngram] [--json OUT]
    python benchmarks/gpu/generation.py --device cpu --shape small --variants eager ngram --tokens 24

All engines have the same random weights. They answer the same prompts, one engine after the other; the first answers
are a warm-up. The difference is computed as in a run (`rollout/mismatch/*`): engine minus training engine, in nats per
sampled token. A variant that the engine refuses is recorded with its error.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

from shapes import SHAPES, make_served_model  # noqa: E402

PROMPT, SEED = 32, 7
MEMORY_SHARE, CACHE = 0.5, 8 * 2**30  # of the device; a fixed cache, so that nothing is profiled for it
VARIANTS: dict[str, dict[str, Any]] = {  # arguments of vLLM
    "eager": {"enforce_eager": True},
    "graphs": {},  # CUDA graphs are vLLM's default
    "fp8": {"quantization": "fp8"},
    "fp8_kv": {"kv_cache_dtype": "fp8"},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every variant, print a table, and write all figures. Return 1 if no variant generated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=1, help="of answers, after the warm-up; the median counts")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--repeats", action="store_true", help="prompts repeat a few tokens, as speculation wants it")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or ("bf16" if options.device == "cuda" else "fp32")
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="generation-") as directory:
        make_served_model(Path(directory) / "student", SHAPES[options.shape], SEED, options.device)
        for name in options.variants:
            print(f"{name} ...", file=sys.stderr, flush=True)
            found[name] = asyncio.run(generated(Path(directory), VARIANTS[name], options))
        compare(Path(directory), found, options)
    print("\n".join(table(found)))
    if options.json:
        settings = {**vars(options), "json": None}
        options.json.write_text(json.dumps({"variants": found, "settings": settings}, indent=1) + "\n")
    return int(all("failed" in one for one in found.values()))


async def generated(directory: Path, engine_args: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of the start and of the answers, the tokens with their log-probs, and the drafts."""
    from roll_opd.config.plan import ModelPlan, SamplingPlan
    from roll_opd.inference.vllm_engine import InferenceEngine

    on_gpu = (
        {"gpu_memory_utilization": MEMORY_SHARE, "kv_cache_memory_bytes": CACHE} if options.device == "cuda" else {}
    )
    rng = np.random.default_rng(SEED)
    vocab = SHAPES[options.shape].vocab
    prompts = [rng.integers(2, vocab, PROMPT).tolist() for _ in range(options.prompts)]
    if options.repeats:
        prompts = [(one[:4] * PROMPT)[:PROMPT] for one in prompts]
    sampling = SamplingPlan(n=1, max_new_tokens=options.tokens, temperature=options.temperature)
    began = time.perf_counter()
    try:
        engine = await InferenceEngine.start(
            ModelPlan(str(directory / "student"), options.dtype),
            max_model_len=PROMPT + options.tokens,
            seed=SEED,
            engine_args={"max_num_seqs": options.prompts, **on_gpu, **engine_args},
        )
    except Exception as error:  # what an engine refuses is a result
        return {"failed": f"{type(error).__name__}: {error}"[-600:]}
    started = time.perf_counter() - began
    try:
        rates = []
        answers: dict[int, Any] = {}
        for turn in range(1 + options.rounds):
            began = time.perf_counter()
            seeds = [1000 * turn + number for number in range(len(prompts))]
            async for number, completion in engine.generate_batch(prompts, sampling, seeds):
                answers[number] = completion
            rates.append(sum(len(one.tokens) for one in answers.values()) / (time.perf_counter() - began))
        drafted, accepted = engine.take_drafts()
    finally:
        await engine.close()
    return {
        "start_seconds": started,
        "tokens_a_second": median(rates[1:]),
        "drafted": drafted,
        "accepted": accepted,
        "answers": [(prompts[number], one.tokens, one.logprobs) for number, one in answers.items()],
    }


def compare(directory: Path, found: Mapping[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Replace the answers of each variant by the difference of their log-probs from the training engine's."""
    import engine

    from roll_opd.megatron.engine import MegatronEngine

    answered = {name: one.pop("answers") for name, one in found.items() if "answers" in one}
    if not answered:
        return
    plan = engine.plan(directory, options.dtype, SHAPES[options.shape])
    with engine.running(lambda: MegatronEngine(plan, seed=0, deterministic=False)) as rank:
        for name, answers in answered.items():
            asked = [(np.array([*prompt, *tokens], np.int64), len(prompt)) for prompt, tokens, _ in answers]
            scored = rank.compute_logprobs(asked, options.temperature)
            off = np.concatenate([theirs - scored[n] for n, (_, _, theirs) in enumerate(answers)])
            ratios = np.exp(-off.astype(np.float64))  # training engine over engine
            found[name] |= {
                "mean_difference": float(np.abs(off).mean()),
                "largest_difference": float(np.abs(off).max()),
                "effective_sample_size": float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())),
            }


def table(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each variant."""
    lines = [f"{'':<8}{'start s':>9}{'tokens/s':>10}{'mean |off|':>12}{'largest':>9}{'ess':>9}{'drafts':>8}"]
    for name, one in found.items():
        if "failed" in one:
            lines.append(f"{name:<8} {one['failed'].strip().splitlines()[-1][:110]}")
            continue
        off = f"{one['mean_difference']:>12.2g}{one['largest_difference']:>9.2g}{one['effective_sample_size']:>9.5f}"
        drafts = f"{one['accepted'] / one['drafted']:>8.0%}" if one["drafted"] else f"{'-':>8}"
        lines.append(f"{name:<8}{one['start_seconds']:>9.1f}{one['tokens_a_second']:>10.0f}{off}{drafts}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
