"""Write rows for the recovery of an ability that fine-tuning on other data damages.

    python examples/real/make_recovery.py output/data

recover_sft.jsonl has the facts of make_facts.py with answers of one word. recover_train.jsonl asks for the capitals of
make_capitals.py in four wordings. recover_val.jsonl has held-out rows of both tags: two other wordings for the
held-out countries, and the held-out wordings of the facts.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from make_capitals import CAPITALS
from make_facts import HELD_OUT as HELD_OUT_FACTS
from make_facts import TRAINED as TRAINED_FACTS
from make_facts import rows as fact_rows

TRAINED = (
    "What is the capital of {country}?",
    "Name the capital city of {country}.",
    "Which city is the capital of {country}?",
    "I forgot the capital of {country}. Please tell me.",
)
HELD_OUT = (
    "Tell me the capital of {country}.",
    "Do you know the capital of {country}?",
)


def capitals(held_out: bool) -> Iterator[dict[str, str]]:
    """Yield a row for each wording and country; every third country is held out."""
    pairs = [pair.split() for pair in CAPITALS.split(",")]
    for n, wording in enumerate(HELD_OUT if held_out else TRAINED):
        for number, (country, capital) in enumerate(pairs):
            if (number % 3 == 2) == held_out:
                yield {
                    "id": f"{'val' if held_out else 'train'}-{n}-{country}",
                    "tag": "capitals",
                    "messages": json.dumps([{"role": "user", "content": wording.format(country=country)}]),
                    "ground_truth": capital,
                }


def answered(row: dict[str, str]) -> dict[str, str]:
    """Return a row of facts with its answer, one word."""
    return {**row, "response": row["ground_truth"].capitalize() + "."}


def main() -> None:
    """Write recover_sft.jsonl, recover_train.jsonl and recover_val.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    written = {
        "sft": [answered(row) for row in fact_rows(TRAINED_FACTS, "train")],
        "train": list(capitals(held_out=False)),
        "val": [*capitals(held_out=True), *({**row, "tag": "facts"} for row in fact_rows(HELD_OUT_FACTS, "val"))],
    }
    for name, lines in written.items():
        text = "".join(json.dumps(row) + "\n" for row in lines)
        (directory / f"recover_{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
