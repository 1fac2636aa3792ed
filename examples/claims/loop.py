"""The engine of the claims in one process: the loop of examples/minimal_opd.py, with the package's loss.

A step costs a tenth of a CPU second. The same seeds give the same numbers on the same machine. Legend: B answers,
P tokens of a question, A tokens of an answer, V vocabulary, M = B * A.
"""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lab import Signal
from make_chains import HERE, make_batch
from make_chains import prompt_ids as ids_of
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

sys.path.insert(0, str(HERE.parent))
from minimal_opd import Rollout, compute_logprobs

from roll_opd.data.templates import load_tokenizer
from roll_opd.objective.aggregation import token_weights
from roll_opd.objective.losses.batch import LossBatch
from roll_opd.objective.losses.policy_losses import importance_sampling


class Loop:
    """A student and a teacher of a directory that make_chains.py wrote."""

    rollout: Rollout  # of the last `sample`
    start: dict[str, Tensor]  # weights before the first step

    def __init__(self, models: Path, task: str) -> None:
        torch.set_num_threads(1)  # models this small only make several threads wait for each other
        self.models, self._task = models, task
        self.tokenizer = load_tokenizer(str(models / f"{task}_student"))
        self._ids_of = cache(lambda question: ids_of(self.tokenizer, question))
        self.teacher = self.load(f"{task}_teacher").requires_grad_(False)
        self._prepared: dict[str, dict[str, Tensor]] = {}
        self.reset(0)

    def load(self, name: str) -> Any:
        """Return a model of the directory."""
        return AutoModelForCausalLM.from_pretrained(self.models / name, dtype=torch.float32)

    def reset(self, seed: int) -> None:
        """Start again from the first student, with a new optimizer."""
        torch.manual_seed(seed)
        self.student = self.load(f"{self._task}_student")
        self.start = self.weights()
        self.new_optimizer()

    def new_optimizer(self) -> None:
        """Replace the optimizer by a new one without moments."""
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=0, betas=(0.9, 0.95), weight_decay=0.0)

    def start_from(self, key: str, prepare: Callable[[], None]) -> None:
        """Train the student by `prepare` with seed 0, or load the weights of the first such call; new optimizer."""
        if key not in self._prepared:
            state = torch.get_rng_state()
            torch.manual_seed(0)
            prepare()
            torch.set_rng_state(state)
            self._prepared[key] = self.weights()
        self.start = self._prepared[key]
        self.student.load_state_dict(self.start)
        self.new_optimizer()

    @torch.no_grad()
    def sample(self, asked: list[str], length: int, greedy: bool) -> list[str]:
        """Return an answer of `length` tokens to each question."""
        prompts_BP = torch.tensor([self._ids_of(question) for question in asked])
        state, tokens_B1, answer = DynamicCache(config=self.student.config), prompts_BP, []
        for _ in range(length):
            logits_BV = self.student(tokens_B1, past_key_values=state, logits_to_keep=1).logits[:, -1]
            chosen_B = logits_BV.argmax(-1) if greedy else torch.multinomial(logits_BV.softmax(-1), 1)[:, 0]
            tokens_B1 = chosen_B[:, None]
            answer.append(tokens_B1)
        answers_BA = torch.cat(answer, dim=1)
        self.rollout = Rollout(prompts_BP, answers_BA, torch.ones_like(answers_BA, dtype=torch.bool))
        return self.tokenizer.batch_decode(answers_BA)

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the student's weights."""
        return {name: value.clone() for name, value in self.student.state_dict().items()}

    def model_of(self, weights: Mapping[str, Tensor]) -> Any:
        """Return another model with these weights, without gradients."""
        model = copy.deepcopy(self.student)
        model.load_state_dict(weights)
        return model.requires_grad_(False)

    def logprobs(self, model: Any) -> Tensor:
        """Return a model's log-prob of each token of the last answers, f32 [B, A]."""
        return compute_logprobs(model, self.rollout)

    def distributions(self, model: Any) -> Tensor:
        """Return a model's log-probs of the vocabulary at each token of the last answers, f32 [B, A, V]."""
        tokens_BT = torch.cat([self.rollout.prompts_BP, self.rollout.answers_BA], dim=1)
        return model(tokens_BT).logits[:, self.rollout.prompts_BP.shape[1] - 1 : -1].log_softmax(dim=-1)

    def update(self, signal: Signal, rewards: np.ndarray, learning_rate: float) -> None:
        """Make one optimizer step on the answers of the last `sample`."""
        student_BA = self.logprobs(self.student)
        with torch.no_grad():
            scored_BA = self.logprobs(self.teacher)
        advantages = signal(student_BA.detach().numpy(), scored_BA.numpy(), rewards)
        self.minimise(policy_loss(student_BA, torch.from_numpy(np.array(advantages, np.float32))), learning_rate)

    def fit(self, asked: Sequence[str], answers: Sequence[str], learning_rate: float) -> None:
        """Make one optimizer step of supervised fine-tuning on answers of one length."""
        ids, labels = make_batch(self.tokenizer, list(zip(asked, answers, strict=True)))
        self.minimise(self.student(input_ids=ids, labels=labels).loss, learning_rate)

    def minimise(self, loss: Tensor, learning_rate: float) -> None:
        """Make one optimizer step on a loss; the norm of the gradient is clipped at 1."""
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), max_norm=1.0)
        self.optimizer.step()


def policy_loss(student_BA: Tensor, advantages_BA: Tensor) -> Tensor:
    """Return the package's policy loss for answers of the same weights, mean over tokens, f32 scalar."""
    mask_BA = torch.ones_like(student_BA, dtype=torch.bool)
    lengths = (student_BA.shape[1],) * len(student_BA)
    student_M, mask_M = student_BA.flatten(), mask_BA.flatten()
    loss_M = importance_sampling(LossBatch(student_M, student_M.detach(), advantages_BA.flatten(), mask_M, lengths))
    return (torch.cat(token_weights(list(mask_BA), "token-mean")) * loss_M).sum()
