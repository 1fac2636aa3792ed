"""Write the answers of models to the questions of a file, and the share of correct answers per tag.

    python examples/real/answers.py output/data/recover_val.jsonl output/answers.json \
        released=output/models/smollm2 fine-tuned=output/recover_sft/latest/checkpoints/step_60/hf

Answers are greedy, or sampled at temperature 1 with --sample SEED, and computed by transformers in f32, without the
package's engines. With --rows FILE the answers of the first model are also written as rows for fine-tuning.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch

TOKENS = 20  # the longest answer


def answers(directory: str, rows: list[dict[str, Any]], sample: bool) -> list[str]:
    """Return the model's answer to each row."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
    how: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sample else {"do_sample": False}
    texts = []
    for start in range(0, len(rows), 64):
        prompts = [
            tokenizer.apply_chat_template(json.loads(row["messages"]), tokenize=False, add_generation_prompt=True)
            for row in rows[start : start + 64]
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
        with torch.no_grad():
            tokens = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=TOKENS,
                pad_token_id=tokenizer.eos_token_id,
                **how,
            )
        texts += tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def is_correct(answer: str, expected: str) -> bool:
    """Return whether the answer has the expected word."""
    return re.search(rf"\b{re.escape(expected)}\b", answer, re.IGNORECASE) is not None


def shares(rows: list[dict[str, Any]], texts: list[str]) -> dict[str, dict[str, float]]:
    """Return correct answers, questions and the accuracy of each tag."""
    found: dict[str, list[bool]] = {}
    for row, text in zip(rows, texts, strict=True):
        found.setdefault(row["tag"], []).append(is_correct(text, row["ground_truth"]))
    return {
        tag: {"correct": sum(marks), "questions": len(marks), "accuracy": round(sum(marks) / len(marks), 4)}
        for tag, marks in found.items()
    }


def main() -> None:
    """Write answers and accuracies of all models as JSON; print the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("models", nargs="+", metavar="NAME=DIRECTORY")
    parser.add_argument("--sample", type=int, metavar="SEED", help="sample at temperature 1 instead of greedily")
    parser.add_argument("--rows", type=Path, help="write the first model's answers as rows for fine-tuning")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.questions.read_text(encoding="utf-8").splitlines()]
    said: dict[str, list[str]] = {}
    accuracy = {}
    for one in options.models:
        name, _, directory = one.partition("=")
        if options.sample is not None:
            torch.manual_seed(options.sample)
        said[name] = answers(directory, rows, options.sample is not None)
        accuracy[name] = shares(rows, said[name])
        print(name, json.dumps(accuracy[name]), flush=True)
    questions = [
        {
            "id": row["id"],
            "question": json.loads(row["messages"])[-1]["content"],
            "expected": row["ground_truth"],
            **{name: texts[n] for name, texts in said.items()},
        }
        for n, row in enumerate(rows)
    ]
    options.output.write_text(
        json.dumps({"accuracy": accuracy, "answers": questions}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    if options.rows:
        first = next(iter(said.values()))
        text = "".join(json.dumps({**row, "response": answer}) + "\n" for row, answer in zip(rows, first, strict=True))
        options.rows.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
