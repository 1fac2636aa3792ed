"""Compute log-probs of the tokens in a file of rows with the Megatron engine. `roll-opd score` runs this on every rank.

Each input row is {"id", "tokens": [int], "prompt_length": P}. The output is one of these:

- a JSONL file with rows {"id", "logprobs": [float]} in the same order, with the log-probs of tokens P to T-1
- a teacher file in parquet (`data.teacher_files`)

Runs under plain `torchrun`.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from roll_opd.base.terminal import echo
from roll_opd.config.plan import Layout, MegatronPlan, MicroBatchLimits, ModelPlan
from roll_opd.data.row_files import open_file
from roll_opd.data.teacher_files import TeacherWriter
from roll_opd.megatron import parallel
from roll_opd.megatron.engine import MegatronEngine, TargetRequest

ROWS_AT_A_TIME = 1024  # bounds memory
SECONDS_OF_PROGRESS = 10.0  # seconds between progress lines


def score(options: argparse.Namespace) -> None:
    """Score the rows of `options.input` and write the scores to `options.output`. Collective.

    Only rank 0 reads and writes files. The command `roll-opd score` has already checked the options.
    """
    layout = Layout(**options.layout)
    plan = MegatronPlan(
        name="score",
        model=ModelPlan(options.model, options.dtype),
        devices=tuple(range(layout.world_size)),
        layout=layout,
        forward_limits=MicroBatchLimits(tokens=options.max_tokens_per_microbatch),
        vocab_size=options.vocab_size,
    )
    engine = MegatronEngine(plan, seed=0)
    if options.teacher_file:
        write_teacher_file(engine, options)
    else:
        write_logprobs(engine, options)
    parallel.shutdown()


def write_teacher_file(engine: MegatronEngine, options: argparse.Namespace) -> None:
    """Write a parquet file of log-probs and top-k. Collective.

    If an earlier run was interrupted, the parts that it has written are skipped.
    """
    output, is_first = Path(options.output), dist.get_rank() == 0
    request = TargetRequest(topk=options.topk, vocab_size=options.vocab_size)
    start, totals, shown = time.monotonic(), _Totals(), 0.0
    writer = TeacherWriter(output, **options.teacher_file) if is_first else None
    parts = writer.missing(_rows(options.input)) if writer else iter(())
    while part := _broadcast(next(parts, None)):
        number, rows = part
        scores = _compute(engine, rows, options.temperature, request)
        if writer is None:
            continue
        writer.write(number, rows, scores)
        for found in scores:
            totals.add(found["logprobs"])
        if time.monotonic() - shown > SECONDS_OF_PROGRESS:
            shown = time.monotonic()
            echo(f"scored {totals.rows:,} rows, {totals.tokens:,} tokens, {shown - start:.0f} s")
    if writer:
        writer.finish()
        echo(totals.summary(time.monotonic() - start, output))


def write_logprobs(engine: MegatronEngine, options: argparse.Namespace) -> None:
    """Write a JSONL file of log-probs. Collective."""
    output = Path(options.output)
    partial = output.with_name(f".{output.name}.partial")
    first = dist.get_rank() == 0
    start, totals = time.monotonic(), _Totals()
    rows = _rows(options.input) if first else iter(())
    with open(partial if first else os.devnull, "w", encoding="utf-8") as out:
        while batch := _broadcast(list(islice(rows, ROWS_AT_A_TIME))):
            for row, scores in zip(batch, _compute(engine, batch, options.temperature, TargetRequest()), strict=True):
                logprobs = scores["logprobs"]
                totals.add(logprobs)
                out.write(json.dumps({"id": row["id"], "logprobs": [float(value) for value in logprobs]}) + "\n")
    if first:
        partial.replace(output)
        echo(totals.summary(time.monotonic() - start, output))


class _Totals:
    """Totals of the scored rows, for the summary line."""

    rows = tokens = 0
    total = 0.0  # sum of log-probs

    def add(self, logprobs: np.ndarray) -> None:
        self.rows += 1
        self.tokens += len(logprobs)
        self.total += float(logprobs.sum(dtype=np.float64))

    def summary(self, seconds: float, output: Path) -> str:
        mean = f"mean log-prob {self.total / self.tokens:.4f}" if self.tokens else "no log-prob"
        rows = f"{self.rows:,} row{'s' * (self.rows != 1)}"
        speed = self.tokens / max(seconds, 1e-9)
        return f"{rows}, {self.tokens:,} tokens: {mean}, {seconds:.1f} s, {speed:,.0f} tokens/s: {output}"


def _rows(path: str) -> Iterator[dict[str, Any]]:
    return (row for _, _, row in open_file(path).scan())


T = TypeVar("T")


def _broadcast(rows: T) -> T:
    """Broadcast the rows from rank 0, because only rank 0 reads the file."""
    box = [rows]
    dist.broadcast_object_list(box)
    return box[0]


def _compute(
    engine: MegatronEngine, rows: Sequence[dict[str, Any]], temperature: float, request: TargetRequest
) -> list[dict[str, np.ndarray]]:
    """Return the computed arrays of each row on every rank, in the order of the rows."""
    sequences = [(np.array(row["tokens"], dtype=np.int64), row["prompt_length"]) for row in rows]
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, engine.compute_targets(sequences, temperature, request))
    merged = {number: values for share in shares if share for number, values in share.items()}
    return [merged[number] for number in range(len(rows))]


if __name__ == "__main__":
    score(argparse.Namespace(**json.loads(sys.argv[1])))
