"""Make the demo's assets: a tokenizer, two small Qwen3 models and a data set.

    python examples/demo/make_assets.py [--output DIR] [--threads N]

The task is to add two three-digit numbers, showing the work column by column
from the right ("digit+digit+carry=sum"), then the result on its own line:

    user:       347+589=
    assistant:  7+9+0=16,4+8+1=13,3+5+1=9
                936

The *teacher* is pre-trained on correct work and is almost always right. The *student* is smaller, has another shape,
and is pre-trained on careless work in which most carries are forgotten, so that at first about one answer in nine is
right. The student's samples contain the mistakes, and the teacher's score of each sampled token shows which tokens are
wrong: this is what on-policy distillation teaches.

The seeds below determine the result; one run takes about six minutes on an idle CPU core. With another number of
threads or another CPU, rounding differs, so the weights differ and the accuracies change slightly.  This supervised
pre-training is the only place where the demo uses
a plain PyTorch + transformers loop.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
Pair = tuple[int, int]  # summands

# ---------------------------------------------------------------- settings
DIGITS = 3  # digits of each summand; every prompt has the same length
TRAIN_ROWS = 4000  # prompts for on-policy distillation
VAL_ROWS = 200  # prompts for validation; no model is trained on them
DATA_SEED = 7  # determines which prompts are in the two files

VOCAB_SIZE = 320  # 256 bytes + 5 special tokens, padded (divisible by 64)
MAX_POSITIONS = 2048  # longest sequence that the models accept
MAX_NEW_TOKENS = 40  # generation limit; a correct answer has at most 32 tokens
FORGET = 0.65  # fraction of carries forgotten in the student's pre-training

# Shape of each model (head_dim 32 throughout) and its supervised pre-training.
# Heads and layers are divisible by 2 where the demo splits them: heads for
# tensor parallelism, the teacher's layers for pipeline parallelism.
# fmt: off
MODELS = {
    "teacher": dict(
        shape=dict(num_hidden_layers=4, hidden_size=128, intermediate_size=512, num_attention_heads=4,
                   num_key_value_heads=2, tie_word_embeddings=False),
        forget=0.0, seed=1, steps=600, lr=2e-3, batch=128),
    "student": dict(
        shape=dict(num_hidden_layers=3, hidden_size=96, intermediate_size=256, num_attention_heads=2,
                   num_key_value_heads=2, tie_word_embeddings=True),
        forget=FORGET, seed=2, steps=600, lr=2e-3, batch=128),
}
# fmt: on

# ---------------------------------------------------------------- tokenizer
SPECIAL_TOKENS = ["<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
PAD, END = SPECIAL_TOKENS[0], SPECIAL_TOKENS[-1]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer: one token per UTF-8 byte, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL_TOKENS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=SPECIAL_TOKENS[1:4],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


# ---------------------------------------------------------------- task
def question(a: int, b: int) -> str:
    return f"{a}+{b}="


def worked_answer(a: int, b: int, forget: float = 0.0, rng: random.Random | None = None) -> str:
    """Return the visible work and, on the last line, the result.

    Each carry is forgotten with probability `forget`; the result then follows from the work and is not the true sum.
    """
    columns, result, carry = [], "", 0
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        columns.append(f"{x}+{y}+{carry}={total}")
        result = str(total % 10) + result
        carry = total // 10
        if carry and forget and rng and rng.random() < forget:
            carry = 0
    return ",".join(columns) + "\n" + ("1" if carry else "") + result


def count_carries(a: int, b: int) -> int:
    """Return the number of columns with a carry: the row's difficulty, 0 to DIGITS."""
    return sum(a % 10**k + b % 10**k >= 10**k for k in range(1, DIGITS + 1))


def draw_pair(rng: random.Random) -> Pair:
    low, high = 10 ** (DIGITS - 1), 10**DIGITS - 1
    return rng.randint(low, high), rng.randint(low, high)


def draw_splits() -> tuple[list[Pair], list[Pair]]:
    """Return distinct pairs for train.jsonl and val.jsonl; a swapped pair counts as the same pair."""
    rng, seen = random.Random(DATA_SEED), set()
    pairs: list[Pair] = []
    while len(pairs) < TRAIN_ROWS + VAL_ROWS:
        a, b = draw_pair(rng)
        if (a, b) not in seen and (b, a) not in seen:
            seen.add((a, b))
            pairs.append((a, b))
    return pairs[VAL_ROWS:], pairs[:VAL_ROWS]


def write_rows(path: Path, name: str, pairs: Iterable[Pair]) -> None:
    """Write one JSON object per line, in ROLL's format: `messages` is a JSON *string*."""
    with path.open("w", encoding="utf-8") as file:
        for i, (a, b) in enumerate(pairs):
            messages = [{"role": "user", "content": question(a, b)}]
            file.write(
                json.dumps(
                    {
                        "id": f"{name}-{i:05d}",
                        "tag": "math_rule",
                        "messages": json.dumps(messages),
                        "ground_truth": str(a + b),
                        "source": "addition",
                        "difficulty": count_carries(a, b),
                    }
                )
                + "\n"
            )


