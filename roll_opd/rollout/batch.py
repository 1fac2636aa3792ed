"""`Batch`: the samples of one update step, with the prompts that they came from."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from roll_opd.data.prompt_source import Prompt
from roll_opd.rollout.runs import PendingRewards
from roll_opd.samples.sample import Sample
from roll_opd.samples.versions import sampling_versions, tokens_by_version


@dataclass
class Batch:
    """Samples of one update step, and the state of the prompt source after them."""

    version: int  # of the weights before the batch's update
    rewards: list[PendingRewards] = field(default_factory=list)  # of each rollout that made samples of the batch
    prompts: list[Prompt] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)  # of each prompt, in the order of the prompts
    filtered: list[Prompt] = field(default_factory=list)  # prompts whose groups did not pass
    draws: list[int] = field(default_factory=list)  # numbers of the prompts in the order of the data
    filtered_draws: list[int] = field(default_factory=list)
    generated_tokens: int = 0  # of all groups
    demonstrations: list[Prompt] = field(default_factory=list)  # rows with answers
    demonstration_samples: list[Sample] = field(default_factory=list)
    source_state: dict[str, Any] = field(
        default_factory=dict
    )  # for a checkpoint: prompts of later batches are not yet drawn
    epochs: float = 0.0  # passes over the prompts
    schedule: dict[str, float] = field(default_factory=dict)  # metrics of generation that runs ahead

    @property
    def versions(self) -> Counter[int]:
        """Sampled tokens by version of the weights."""
        return tokens_by_version(sample.versions for sample in self.samples)

    def ahead_metrics(self) -> dict[str, float]:
        """Return `rollout/async/*` of generation that runs ahead: its schedule, and ages in versions of the tokens.

        Empty if generation and training take turns.
        """
        if not self.schedule:
            return {}
        tokens = self.versions
        ages = sorted((self.version - version, count) for version, count in tokens.items())
        total, below, p95 = sum(tokens.values()), 0, 0
        for age, count in ages:
            if below < 0.95 * total:
                p95 = age
            below += count
        kinds = [len(sampling_versions(sample.versions)) for sample in self.samples]
        return {
            **self.schedule,
            "rollout/async/age_mean": sum(age * count for age, count in ages) / max(total, 1),
            "rollout/async/age_p95": float(p95),
            "rollout/async/age_max": float(max((age for age, _ in ages), default=0)),
            "rollout/async/versions_per_sample": sum(kinds) / max(len(kinds), 1),
        }

    async def with_rewards(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the batch's samples with their missing rewards."""
        found = list(samples)
        for rewards in self.rewards:
            found = await rewards.added_to(found)
        return found
