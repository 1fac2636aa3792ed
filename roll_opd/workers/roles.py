"""The roles of a run as the driver sees them: what a student, a teacher, a sampler and a judge can do."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import ray

from roll_opd.cluster.group import WorkerGroup
from roll_opd.config.frozen import FrozenDict
from roll_opd.config.plan import ObjectivePlan, RewardPlan, SamplingPlan, TeacherPlan, TrainPlan
from roll_opd.data.compact import Compact
from roll_opd.data.experience import Experience
from roll_opd.data.training import TrainSample
from roll_opd.inference.completion import Completion
from roll_opd.workers.rollout import Request

SKIPS_ALLOWED = 3  # updates in a row without a finite loss and gradient


class RunError(RuntimeError):
    """The run cannot go on; the message says why and what to look at."""


async def gathered_logprobs(
    group: WorkerGroup, experiences: Sequence[Experience | TrainSample], temperature: float
) -> list[np.ndarray]:
    """Every rank scores its share; returns f32 [T-P] a sequence, in order."""
    sequences = Compact([(e.tokens, e.prompt_length) for e in experiences])
    answers = await group.call("logprobs", ray.put(sequences), temperature)
    merged = {number: values for answer in answers if answer for number, values in answer.items()}
    return [merged[number] for number in range(len(experiences))]


@dataclass(frozen=True)
class Scorer:
    """A frozen model that scores what the student wrote: a teacher, or the reference policy."""

    name: str
    group: WorkerGroup
    vocab_size: int

    async def score(self, experiences: Sequence[Experience | TrainSample], temperature: float) -> list[np.ndarray]:
        """Return log-probs, f32 [T-P] each. RunError when they cannot be a working model's."""
        largest = max((int(e.tokens.max()) for e in experiences), default=0)
        if largest >= self.vocab_size:
            raise RunError(
                f"token {largest} is outside {self.name}'s vocabulary of {self.vocab_size}: the student's "
                "vocabulary is padded further and it sampled from the padding; use a teacher of the same vocabulary"
            )
        logprobs = await gathered_logprobs(self.group, experiences, temperature)
        every = np.concatenate(logprobs) if logprobs else np.zeros(0)
        if not np.isfinite(every).all():
            raise RunError(f"{self.name}: {(~np.isfinite(every)).sum()} log-probs are not finite")
        return logprobs


@dataclass(frozen=True)
class Teacher(Scorer):
    """A scorer whose log-probs are learned from."""

    plan: TeacherPlan


@dataclass
class Student:
    """The model that learns."""

    plan: TrainPlan
    group: WorkerGroup
    _skipped: int = field(default=0, init=False)

    async def logprobs(self, experiences: Sequence[Experience], temperature: float) -> list[Experience]:
        """Fill in `old_logprobs` from the training engine."""
        values = await gathered_logprobs(self.group, experiences, temperature)
        return [replace(e, old_logprobs=v) for e, v in zip(experiences, values, strict=True)]

    async def learn(
        self,
        experiences: Sequence[Experience],
        teachers: Sequence[TeacherPlan],
        objective: ObjectivePlan,
        temperature: float,
    ) -> tuple[list[Experience], dict[str, float]]:
        """Run all updates of one step.

        Returns the experiences with `old_logprobs` filled in (where they were not, the update computed them on its
        way), and `actor/*` metrics.
        """
        learned = list(experiences)
        results = []
        size = self.plan.mini_batch_sequences
        for _ in range(objective.ppo_epochs):
            for start in range(0, len(learned), size):
                batch = learned[start : start + size]
                sent = ray.put(Compact(_for_training(batch)))
                ranks = await self.group.call("update", sent, teachers, objective, temperature)
                results.append(ranks)
                self.count_skips(applied=ranks[0].applied)
                for number, values in (item for rank in ranks for item in rank.logprobs.items()):
                    if learned[start + number].old_logprobs is None:
                        learned[start + number] = replace(learned[start + number], old_logprobs=values)
        return learned, _actor_metrics(results)

    async def weights(self) -> list[ray.ObjectRef]:
        """References to buckets that together hold all weights."""
        answers = await self.group.call("weights")
        return next(references for references in answers if references)

    async def save(self, directory: Path) -> None:
        """Write training state and a Hugging Face model into `directory`."""
        await self.group.call("save", directory)

    async def load(self, directory: Path) -> None:
        """Put back what `save` wrote."""
        await self.group.call("load", directory)

    def count_skips(self, applied: bool) -> None:
        """Count an update that was not applied; RunError after `SKIPS_ALLOWED` in a row."""
        self._skipped = 0 if applied else self._skipped + 1
        if self._skipped >= SKIPS_ALLOWED:
            raise RunError(
                f"{self._skipped} updates in a row had a loss or gradient that was not finite and were skipped; "
                "lower learning_rate, or look for infinite log-probs in samples.jsonl"
            )


