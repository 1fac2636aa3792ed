"""The engine of the claims in one process: the loop of examples/minimal_opd.py, with the package's advantage and loss.

A step costs a tenth of a CPU second. The same seeds give the same numbers on the same machine.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from lab import Signal
from make_chains import HERE
from make_chains import prompt_ids as ids_of
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(HERE.parent))
from minimal_opd import Rollout, compute_logprobs, update

from roll_opd.data.templates import load_tokenizer


class Loop:
    """A student and a teacher of a directory that make_chains.py wrote."""

    def __init__(self, models: Path, task: str) -> None:
        torch.set_num_threads(1)  # models this small only make several threads wait for each other
        self._student_path = models / f"{task}_student"
        self.tokenizer = load_tokenizer(str(self._student_path))
        self.teacher = AutoModelForCausalLM.from_pretrained(models / f"{task}_teacher", dtype=torch.float32)
        self.teacher.requires_grad_(False)
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Start again from the first student, with a new optimizer."""
        torch.manual_seed(seed)
        self.student = AutoModelForCausalLM.from_pretrained(self._student_path, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self.student.parameters(), betas=(0.9, 0.95), weight_decay=0.0)

    def sample(self, asked: list[str], length: int, greedy: bool) -> list[str]:
        """Return an answer of `length` tokens to each question."""
        prompts_BP = torch.tensor([ids_of(self.tokenizer, question) for question in asked])
        tokens_BT = self.student.generate(
            prompts_BP, min_new_tokens=length, max_new_tokens=length, do_sample=True, top_k=1 if greedy else 0
        )
        answers_BA = tokens_BT[:, prompts_BP.shape[1] :]
        self._rollout = Rollout(prompts_BP, answers_BA, torch.ones_like(answers_BA, dtype=torch.bool))
        return self.tokenizer.batch_decode(answers_BA)

    def update(self, signal: Signal, rewards: np.ndarray, learning_rate: float) -> None:
        """Make one optimizer step on the answers of the last `sample`."""
        self._optimizer.param_groups[0]["lr"] = learning_rate
        with torch.no_grad():
            student_BA, scored_BA = (compute_logprobs(model, self._rollout) for model in (self.student, self.teacher))
        advantages_BA = signal(student_BA.numpy(), scored_BA.numpy(), rewards)
        # the update's advantage is the second argument minus the student's log-probs
        update(self.student, self._optimizer, self._rollout, student_BA + torch.from_numpy(advantages_BA))
