"""Make the model and the rows for showing the effect of a hint to the teacher.

    python examples/demo/make_hinted.py [--output DIR] [--threads N]

The task is a code: a digit d of the question becomes (7 d + 3) modulo 10 in the answer, which is never d. The question
does not explain this.

    user:       583          user:       583
    assistant:  587                      894
                             assistant:  894

The model is pre-trained to answer a bare question with the question's digits, half of them replaced by random digits
(left), and to answer a question that is followed by an answer by copying that answer (right). So without a hint it
almost never knows the code, and with a hint it is almost always right. Some digits before the digit to copy are wrong,
because a teacher reads what a student has written.

The seeds determine the result; one run takes about a minute on an idle CPU core.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from make_assets import (
    END,
    HERE,
    build_tokenizer,
    new_model,
    new_optimizer,
    pretrain_step,
    rate_of,
    round_to_bf16,
    save,
)
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

SEED = 13
DIGITS = 3
VAL_ROWS = 200  # number of the thousand questions that are held out
STEPS, BATCH, RATE = 300, 128, 3e-3
WRONG = 0.5  # fraction of the copied answers that follow a text with some wrong digits
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}


def encoded(question: str) -> str:
    """The answer."""
    return "".join(str((7 * int(digit) + 3) % 10) for digit in question)


def digits(rng: random.Random) -> str:
    return "".join(str(rng.randrange(10)) for _ in range(DIGITS))


def half_of(text: str, rng: random.Random) -> str:
    """Return the text with each digit replaced by a random digit with probability 1/2."""
    return "".join(digit if rng.random() < 0.5 else str(rng.randrange(10)) for digit in text)


def prompt_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    return tokenizer(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))["input_ids"]


def sample(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], list[int]]:
    """Return token ids and labels; labels of -100 are ignored."""
    question, hinted = digits(rng), rng.random() < 0.5
    answer = digits(rng) if hinted else half_of(question, rng)
    prompt = prompt_ids(tokenizer, f"{question}\n\n{answer}" if hinted else question)
    written = half_of(answer, rng) if hinted and rng.random() < WRONG else answer
    read, said = (tokenizer(text + END)["input_ids"] for text in (written, answer))
    return prompt + read, [-100] * len(prompt) + said


@torch.no_grad()
def accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: list[str], hinted: bool) -> float:
    """Return the fraction of greedy answers that are right."""
    texts = [f"{question}\n\n{encoded(question)}" if hinted else question for question in questions]
    prompts = torch.tensor([prompt_ids(tokenizer, text) for text in texts])  # one length
    output = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=DIGITS + 1
    )
    answers = tokenizer.batch_decode(output[:, prompts.shape[1] :])
    return sum(answer == encoded(asked) + END for asked, answer in zip(questions, answers, strict=True)) / len(
        questions
    )


def pretrain(tokenizer: PreTrainedTokenizerFast, held_out: list[str]) -> Qwen3ForCausalLM:
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    model = new_model(tokenizer, SHAPE)
    optimizer = new_optimizer(model)
    for step in range(1, STEPS + 1):
        rows = [sample(tokenizer, rng) for _ in range(BATCH)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows])
        labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
        loss = pretrain_step(model, optimizer, ids, labels, rate_of(step, STEPS, RATE))
        if step % 100 == 0:
            found = [accuracy(model, tokenizer, held_out, hinted) for hinted in (False, True)]
            print(
                f"step {step}/{STEPS}  loss {loss:.4f}  right {found[0]:.3f}, with a hint {found[1]:.3f}",
                flush=True,
            )
    round_to_bf16(model)
    return model


def write_rows(path: Path, questions: list[str]) -> None:
    rows = [
        {"id": asked, "messages": [{"role": "user", "content": asked}], "ground_truth": encoded(asked)}
        for asked in questions
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=HERE, help="default: this folder")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    questions = [f"{number:0{DIGITS}}" for number in range(10**DIGITS)]
    random.Random(SEED).shuffle(questions)
    held_out, training = questions[:VAL_ROWS], questions[VAL_ROWS:]
    (args.output / "data").mkdir(parents=True, exist_ok=True)
    write_rows(args.output / "data" / "hinted_train.jsonl", training)
    write_rows(args.output / "data" / "hinted_val.jsonl", held_out)
    tokenizer = build_tokenizer()
    save(pretrain(tokenizer, held_out), tokenizer, args.output / "models" / "hinted")


if __name__ == "__main__":
    main()
