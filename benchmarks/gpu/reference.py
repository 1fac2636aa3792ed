"""Hugging Face's side: log-probs in f32 and bf16, and in f32 each objective's loss and gradient norm with whole logits.

Written from the formulas, without the engine; a separate process, because on a CPU the engine patches torch.

Legend: N tokens of a sequence, M scored ones, V vocabulary.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batches import ALPHA, BETA, COEFFICIENT, OBJECTIVES, PROMPT, TEMPERATURE, TOPK, sequences
from shapes import SHAPES, make_model
from torch import Tensor
from transformers import AutoModelForCausalLM


def main() -> int:
    """Write two models, and Hugging Face's figures for them, into a directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument(
        "--numerics", action="store_true", help="also compute the figures; otherwise only the student is written"
    )
    options = parser.parse_args()
    sys.modules["fla"] = None  # type: ignore[assignment]  # transformers then computes Gated DeltaNets in torch
    shape = SHAPES[options.shape]
    make_model(options.directory / "student", shape, 1, options.device)
    if not options.numerics:
        return 0
    make_model(options.directory / "teacher", shape, 2, options.device)
    length = min(shape.length, 512)  # complete logits in f32 and their gradients must fit into memory
    tokens = [torch.from_numpy(one).to(options.device) for one in sequences(shape.vocab, 4, length)]
    found: dict[str, Any] = {}
    with torch.no_grad():
        teacher = load(options.directory / "teacher", torch.float32, options.device)
        sides = [teacher_side(teacher, one) for one in tokens]
        for number, side in enumerate(sides):
            found |= {f"{name} {number}": value.cpu().numpy() for name, value in side.items() if name != "all"}
        found["head"] = teacher.lm_head.weight.cpu().numpy()
        found["logit cap"] = np.array(getattr(teacher.config, "final_logit_softcapping", None) or 0.0)
        del teacher
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            student = load(options.directory / "student", dtype, options.device)
            for number, one in enumerate(tokens):
                found[f"{name} {number}"] = picked(log_probs(student, one), one).cpu().numpy()
            del student
    student = load(options.directory / "student", torch.float32, options.device)
    for objective, divergence in OBJECTIVES.items():
        student.zero_grad()
        scored = sum(len(one) - PROMPT for one in tokens)
        total = 0.0
        for one, side in zip(tokens, sides, strict=True):
            loss = loss_of(log_probs(student, one), one, side, objective.split()[0], divergence) / scored
            loss.backward()
            total += loss.item()
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in student.parameters() if p.grad is not None))
        found[f"loss {objective}"], found[f"norm {objective}"] = np.array(total), np.array(norm)
    np.savez(options.directory / "reference.npz", **found)
    return 0


def load(directory: Path, dtype: torch.dtype, device: str) -> Any:
    """Return a frozen model. Its attention is the eager one, because the other ones ignore a cap on scores."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    return model.to(device).eval()


def log_probs(model: Any, tokens_N: Tensor) -> Tensor:
    """Return log-probs of every token at each scored position, f32 [M, V]."""
    logits_NV = model(tokens_N[None]).logits[0]
    return (logits_NV[PROMPT - 1 : -1].float() / TEMPERATURE).log_softmax(-1)


def picked(logprobs_MV: Tensor, tokens_N: Tensor) -> Tensor:
    """Return log-probs of the scored tokens, f32 [M]."""
    return logprobs_MV.gather(1, tokens_N[PROMPT:, None])[:, 0]


def teacher_side(teacher: Any, tokens_N: Tensor) -> dict[str, Tensor]:
    """Return the teacher's columns for each scored token, for every objective."""
    logprobs_MV = log_probs(teacher, tokens_N)
    best_MK, ids_MK = logprobs_MV.topk(TOPK)
    rest_M = logprobs_MV.scatter(1, ids_MK, -math.inf).logsumexp(-1)
    hidden_NE = teacher.model(tokens_N[None]).last_hidden_state[0]
    return {
        "teacher": picked(logprobs_MV, tokens_N),
        "topk_ids": ids_MK.int(),
        "topk_logprobs": best_MK,
        "topk_rest": rest_M,
        "hidden": hidden_NE[PROMPT - 1 : -1],
        "all": logprobs_MV,
    }


def loss_of(
    logprobs_MV: Tensor, tokens_N: Tensor, side: dict[str, Tensor], objective: str, divergence: str | None
) -> Tensor:
    """Return the sum over tokens of an objective's loss."""
    if objective == "sampled":  # a policy gradient with the advantage teacher minus student log-prob
        mine_M = picked(logprobs_MV, tokens_N)
        advantage_M = COEFFICIENT * (side["teacher"] - mine_M.detach())
        return -(advantage_M * (mine_M - mine_M.detach()).exp()).sum()
    student, teacher = logprobs_MV.double(), side["all"].double()
    if objective == "topk":
        ids_MK = side["topk_ids"].long()
        rest_M1 = student.scatter(1, ids_MK, -math.inf).logsumexp(-1, keepdim=True)
        student = torch.cat([student.gather(1, ids_MK), rest_M1], 1)
        teacher = torch.cat([side["topk_logprobs"], side["topk_rest"][:, None]], 1).double()
    s, t = student.exp(), teacher.exp()
    if divergence == "reverse_kl":
        return COEFFICIENT * kl(s, s, t)
    if divergence == "forward_kl":
        return COEFFICIENT * kl(t, t, s)
    if divergence == "jsd":
        mixed = BETA * t + (1 - BETA) * s
        return COEFFICIENT * (BETA * kl(t, t, mixed) + (1 - BETA) * kl(s, s, mixed))
    if divergence == "skewed_reverse_kl":
        return COEFFICIENT * kl(s, s, ALPHA * s + (1 - ALPHA) * t)
    return COEFFICIENT * kl(t, t, ALPHA * t + (1 - ALPHA) * s)


def kl(weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the sum of weighted log-ratios."""
    return (weight * (first.log() - second.log())).sum()


if __name__ == "__main__":
    sys.exit(main())
