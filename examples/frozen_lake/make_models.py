"""Make the models of the FrozenLake example: a teacher that finds the way, and a smaller student that mostly does not.

    python examples/frozen_lake/make_models.py [--output DIR] [--threads N]

Both see what a run shows them: a conversation in which each of the user's turns is the map, and each of the
assistant's is a direction. The *teacher* is pre-trained on shortest ways. The *student* is smaller, and is pre-trained
on walks of which most steps are random, so that at first it reaches the goal about once in four games.

Everything follows from the seeds below; another number of threads or another CPU rounds differently. The tokenizer,
one token a byte, is the one of the addition example.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from roll_opd.environments import make
from roll_opd.environments.frozen_lake import ACTIONS, FrozenLake

HERE = Path(__file__).resolve().parent
TOKENIZER = HERE.parent / "demo" / "models" / "teacher"
GAME = {"size": 4, "is_slippery": False, "max_steps": 8, "action_pattern": "^(.*)$", "env_instruction": ""}
ALIKE = 24  # walks of about one length that are computed together
HELD_OUT = range(1_000_000, 1_000_200)  # seeds of games that only measure

# fmt: off
MODELS = {
    "teacher": dict(
        shape=dict(num_hidden_layers=4, hidden_size=128, intermediate_size=512, num_attention_heads=4,
                   num_key_value_heads=2, tie_word_embeddings=False),
        random=0.0, seed=1, steps=800, lr=2e-3, batch=64),
    "student": dict(
        shape=dict(num_hidden_layers=3, hidden_size=96, intermediate_size=256, num_attention_heads=2,
                   num_key_value_heads=2, tie_word_embeddings=True),
        random=0.5, seed=2, steps=90, lr=2e-3, batch=96),
}
# fmt: on


def episode(
    tokenizer: PreTrainedTokenizerFast, game: FrozenLake, seed: int, share: float
) -> tuple[list[int], list[int]]:
    """Return the tokens of one walk, and labels that count only the directions; `share` of the steps are random."""
    rng = np.random.default_rng([seed, 1])
    observation, _ = game.reset(seed)
    tokens, labels, over = [], [], False
    while not over:
        names = list(ACTIONS.values())
        action = names[rng.integers(4)] if rng.random() < share else game.solve()[0]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": observation}], tokenize=False, add_generation_prompt=True
        )
        said = tokenizer(text).input_ids
        answer = tokenizer(f"{action}<|end|>").input_ids
        tokens += said + answer
        labels += [-100] * len(said) + answer
        observation, _, terminated, truncated, _ = game.step(action)
        over = terminated or truncated
    return tokens, labels


def padded(rows: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of several walks, int64 [B, T]."""
    width = max(len(tokens) for tokens, _ in rows)
    tokens = [row + [pad] * (width - len(row)) for row, _ in rows]
    labels = [row + [-100] * (width - len(row)) for _, row in rows]
    return torch.tensor(tokens), torch.tensor(labels)


@torch.no_grad()
def success(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, sample: bool = False) -> float:
    """Return the share of held-out games that reach the goal, greedily or sampled at temperature 1."""
    model.eval()
    games = [make("frozen_lake", **GAME) for _ in HELD_OUT]
    messages = [[{"role": "user", "content": game.reset(seed)[0]}] for game, seed in zip(games, HELD_OUT, strict=True)]
    going, won = list(range(len(games))), 0
    tokenizer.padding_side = "left"
    while going:
        texts = [tokenizer.apply_chat_template(messages[n], tokenize=False, add_generation_prompt=True) for n in going]
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        output = model.generate(**inputs, do_sample=sample, top_k=0, max_new_tokens=6)
        answers = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        still = []
        for number, answer in zip(going, answers, strict=True):
            observation, reward, terminated, truncated, _ = games[number].step(answer)
            won += reward > 0
            messages[number] += [{"role": "assistant", "content": answer}, {"role": "user", "content": observation}]
            if not (terminated or truncated):
                still.append(number)
        going = still
    return won / len(games)


def pretrain(name: str, spec: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Pre-train one model on fresh walks."""
    torch.manual_seed(spec["seed"])
    config = Qwen3Config(
        vocab_size=320,
        head_dim=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **spec["shape"],
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    game = make("frozen_lake", **GAME)
    begun, seed = time.time(), spec["seed"] * 10**8
    for step in range(1, spec["steps"] + 1):
        cosine = 0.5 * (1 + math.cos(math.pi * step / spec["steps"]))
        for group in optimizer.param_groups:
            group["lr"] = spec["lr"] * min(1, step / 20) * (0.02 + 0.98 * cosine)
        rows = [episode(tokenizer, game, seed + number, spec["random"]) for number in range(spec["batch"])]
        seed += spec["batch"]
        rows.sort(key=lambda row: len(row[0]))  # little padding
        counted = sum(label != -100 for _, labels in rows for label in labels)
        model.train()
        optimizer.zero_grad()
        loss = 0.0
        for first in range(0, len(rows), ALIKE):
            tokens, labels = padded(rows[first : first + ALIKE], tokenizer.pad_token_id)
            logits = model(tokens).logits[:, :-1].float()
            total = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
            (total / counted).backward()
            loss += total.item() / counted
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == spec["steps"]:
            rate = success(model, tokenizer)
            print(
                f"{name}: step {step}  loss {loss:.4f}  success {rate:.3f}  {time.time() - begun:.0f} s",
                flush=True,
            )
    for parameter in model.parameters():  # what the file holds
        parameter.data = parameter.data.bfloat16().float()
    print(
        f"{name}: greedy {success(model, tokenizer):.3f}, sampled {success(model, tokenizer, sample=True):.3f}",
        flush=True,
    )
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=HERE / "models", help="default: models/ of this folder")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    for name in args.models:
        folder = args.output / name
        model = pretrain(name, MODELS[name], tokenizer)
        model.to(torch.bfloat16).save_pretrained(folder)
        (folder / "model.safetensors").chmod(0o644)  # some versions write it for the owner only
        tokenizer.padding_side = "right"
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
