"""Convert GSM8K (`question`, `answer` ending in "#### 72") to prompt rows.

    python -m roll_opd.data.gsm8k --input train.jsonl --output rows.jsonl
    python -m roll_opd.data.gsm8k --dataset openai/gsm8k --name main --split train --output rows.jsonl

`--dataset` takes the same values as `datasets.load_dataset`: a name on the Hugging Face Hub or a local directory.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from roll_opd.data.row_files import open_file
from roll_opd.data.row_formats import BadRow, DataError

ANSWER_MARK = "####"


def final_answer(answer: str) -> str:
    """Return the number after the last "####", without commas. Raises `DataError` if there is none."""
    _, mark, tail = answer.rpartition(ANSWER_MARK)
    if not mark or not tail.strip():
        raise DataError(f"the answer does not end in {ANSWER_MARK!r} and a number: {answer[-60:]!r}")
    return tail.strip().replace(",", "")


def convert(examples: Iterable[Mapping[str, Any]], split: str, instruction: str = "") -> Iterator[dict[str, str]]:
    """Yield a row for each example, in order. The ids are `gsm8k-<split>-<n>`, with n from 0.

    `instruction` is added to every question, on a separate line. Raises `DataError` with the number of the example if
    the example has other columns.
    """
    for number, example in enumerate(examples):
        try:
            question, answer = example["question"], final_answer(example["answer"])
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"example {number} of {split} needs a text in `question` and in `answer`") from error
        except DataError as error:
            raise DataError(f"example {number} of {split}: {error}") from error
        content = f"{question}\n{instruction}" if instruction else question
        yield {
            "id": f"gsm8k-{split}-{number}",
            "source": "gsm8k",
            "tag": "math_rule",
            "messages": json.dumps([{"role": "user", "content": content}], ensure_ascii=False),
            "ground_truth": answer,
        }


def read_jsonl(path: str) -> Iterator[Any]:
    """Yield the objects in a JSONL file. Raises `DataError` with the line number if a line is not JSON."""
    for number, _, value in open_file(path).scan():
        if isinstance(value, BadRow):
            raise DataError(f"{path}:{number} is not JSON: {value.detail}")
        yield value


def read_dataset(dataset: str, name: str | None, split: str) -> Iterable[Mapping[str, Any]]:
    """Load a split with the `datasets` package. Raises `DataError` on failure."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError("--dataset needs the `datasets` package: pip install datasets") from error
    try:
        return load_dataset(dataset, name, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"datasets.load_dataset({dataset!r}, {name!r}, split={split!r}) failed: {error}") from error


def write_rows(rows: Iterable[Mapping[str, str]], output: str) -> int:
    """Write rows to a JSONL file, and return their number. The file appears only when it is complete."""
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    count = 0
    try:
        with partial.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return count


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return 0, or 2 for invalid input."""
    parser = argparse.ArgumentParser(prog="python -m roll_opd.data.gsm8k", description="GSM8K to prompt rows.")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--input", help="a JSONL file with GSM8K's columns")
    given.add_argument("--dataset", help="a data set for datasets.load_dataset, e.g. openai/gsm8k")
    parser.add_argument("--name", help="name of a configuration of --dataset, e.g. main")
    parser.add_argument(
        "--split", help="default: train; with --input, the file name without its suffix (used in the ids)"
    )
    parser.add_argument("--instruction", default="", help="text added to every question on a separate line")
    parser.add_argument("--output", required=True, help="the JSONL file to write")
    options = parser.parse_args(arguments)
    try:
        if options.input:
            examples: Iterable[Any] = read_jsonl(options.input)
            split = options.split or Path(options.input).stem
        else:
            split = options.split or "train"
            examples = read_dataset(options.dataset, options.name, split)
        count = write_rows(convert(examples, split, options.instruction), options.output)
    except (DataError, OSError) as error:
        print(f"gsm8k: {error}", file=sys.stderr)
        return 2
    print(f"{count} rows written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
