"""Sample answers of a student once, as rows of tokens for `roll-opd score`.

    python examples/teachers/sample_rollouts.py STUDENT ROWS.jsonl ROLLOUTS.jsonl

vLLM samples at temperature 1 from the complete distribution, as Lightning-OPD's reverse KL assumes. A row of the output
has `id`, `tokens` and `prompt_length`.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from roll_opd.base.hardware import has_gpu_driver
from roll_opd.config.plan import DataPlan
from roll_opd.data.dataset import open_prompts
from roll_opd.data.templates import load_tokenizer
from roll_opd.models.model_info import find_model, read_model


def main() -> int:
    """Sample the answers and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("student", help="model directory")
    parser.add_argument("rows", type=Path, help="rows with prompts, as of a run")
    parser.add_argument("output", type=Path)
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N rows")
    parser.add_argument("--samples", type=int, default=1, help="answers to each row")
    parser.add_argument("--prompt-length", type=int, default=32, help="longest prompt in tokens")
    parser.add_argument("--response-length", type=int, default=48, help="longest answer in tokens")
    parser.add_argument("--template", default="native", help="chat template of the rows")
    parser.add_argument("--seed", type=int, default=0)
    options, on_cpu = parser.parse_args(), not has_gpu_driver()
    if on_cpu:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    model = read_model(find_model(options.student))
    data = DataPlan((str(options.rows),), options.prompt_length, template=options.template, limit=options.limit)
    prompts, _ = open_prompts(data, load_tokenizer(str(model.path)))
    rows = prompts.read(range(len(prompts)))
    engine = LLM(
        str(model.path),
        dtype="float32" if on_cpu else "bfloat16",
        max_model_len=options.prompt_length + options.response_length,
        enforce_eager=on_cpu,
        generation_config="vllm",
    )
    sampling = SamplingParams(
        n=options.samples, temperature=1.0, top_p=1.0, top_k=0, max_tokens=options.response_length, seed=options.seed
    )
    answers = engine.generate([{"prompt_token_ids": row.tokens.tolist()} for row in rows], sampling)
    with options.output.open("w", encoding="utf-8") as out:
        for row, answer in zip(rows, answers, strict=True):
            for number, sample in enumerate(answer.outputs):
                tokens = [*row.tokens.tolist(), *sample.token_ids]
                name = row.id if options.samples == 1 else f"{row.id}-{number}"
                out.write(json.dumps({"id": name, "tokens": tokens, "prompt_length": len(row.tokens)}) + "\n")
    print(f"{len(rows) * options.samples} answers to {len(rows)} rows: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