# ---------------------------------------------------------------- training
def prompt_ids(tokenizer: PreTrainedTokenizerFast, a: int, b: int) -> list[int]:
    messages = [{"role": "user", "content": question(a, b)}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text)["input_ids"]


def make_batch(
    tokenizer: PreTrainedTokenizerFast, pairs: Iterable[Pair], forget: float, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded token ids, and labels that are set only at response tokens."""
    rows, labels = [], []
    for a, b in pairs:
        prompt = prompt_ids(tokenizer, a, b)
        response = tokenizer(worked_answer(a, b, forget, rng) + tokenizer.eos_token)["input_ids"]
        rows.append(prompt + response)
        labels.append([-100] * len(prompt) + response)
    width = max(map(len, rows))
    pad = tokenizer.pad_token_id
    return (
        torch.tensor([r + [pad] * (width - len(r)) for r in rows]),
        torch.tensor([r + [-100] * (width - len(r)) for r in labels]),
    )


@torch.no_grad()
def greedy_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair]) -> float:
    """Return the fraction of pairs whose greedy completion ends in a line with the true sum."""
    model.eval()
    rows = [prompt_ids(tokenizer, a, b) for a, b in pairs]
    width = max(map(len, rows))
    prompts = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    output = model.generate(prompts, attention_mask=mask, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    texts = tokenizer.batch_decode(output[:, prompts.shape[1] :])
    right = 0
    for (a, b), text in zip(pairs, texts, strict=True):
        answer, ended, _ = text.partition(tokenizer.eos_token)
        right += bool(ended) and answer.split("\n")[-1] == str(a + b)
    return right / len(pairs)


def round_to_bf16(model: torch.nn.Module) -> None:
    """Round the weights to bf16, as in the saved file; computation stays in fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()


def new_model(tokenizer: PreTrainedTokenizerFast, shape: dict[str, Any]) -> Qwen3ForCausalLM:
    """Return a model with random weights from torch's generator."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    return Qwen3ForCausalLM(config)


def new_optimizer(model: PreTrainedModel) -> torch.optim.AdamW:
    """Return the optimizer of pre-training; `pretrain_step` sets its rate."""
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)


def pretrain_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, ids: torch.Tensor, labels: torch.Tensor, rate: float
) -> float:
    """Train the model on token ids [B, T], with labels of -100 where none counts; return the loss."""
    optimizer.param_groups[0]["lr"] = rate
    logits = model(ids).logits[:, :-1].float()
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def rate_of(step: int, steps: int, peak: float) -> float:
    """Return the rate of a step from 1: 20 steps of warm-up, then cosine decay to a fiftieth of the peak."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return peak * min(1, step / 20) * (0.02 + 0.98 * cosine)


def pretrain(
    name: str,
    spec: dict[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    val_pairs: Sequence[Pair],
    build: Callable[[PreTrainedTokenizerFast, dict[str, Any]], PreTrainedModel] = new_model,
) -> PreTrainedModel:
    """Pre-train the model of `build` by supervised learning on freshly drawn sums."""
    torch.manual_seed(spec["seed"])
    rng = random.Random(spec["seed"])
    model = build(tokenizer, {"head_dim": 32, **spec["shape"]})
    count = sum(p.numel() for p in model.parameters())
    print(f"{name}: {count:,} parameters, {spec['steps']} steps", flush=True)

    held_out = set(val_pairs) | {(b, a) for a, b in val_pairs}
    optimizer = new_optimizer(model)
    start = time.time()
    for step in range(1, spec["steps"] + 1):
        pairs: list[Pair] = []
        while len(pairs) < spec["batch"]:
            pair = draw_pair(rng)
            if pair not in held_out:
                pairs.append(pair)
        ids, labels = make_batch(tokenizer, pairs, spec["forget"], rng)
        model.train()
        loss = pretrain_step(model, optimizer, ids, labels, rate_of(step, spec["steps"], spec["lr"]))
        if step % 50 == 0 or step == spec["steps"]:
            accuracy = greedy_accuracy(model, tokenizer, val_pairs)
            print(
                f"{name}: step {step}/{spec['steps']}  loss {loss:.4f}  "
                f"validation {accuracy:.3f}  {time.time() - start:.0f} s",
                flush=True,
            )
    round_to_bf16(model)
    print(
        f"{name}: greedy validation accuracy of the saved weights {greedy_accuracy(model, tokenizer, val_pairs):.3f}",
        flush=True,
    )
    return model


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a Hugging Face directory with bf16 weights (the two files stay below 4 MB)."""
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # some versions make the file readable for the owner only
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=HERE, help="default: this folder")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    train_pairs, val_pairs = draw_splits()
    data = args.output / "data"
    data.mkdir(parents=True, exist_ok=True)
    write_rows(data / "train.jsonl", "train", train_pairs)
    write_rows(data / "val.jsonl", "val", val_pairs)
    print(f"data: {len(train_pairs)} training rows, {len(val_pairs)} validation rows", flush=True)

    tokenizer = build_tokenizer()
    for name, spec in MODELS.items():
        model = pretrain(name, spec, tokenizer, val_pairs)
        save(model, tokenizer, args.output / "models" / name)


if __name__ == "__main__":
    main()
