"""On-policy distillation in one file, for reading and for changing.

    python examples/minimal_opd.py [--steps N] [--seed N]      # about a minute on one CPU core

A small student learns to add three-digit numbers from a teacher that can. One step:

    1. draw prompts
    2. the student answers them ("on-policy": it trains on its own answers, mistakes included)
    3. the teacher computes its log-prob q of every token in these answers; the student's own is l
    4. reverse KL of a token = l - q: large where the student is sure of a token that the teacher finds unlikely
    5. advantage of a token = q - l: a policy gradient makes tokens above zero more likely, those below less

Averaged over the student's samples, l - q is KL(student || teacher) of the next token, and step 5 descends it. A reward
gives one number per answer; a teacher gives one per token, so a few thousand answers are enough.

Data, advantage, loss and reward are the package's own functions. Everything else is simplified:

    here                                                  the real thing
    one process on the CPU, one step after the other      roll_opd/pipelines/distill.py: the same loop over Ray workers
    `generate` of transformers                            roll_opd/inference: vLLM, new weights after every update
    all logits [B, A, V] in memory, float32               roll_opd/megatron: tensor, pipeline and data parallelism
    prompts of one length, answers padded at the end      roll_opd/megatron/packing.py: any lengths, nothing padded
    one update per rollout, by the weights that sampled   roll_opd/objective/corrections.py: corrects where they differ
    one teacher, one number per token                     docs/objectives.md: several teachers, top-k, full vocabulary
    a token's reverse KL counts for that token alone      roll_opd/objective/opd_loss.py: sums over later tokens
    the reward is only measured                           docs/mixed.md: teachers and rewards together
    constants below, constant learning rate, no saving    examples/demo/onpolicy_distill.yaml

Legend: B sequences, P prompt tokens, A answer tokens, T = P + A, V vocabulary; M = B * A, all answers end to end.
"""

if __name__ == "__main__" and __import__("importlib.util").util.find_spec("project_environment"):  # not in a copy
    __import__("project_environment").use_project_environment(("roll_opd", "torch", "transformers"))

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from roll_opd.config.plan import DataPlan
from roll_opd.data.dataset import Prompt, PromptSet, open_prompts
from roll_opd.data.prompt_source import PromptSource
from roll_opd.data.templates import load_tokenizer
from roll_opd.extras.graders.rewards.math_rule import is_right
from roll_opd.objective.aggregation import token_weights
from roll_opd.objective.losses.batch import LossBatch
from roll_opd.objective.losses.policy_losses import importance_sampling
from roll_opd.objective.reverse_kl import weighted_reverse_kl

DEMO = Path(__file__).resolve().parent / "demo"
PROMPTS_PER_STEP = 128  # one answer per prompt; with a reward, several answers to a prompt would be compared
MAX_NEW_TOKENS = 48
LEARNING_RATE = 1e-4
CausalLM = Any  # any model of transformers; the annotation of its `generate` does not pass a type checker


@dataclass(frozen=True)
class Rollout:
    """A batch of prompts, and a model's answers."""

    prompts_BP: Tensor  # int64
    answers_BA: Tensor  # int64
    mask_BA: Tensor  # bool: True for tokens that the model chose, including the end-of-sequence token


def load_model(name: str) -> CausalLM:
    return AutoModelForCausalLM.from_pretrained(DEMO / "models" / name, dtype=torch.float32)


