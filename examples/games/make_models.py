"""Make the models of the examples in environments: for each game, a teacher that wins and a student that loses.

    python examples/games/make_models.py [--output DIR] [--games frozen_lake sokoban] [--threads N]

All models see the same text as in a run: a conversation in which each user turn is the map and each assistant turn a
direction. A *teacher* is pre-trained on shortest solutions. A *student* is smaller, and is pre-trained on games in
which the player mostly walks right and then down, whatever the map, and only sometimes makes a good move. So it could
read the map, but loses most games. The seeds below determine the result; another number of threads or another CPU
rounds differently. The tokenizer, with one token per byte, is the tokenizer of the addition example.
"""

import argparse
import math
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from roll_opd.extras.games import EnvironmentFailure, make

HERE = Path(__file__).resolve().parent
TOKENIZER = HERE.parent / "demo" / "models" / "teacher"
PLAIN = {"action_pattern": "^(.*)$", "env_instruction": ""}  # pattern: the whole answer is the action
GAMES: dict[str, dict[str, Any]] = {
    "frozen_lake": {"size": 4, "is_slippery": False, "max_steps": 8, **PLAIN},
    "sokoban": {"dim_room": [6, 6], "num_boxes": 1, "search_depth": 10, "max_steps": 12, **PLAIN},
}
ALIKE = 24  # number of games of about the same length that are computed together
HELD_OUT = range(1_000_000, 1_000_200)  # seeds of games that are used only for measuring


@dataclass(frozen=True)
class Spec:
    """A model and the settings of its pre-training."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    good_moves: float  # fraction of good moves; other moves go right or, if that is blocked, down
    seed: int
    steps: int
    lr: float = 2e-3
    batch: int = 64  # games a step


TEACHER = {
    "frozen_lake": Spec(4, 128, 512, 4, good_moves=1.0, seed=1, steps=800),
    "sokoban": Spec(4, 128, 512, 4, good_moves=1.0, seed=3, steps=400),
}
STUDENT = {
    "frozen_lake": Spec(3, 96, 256, 2, good_moves=0.4, seed=2, steps=900),
    "sokoban": Spec(3, 96, 256, 2, good_moves=0.3, seed=4, steps=300),
}


def by_habit(observation: str) -> str:
    """Return Right if there is a cell to the right of the player (P or S), else Down."""
    line = next(line for line in observation.split("\n") if set(line) & set("PS"))
    right = line[max(line.find("P"), line.find("S")) + 1 :]
    return "Down" if not right or right[0] == "#" else "Right"


def episode(tokenizer: PreTrainedTokenizerFast, game: Any, seed: int, good_moves: float) -> tuple[list[int], list[int]]:
    """Return the tokens of one game, and labels that are set only at the directions."""
    rng = np.random.default_rng([seed, 1])
    observation, _ = game.reset(seed)
    tokens: list[int] = []
    labels: list[int] = []
    over = False
    while not over:
        action = by_habit(observation)
        if rng.random() < good_moves:
            with suppress(EnvironmentFailure):  # a box may be in a place from which it cannot be moved
                action = game.solve()[0]
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
    """Return tokens and labels of several games, int64 [B, T]."""
    width = max(len(tokens) for tokens, _ in rows)
    tokens = [row + [pad] * (width - len(row)) for row, _ in rows]
    labels = [row + [-100] * (width - len(row)) for _, row in rows]
    return torch.tensor(tokens), torch.tensor(labels)


@torch.no_grad()
def success(name: str, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, sample: bool = False) -> float:
    """Return the fraction of held-out games that are won, greedily or sampled at temperature 1."""
    model.eval()
    games = [make(name, **GAMES[name]) for _ in HELD_OUT]
    messages = [[{"role": "user", "content": game.reset(seed)[0]}] for game, seed in zip(games, HELD_OUT, strict=True)]
    going = list(range(len(games)))
    tokenizer.padding_side = "left"
    while going:
        texts = [tokenizer.apply_chat_template(messages[n], tokenize=False, add_generation_prompt=True) for n in going]
        inputs = tokenizer(texts, return_tensors="pt", padding=True)
        output = model.generate(**inputs, do_sample=sample, top_k=0, max_new_tokens=6)
        answers = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        still = []
        for number, answer in zip(going, answers, strict=True):
            observation, _, terminated, truncated, _ = games[number].step(answer)
            messages[number] += [{"role": "assistant", "content": answer}, {"role": "user", "content": observation}]
            if not (terminated or truncated):
                still.append(number)
        going = still
    return sum(game.succeeded for game in games) / len(games)


def pretrain(name: str, role: str, spec: Spec, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Pre-train one model on fresh games."""
    torch.manual_seed(spec.seed)
    config = Qwen3Config(
        vocab_size=320,
        head_dim=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_hidden_layers=spec.layers,
        hidden_size=spec.hidden,
        intermediate_size=spec.feed_forward,
        num_attention_heads=spec.heads,
        num_key_value_heads=2,
        tie_word_embeddings=role == "student",
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    game = make(name, **GAMES[name])
    begun, seed = time.time(), spec.seed * 10**8
    for step in range(1, spec.steps + 1):
        cosine = 0.5 * (1 + math.cos(math.pi * step / spec.steps))
        for group in optimizer.param_groups:
            group["lr"] = spec.lr * min(1, step / 20) * (0.02 + 0.98 * cosine)
        rows = [episode(tokenizer, game, seed + number, spec.good_moves) for number in range(spec.batch)]
        seed += spec.batch
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
        if step % 100 == 0 or step == spec.steps:
            won, seconds = success(name, model, tokenizer), time.time() - begun
            print(f"{name} {role}: step {step}  loss {loss:.4f}  won {won:.3f}  {seconds:.0f} s", flush=True)
    for parameter in model.parameters():  # the weights as rounded in the file
        parameter.data = parameter.data.bfloat16().float()
    greedy, sampled = (success(name, model, tokenizer, sample) for sample in (False, True))
    print(f"{name} {role}: won greedily {greedy:.3f}, sampled {sampled:.3f}", flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=HERE / "models", help="default: models/ in this folder")
    parser.add_argument("--games", nargs="+", default=list(GAMES), choices=list(GAMES))
    parser.add_argument("--roles", nargs="+", default=["teacher", "student"], choices=["teacher", "student"])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    for name in args.games:
        for role in args.roles:
            spec = {"teacher": TEACHER, "student": STUDENT}[role][name]
            folder = args.output / f"{name}_{role}"
            model = pretrain(name, role, spec, tokenizer)
            model.to(torch.bfloat16).save_pretrained(folder)
            (folder / "model.safetensors").chmod(0o644)  # some versions make the file readable for the owner only
            tokenizer.padding_side = "right"
            tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
