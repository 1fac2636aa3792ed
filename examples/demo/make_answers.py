"""Make the rows of the demo's SFT and DPO runs from its training and validation prompts.

    python examples/demo/make_answers.py [--output DIR]

SFT learns correct workings of the sums. DPO prefers them to workings in which a carry was forgotten. The seed
determines all rows.
"""

import argparse
import json
import random
from pathlib import Path

from make_assets import HERE, worked_answer

SEED = 11
TRAIN_ROWS, VAL_ROWS = 1000, 100
FORGET = 0.65  # fraction of carries forgotten in a rejected answer; at least one carry


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, found: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")


def summands(row: dict) -> tuple[int, int]:
    a, b = json.loads(row["messages"])[0]["content"].rstrip("=").split("+")
    return int(a), int(b)


def worked(row: dict) -> dict:
    answer = {"role": "assistant", "content": worked_answer(*summands(row))}
    return {"id": row["id"], "messages": [*json.loads(row["messages"]), answer]}


def compared(row: dict, rng: random.Random) -> dict | None:
    """Return a row with both workings; None for a sum without a carry."""
    right = worked_answer(*summands(row))
    if not row["difficulty"]:
        return None
    wrong = right
    while wrong == right:
        wrong = worked_answer(*summands(row), FORGET, rng)
    turns = [[{"role": "assistant", "content": text}] for text in (right, wrong)]
    return {"id": row["id"], "prompt": json.loads(row["messages"]), "chosen": turns[0], "rejected": turns[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=HERE / "data", help="default: the demo's data")
    output = parser.parse_args().output
    rng = random.Random(SEED)
    for name, count in (("train", TRAIN_ROWS), ("val", VAL_ROWS)):
        prompts = rows(HERE / "data" / f"{name}.jsonl")
        write(output / f"sft_{name}.jsonl", [worked(row) for row in prompts[:count]])
        pairs = [pair for row in prompts if (pair := compared(row, rng))]
        write(output / f"dpo_{name}.jsonl", pairs[:count])


if __name__ == "__main__":
    main()
