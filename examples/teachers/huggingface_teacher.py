"""A teacher that transformers computes in the driver's process. Legend: T tokens, P of them prompt, V token ids."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from roll_opd.teachers.teacher_interface import LOGPROBS, Target, TeacherAnswer, TokenSequence, Wanted
from roll_opd.teachers.teacher_registry import TeacherStart


class HuggingFace:
    """One forward pass for each sequence."""

    targets: frozenset[Target] = frozenset()  # log-probs of sampled tokens only
    is_exact = True

    def __init__(self, start: TeacherStart, *, precision: Literal["float32", "bfloat16"] = "float32") -> None:
        self.name, self._model = start.name, AutoModelForCausalLM.from_pretrained(start.model, dtype=precision).eval()

    async def score(
        self, sequences: Sequence[TokenSequence], temperature: float, wanted: Wanted = LOGPROBS
    ) -> list[TeacherAnswer]:
        """Return the log-probs of response tokens, f32 [T-P], of each sequence."""
        return [TeacherAnswer(self._logprobs(tokens, prompt, temperature)) for tokens, prompt in sequences]

    @torch.no_grad()
    def _logprobs(self, tokens: np.ndarray, prompt_length: int, temperature: float) -> np.ndarray:
        ids_T = torch.from_numpy(tokens)
        logits_TV = self._model(ids_T[None]).logits[0, prompt_length - 1 : -1].float() / temperature
        return logits_TV.log_softmax(-1).gather(-1, ids_T[prompt_length:, None])[:, 0].numpy()

    def drain_metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def end(self) -> None:
        """Drop the model."""
        self._model = None
