"""Engines with answers that a test specifies."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from roll_opd.config.plan import SamplingPlan
from roll_opd.inference.vllm_requests import Completion


class Sampled:
    """An engine that answers with given or random tokens, and records its requests."""

    def __init__(
        self, tokenizer: Any, answers: Sequence[str] = (), seed: int = 0, versions: Sequence[int] = ()
    ) -> None:
        """`versions`: version of the weights that sample each answer; default 3."""
        self._versions = list(versions)
        self._tokenizer, self._answers, self._rng = tokenizer, list(answers), np.random.default_rng(seed)
        self.asked: list[np.ndarray] = []
        self.answered: list[Completion] = []
        self.pause = asyncio.Event()  # cleared: answers wait
        self.pause.set()

    async def generate(
        self, group: int, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: SamplingPlan
    ) -> list[Completion]:
        await self.pause.wait()
        for prompt in prompts:
            tokens = self._rng.integers(0, len(self._tokenizer), self._rng.integers(1, 9))
            if self._answers:
                tokens = np.array(self._tokenizer.encode(self._answers.pop(0), add_special_tokens=False))
            logprobs = -self._rng.random(len(tokens)).astype(np.float32)
            self.asked.append(prompt)
            version = self._versions.pop(0) if self._versions else 3
            self.answered.append(Completion(tokens, logprobs, "stop", ((version, len(tokens)),)))
        return self.answered[-len(prompts) :]

    async def prompt_logprobs(self, group: int, tokens: Sequence[int]) -> np.ndarray:
        return -np.arange(1, len(tokens), dtype=np.float32)

    async def weights_version(self) -> int:
        return 3