def load_prompts(file: str, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    return open_prompts(DataPlan(files=(str(DEMO / "data" / file),), prompt_length=32), tokenizer)[0]


def sample(model: CausalLM, prompts: list[Prompt], top_k: int = 0) -> Rollout:
    """Sample answers from the model; top_k 0 samples from the whole distribution, 1 is greedy."""
    prompts_BP = torch.from_numpy(np.stack([prompt.tokens for prompt in prompts]))
    tokens_BT = model.generate(prompts_BP, max_new_tokens=MAX_NEW_TOKENS, do_sample=True, top_k=top_k)
    answers_BA = tokens_BT[:, prompts_BP.shape[1] :]
    # `generate` pads a row after its end token, so the model chose the tokens without an end token before them
    end_BA = answers_BA == model.config.eos_token_id
    return Rollout(prompts_BP, answers_BA, mask_BA=end_BA.cumsum(dim=1) == end_BA)


def compute_logprobs(model: CausalLM, rollout: Rollout) -> Tensor:
    """Return the model's log-prob of every answer token, f32 [B, A]."""
    tokens_BT = torch.cat([rollout.prompts_BP, rollout.answers_BA], dim=1)
    # logits at a position are for the next token, so the first answer token's logits are at the prompt's last position
    logits_BAV = model(tokens_BT).logits[:, rollout.prompts_BP.shape[1] - 1 : -1]
    return logits_BAV.log_softmax(dim=-1).gather(-1, rollout.answers_BA[..., None]).squeeze(-1)


def update(student: CausalLM, optimizer: torch.optim.Optimizer, rollout: Rollout, teacher_BA: Tensor) -> float:
    """Train the student on one rollout; return the mean reverse KL per token before the update."""
    mask_M, teacher_M = rollout.mask_BA.flatten(), teacher_BA.flatten()
    student_M = compute_logprobs(student, rollout).flatten()
    old_M = student_M.detach()  # the weights that sampled are still the same: every ratio exp(l - old) is 1
    advantages_M = -weighted_reverse_kl(old_M, mask_M.float(), teacher_M * mask_M)  # q - l; constant for the gradient

    lengths = (rollout.answers_BA.shape[1],) * len(rollout.answers_BA)
    loss_M = importance_sampling(LossBatch(student_M, old_M, advantages_M, mask_M, lengths))
    weights_M = torch.cat(token_weights(list(rollout.mask_BA), "token-mean"))  # 1 / tokens; 0 outside the mask

    optimizer.zero_grad()
    (weights_M * loss_M).sum().backward()
    torch.nn.utils.clip_grad_norm_(student.parameters(), max_norm=1.0)
    optimizer.step()
    return -(weights_M * advantages_M).sum().item()


def accuracy(tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt], rollout: Rollout) -> float:
    """Return the fraction of right answers, as judged by the reward `math_rule`."""
    chosen = [answer_A[mask_A].tolist() for answer_A, mask_A in zip(rollout.answers_BA, rollout.mask_BA, strict=True)]
    texts = tokenizer.batch_decode(chosen, skip_special_tokens=True)
    right = [is_right(text, prompt.ground_truth or "") for text, prompt in zip(texts, prompts, strict=True)]
    return right.count(True) / len(right)


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # with models this small, several threads would only wait for each other
    student, teacher = load_model("student"), load_model("teacher").requires_grad_(False)
    tokenizer = load_tokenizer(str(DEMO / "models" / "student"))  # the teacher must have the same tokenizer
    source = PromptSource(load_prompts("train.jsonl", tokenizer), seed)
    held_out = load_prompts("val.jsonl", tokenizer).all()
    optimizer = torch.optim.AdamW(student.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)

    print(f"held-out accuracy before: {accuracy(tokenizer, held_out, sample(student, held_out, top_k=1)):.3f}")
    for step in range(1, steps + 1):
        start = time.perf_counter()
        prompts = source.take(PROMPTS_PER_STEP)  # 1.
        rollout = sample(student, prompts)  # 2.
        teacher_BA = compute_logprobs(teacher, rollout)  # 3.
        reverse_kl = update(student, optimizer, rollout, teacher_BA)  # 4. and 5.
        speed = rollout.mask_BA.sum() / (time.perf_counter() - start)
        reward = accuracy(tokenizer, prompts, rollout)
        print(f"step {step:2}/{steps}  reverse KL {reverse_kl:.4f}  reward {reward:.3f}  {speed:.0f} tokens/s")
    print(f"held-out accuracy after:  {accuracy(tokenizer, held_out, sample(student, held_out, top_k=1)):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=42)
    main(**vars(parser.parse_args()))
