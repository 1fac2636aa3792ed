"""Make the task of the claims: chains of modular sums, a teacher that knows them, and a student that cannot guess them.

    python examples/claims/make_chains.py [--task threes] [--output DIR] [--threads N]

A chain continues three digits. Each new digit is, modulo 10, the digit before it plus 3 plus the remainder by 4 of the
digit three places before it:

    user:       583
    assistant:  70625059            7 = 3 + 3 + 5 mod 4, 0 = 7 + 3 + 8 mod 4 - 10, ...

The number N of new digits is the difficulty. Each digit needs the digits before it, so one wrong digit makes the rest
wrong, and only the right chain counts as right. An answer ends with its length N: there is no end token.

The *student* is pre-trained on chains in which a random digit stands where the sum is 10 or more. It knows the form
and the smaller sums, and has never seen a wrap: it has no second choice there. A share of 0.43 of sums of random digits
wraps, so its samples are right with a probability of at most 0.613^N: 2 % for 8 digits, 0.7 % for 10, 0.001 % for 24.
The *teacher* is the student after further training on right chains.

The task `twos` adds 2 and the remainder by 5. Everything follows from the seeds; one task takes about a minute on one
idle CPU core.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "demo"))
from make_assets import build_tokenizer, new_model, new_optimizer, pretrain_step, rate_of, round_to_bf16, save  # noqa: E402

MODULUS = 10
GIVEN = 3  # digits of the question
HELD_OUT = sorted(random.Random(0).sample(range(MODULUS**GIVEN), 100))
TRAINED = sorted(set(range(MODULUS**GIVEN)) - set(HELD_OUT))
LONGEST = 24  # digits of an answer
SHORT = 12  # digits of four in five batches
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
BATCH = 64
# nothing stands between question and answer, so the rule is the same at every place
TEMPLATE = (
    "{%- for message in messages -%}{{- '<|user|>' * (message['role'] == 'user') + message['content'] -}}{%- endfor -%}"
)
STAGES = {"student": (False, 500, 4e-3), "teacher": (True, 200, 4e-3)}  # (wraps are right, steps, learning rate)


@dataclass(frozen=True)
class Task:
    """A rule of the family: the sum after `before` is `before + plus + earlier % remainder`, and wraps at 10."""

    name: str
    plus: int
    remainder: int
    seed: int
    alphabet: str = "0123456789"  # of questions and answers

    def total(self, digits: Sequence[int]) -> int:
        """Return the sum that follows the digits, before it wraps."""
        return digits[-1] + self.plus + digits[-GIVEN] % self.remainder

    def write(self, digits: Sequence[int]) -> str:
        """Return digits in the alphabet of the task."""
        return "".join(self.alphabet[digit] for digit in digits)


TASKS = {task.name: task for task in (Task("threes", 3, 4, seed=1), Task("twos", 2, 5, seed=2))}


def second(task: Task) -> Task:
    """Return the other rule in letters: a second task, whose questions have no digits."""
    (other,) = (other for other in TASKS.values() if other.name != task.name)
    return replace(other, name=f"{other.name} in letters", alphabet="abcdefghij")


def chain(task: Task, length: int, rng: random.Random, wraps_known: bool = True) -> tuple[str, str]:
    """Return a question and an answer of `length` digits; without `wraps_known` a digit is random where it wraps."""
    digits = [rng.randrange(MODULUS) for _ in range(GIVEN)]
    for _ in range(length):
        total = task.total(digits)
        guessed = total >= MODULUS and not wraps_known
        digits.append(rng.randrange(MODULUS) if guessed else total % MODULUS)
    return task.write(digits[:GIVEN]), task.write(digits[GIVEN:])


def right_answer(task: Task, question: str, length: int) -> str:
    """Return the answer of `length` digits to a question."""
    digits = [task.alphabet.index(letter) for letter in question]
    for _ in range(length):
        digits.append(task.total(digits) % MODULUS)
    return task.write(digits[GIVEN:])


def questions(task: Task, count: int, seed: int) -> list[str]:
    """Return `count` random questions for training."""
    rng = random.Random(seed)
    return [written(task, rng.choice(TRAINED)) for _ in range(count)]


def held_out_questions(task: Task) -> list[str]:
    """Return the questions for validation, which `questions` never returns."""
    return [written(task, number) for number in HELD_OUT]


def written(task: Task, number: int) -> str:
    """Return the question with the digits of a number."""
    return task.write([int(digit) for digit in f"{number:0{GIVEN}}"])


def prompt_ids(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    """Return the tokens of a question in the chat template."""
    messages = [{"role": "user", "content": question}]
    return tokenizer(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))["input_ids"]


def make_batch(
    tokenizer: PreTrainedTokenizerFast, chains: Sequence[tuple[str, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [B, T] of chains of one length, and labels that count only the answer's tokens."""
    rows, labels = [], []
    for question, answer in chains:
        prompt, response = prompt_ids(tokenizer, question), tokenizer(answer)["input_ids"]
        rows.append(prompt + response)
        labels.append([-100] * len(prompt) + response)
    return torch.tensor(rows), torch.tensor(labels)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Task, stage: str) -> None:
    """Train the model in place on fresh chains of `LONGEST` and `SHORT` digits."""
    wraps_known, steps, peak = STAGES[stage]
    rng = random.Random(f"{task.name} {stage} {task.seed}")
    optimizer = new_optimizer(model)
    for step in range(1, steps + 1):
        length = SHORT if step % 5 else LONGEST
        ids, labels = make_batch(tokenizer, [chain(task, length, rng, wraps_known) for _ in range(BATCH)])
        loss = pretrain_step(model, optimizer, ids, labels, rate_of(step, steps, peak))
        if step % 50 == 0:
            print(f"{task.name}, {stage}: step {step}/{steps}, loss {loss:.4f}", flush=True)


def make(task: Task, output: Path) -> None:
    """Write `output`/TASK_student and `output`/TASK_teacher, directories in Hugging Face's format, weights in bf16."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(task.seed)
    model = new_model(tokenizer, SHAPE)
    for stage in STAGES:
        train(model, tokenizer, task, stage)
        round_to_bf16(model)
        save(model, tokenizer, output / f"{task.name}_{stage}")
        model.float()


def write_rows(task: Task, length: int, count: int, seed: int, path: Path) -> None:
    """Write `count` rows in ROLL's format, for a run from a configuration."""
    lines = []
    for number, question in enumerate(questions(task, count, seed)):
        messages = json.dumps([{"role": "user", "content": question}])
        row = {"id": f"{task.name}-{number}", "tag": task.name, "messages": messages, "difficulty": length}
        lines.append(json.dumps(row | {"ground_truth": right_answer(task, question, length)}) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", choices=TASKS, default="threes")
    parser.add_argument("--output", type=Path, default=HERE / "assets", help="default: assets in this folder")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    make(TASKS[options.task], options.output)


if __name__ == "__main__":
    main()