def _for_training(experiences: Sequence[Experience]) -> list[Experience]:
    """Without what only rewards read: the test cases of a batch can be larger than all the rest of it."""
    return [replace(e, extra=FrozenDict()) if e.extra else e for e in experiences]


def _actor_metrics(results: Sequence[Sequence]) -> dict[str, float]:
    """Metrics of a step's updates (each the list of its ranks' `TrainResult`s): means over tokens or updates."""
    tokens = sum(rank.sums.get("tokens", 0.0) for ranks in results for rank in ranks) or 1.0

    def total(name: str) -> float:
        return sum(rank.sums.get(name, 0.0) for ranks in results for rank in ranks)

    return {
        "actor/pg_loss": total("policy_loss") / len(results),
        "actor/total_loss": total("weighted_loss") / len(results),
        "actor/ratio_mean": total("ratio") / tokens,
        "actor/clipfrac": total("clipped") / tokens,
        "actor/approx_kl": total("approx_kl") / tokens,
        "actor/kl_loss": total("kl_loss") / len(results),
        "actor/grad_norm": float(np.mean([ranks[0].grad_norm for ranks in results])),
        "actor/lr": results[-1][0].learning_rate,
        "actor/skipped_updates": float(sum(not ranks[0].applied for ranks in results)),
    }


@dataclass(frozen=True)
class Sampler:
    """The student's inference engines."""

    engines: Sequence[ray.actor.ActorHandle]

    async def sample(
        self, requests: Sequence[Request], sampling: SamplingPlan, chunk: int
    ) -> AsyncIterator[list[tuple[int, Completion]]]:
        """Spread groups over the engines; yield lists of (index of the request, its completion).

        A list holds `chunk` samples that one engine finished one after another, and its last one what is left.
        Leaving the iterator early aborts what is still being written (use `contextlib.aclosing`).
        """
        finished: asyncio.Queue[list[tuple[int, Completion]] | Exception] = asyncio.Queue()

        async def follow(engine: ray.actor.ActorHandle, share: list[int]) -> None:
            asked = Compact([requests[index] for index in share])
            stream = engine.generate.options(num_returns="streaming").remote(asked, sampling, chunk)
            left = len(share)
            try:
                async for reference in stream:
                    answers = await reference
                    left -= len(answers)
                    finished.put_nowait([(share[number], completion) for number, completion in answers])
                if left:
                    raise RunError(f"an inference engine ended with {left} of {len(share)} requests unanswered")
            except asyncio.CancelledError:
                ray.cancel(stream)
                raise
            except Exception as error:  # raised where the caller is waiting
                finished.put_nowait(error)

        shares: list[list[int]] = [[] for _ in self.engines]
        for index, request in enumerate(requests):
            shares[request.group % len(self.engines)].append(index)
        followers = [
            asyncio.create_task(follow(engine, share))
            for engine, share in zip(self.engines, shares, strict=True)
            if share
        ]
        missing = len(requests)
        try:
            while missing:
                answers = await finished.get()
                if isinstance(answers, Exception):
                    raise answers
                missing -= len(answers)
                yield answers
        finally:
            for follower in followers if missing else ():
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)

    async def update_weights(self, buckets: Sequence[ray.ObjectRef], version: int) -> None:
        """Load new weights into every engine; each checks that they arrived."""
        await asyncio.gather(*[engine.update_weights.remote(buckets, version) for engine in self.engines])

    async def close(self) -> None:
        """End the engines."""
        await asyncio.gather(*[engine.close.remote() for engine in self.engines])


@dataclass(frozen=True)
class Judge:
    """The reward workers of one domain."""

    plan: RewardPlan
    workers: Sequence[ray.actor.ActorHandle]

    async def score(self, experiences: Sequence[Experience]) -> list[float | None]:
        """Return one reward an experience, in order; None where the reward cannot judge it."""
        share = -(-len(experiences) // len(self.workers))
        parts = [experiences[start : start + share] for start in range(0, len(experiences), share)]
        scores = await asyncio.gather(
            *[worker.score.remote(Compact(part)) for worker, part in zip(self.workers, parts, strict=False)]
        )
        return [score for part in scores for score in part]
