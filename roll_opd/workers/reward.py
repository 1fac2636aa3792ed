"""Ray actor that scores answers with one domain's reward."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import ray

from roll_opd.config.plan import RewardPlan
from roll_opd.data.experience import Experience


@ray.remote
class RewardWorker:
    """One process of a reward domain."""

    _name: str
    _reward: Any
    _tokenizer: Any

    def setup(self, plan: RewardPlan, model_path: str) -> None:
        """Find the reward, and load the tokenizer that turns responses into text."""
        from roll_opd.data.templates import load_tokenizer
        from roll_opd.rewards.registry import resolve

        self._name, self._reward = plan.worker, resolve(plan.worker, dict(plan.args))
        self._tokenizer = load_tokenizer(model_path)

    def score(self, experiences: Sequence[Experience]) -> list[float | None]:
        """One reward an experience, in order; None where the reward cannot judge it."""
        from roll_opd.rewards.interface import RewardSample, read_scores

        prompts = {e.group_id: e.prompt_tokens for e in experiences}

        @cache  # the samples of a group share their prompt
        def read_prompt(group_id: str) -> str:
            return self._tokenizer.decode(prompts[group_id], skip_special_tokens=True)

        texts = self._tokenizer.batch_decode([e.response_tokens for e in experiences], skip_special_tokens=True)
        samples = [
            RewardSample(e.id, text, e.ground_truth, e.tag, e.extra, e, partial(read_prompt, e.group_id))
            for e, text in zip(experiences, texts, strict=True)
        ]
        return [score.value for score in read_scores(self._reward(samples), samples, self._name)]
