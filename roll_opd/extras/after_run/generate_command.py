"""The command `roll-opd generate`: answers of a model to the rows of a file, with vLLM."""

import argparse
import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll_opd.base.command_line import DONE, USER_ERROR
from roll_opd.base.failures import ConfigError, os_sentence
from roll_opd.base.terminal import echo
from roll_opd.commands.main import Command
from roll_opd.config.plan import ModelPlan, SamplingPlan
from roll_opd.data.row_files import find_files, open_file
from roll_opd.data.row_formats import BadRow, DataError, Row, parse_row, with_system_prompt
from roll_opd.extras.after_run.finished_model import (
    FinishedModel,
    NotUsable,
    add_place,
    add_sampling,
    finished_model,
    with_arguments,
)
from roll_opd.extras.report.run_files import NoRun
from roll_opd.models.model_info import ModelFilesError, read_model
from roll_opd.tracking.run_directory import to_json, write_atomic

Request = tuple[dict[str, Any], list[int]]  # a row of the file, and the tokens of its prompt


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    parser.add_argument("--input", required=True, metavar="ROWS", help="rows with prompts: JSONL, JSON or Parquet")
    parser.add_argument(
        "--output", required=True, metavar="OUT.jsonl", help="the rows with `responses`, in the same order"
    )
    parser.add_argument("--n", type=int, default=1, metavar="N", help="number of answers to each prompt")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="default: as the run trains; else bf16")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="number of devices of the model")
    add_sampling(parser)


def _generate(arguments: argparse.Namespace) -> int:
    try:
        if arguments.n < 1:
            raise NotUsable(f"--n {arguments.n} is not a number of answers; give 1 or more")
        output = Path(arguments.output)
        if not output.parent.is_dir():
            raise NotUsable(f"--output {output}: there is no directory {output.parent}; create it, or name another")
        found = finished_model(Path(arguments.run), arguments.step)
        sampling = with_arguments(found.sampling, arguments)
        requests = read_requests(found, arguments.input)
        room = read_model(found.path).max_positions - sampling.max_new_tokens
        for row, tokens in requests:
            if not 0 < len(tokens) <= room:
                raise NotUsable(
                    f"row {row['id']}: its prompt has {len(tokens)} tokens, but the model has room for {room} before"
                    f" {sampling.max_new_tokens} tokens of an answer; shorten it, or lower --max-tokens"
                )
        rows = asyncio.run(_answered(found, requests, sampling, arguments))
        write_atomic(output, "".join(f"{to_json(row)}\n" for row in rows))
    except (ConfigError, DataError, ModelFilesError, NoRun, NotUsable) as error:
        echo(f"roll-opd: {error}", sys.stderr)
        return USER_ERROR
    except OSError as error:
        echo(f"roll-opd: {os_sentence(error)}", sys.stderr)
        return USER_ERROR
    counts = [len(tokens) for row in rows for tokens in row["response_tokens"]]
    echo(f"{output}: {len(counts)} answers of {found.title} to {len(rows)} prompts, {sum(counts)} tokens")
    return DONE


def read_requests(found: FinishedModel, name: str) -> list[Request]:
    """Return all rows of a file, each with its id and the tokens of its prompt, rendered as in the model's run.

    Raises DataError for a row that cannot be used.
    """
    from roll_opd.data.templates import load_tokenizer
    from roll_opd.data.usable_rows import encode, fallback_id, render_row

    tokenizer: Any = load_tokenizer(str(found.path))
    values: list[dict[str, Any]] = []
    parsed: list[Row] = []
    for path in find_files(name, None):
        file = open_file(str(path))
        for line, _, value in file.scan():
            try:
                row = parse_row(value, fallback_id(file, line), found.data.columns)
                parsed.append(with_system_prompt(row, found.data.system_prompt))
            except BadRow as bad:
                raise DataError(f"{path}, line {line}: {bad}; correct the row") from None
            values.append({**value, "id": row.id})
    if not parsed:
        raise DataError(f"{name} has no rows; give a file with prompts")
    prompts = encode(tokenizer, [render_row(tokenizer, row, found.data)[:1] for row in parsed])
    return [(value, prompt.tolist()) for value, (prompt,) in zip(values, prompts, strict=True)]


async def _answered(
    found: FinishedModel, requests: list[Request], sampling: SamplingPlan, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the rows with the answers of a vLLM engine."""
    from roll_opd.data.templates import load_tokenizer
    from roll_opd.inference.engine_arguments import prepare_environment

    prepare_environment(eager_on_cpu=True)
    from roll_opd.inference.vllm_engine import InferenceEngine

    dtype = arguments.dtype or (found.plan.student.model.dtype if found.plan else "bf16")
    longest = max(len(tokens) for _, tokens in requests) + sampling.max_new_tokens
    engine = await InferenceEngine.start(
        ModelPlan(str(found.path), dtype),
        max_model_len=longest,
        seed=arguments.seed,
        tensor_parallel_size=arguments.tp,
    )
    tokenizer: Any = load_tokenizer(str(found.path))
    n = arguments.n
    prompts = [tokens for _, tokens in requests for _ in range(n)]
    answers: list[list[int]] = [[] for _ in prompts]
    ends = [""] * len(prompts)
    try:
        seeds = [arguments.seed * len(prompts) + number for number in range(len(prompts))]
        async for number, completion in engine.generate_batch(prompts, replace(sampling, n=1), seeds):
            answers[number], ends[number] = completion.tokens.tolist(), completion.finish_reason
    finally:
        await engine.close()
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return [
        {
            **row,
            "responses": texts[place * n : (place + 1) * n],
            "response_tokens": answers[place * n : (place + 1) * n],
            "finish_reasons": ends[place * n : (place + 1) * n],
        }
        for place, (row, _) in enumerate(requests)
    ]


GENERATE = Command("answer the prompts of a file with the model of a run", _arguments, _generate, needs_extra=True)
