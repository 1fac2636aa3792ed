"""The roles of a run as the driver sees them: what a student, a teacher and a sampler can do."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from roll_opd.cluster.group import WorkerGroup
from roll_opd.config.plan import ObjectivePlan, SamplingPlan, TeacherPlan
from roll_opd.data.compact import Compact
from roll_opd.data.experience import Experience
from roll_opd.data.training import TrainResult, TrainSample
from roll_opd.frozen import FrozenDict
from roll_opd.inference.completion import Completion
from roll_opd.workers.errors import RunError
from roll_opd.workers.learner import Learner
from roll_opd.workers.rollout import Request


async def gathered(
    group: WorkerGroup, method: str, samples: Sequence[Experience | TrainSample], *args: float, **wanted: Any
) -> list[Any]:
    """Every rank runs `method` on its share of the sequences; returns its answer for each sample, in order."""
    sequences = Compact([(sample.tokens, sample.prompt_length) for sample in samples])
    answers = await group.call(method, ray.put(sequences), *args, **wanted)
    merged = {number: values for answer in answers if answer for number, values in answer.items()}
    return [merged[number] for number in range(len(samples))]


@dataclass(frozen=True)
class FrozenModel:
    """A frozen model that scores what the student wrote: a teacher, or the reference policy."""

    name: str
    group: WorkerGroup
    vocab_size: int

    async def score(self, samples: Sequence[Experience | TrainSample], temperature: float) -> list[np.ndarray]:
        """Return log-probs, f32 [T-P] each. Where one is not finite, the update that was to learn from it is skipped.

        RunError for tokens that the model does not have.
        """
        self._check_tokens(samples)
        return await gathered(self.group, "logprobs", samples, temperature)

    def _check_tokens(self, samples: Sequence[Experience | TrainSample]) -> None:
        largest = max((int(sample.tokens.max()) for sample in samples), default=0)
        if largest >= self.vocab_size:
            raise RunError(
                f"token {largest} is outside {self.name}'s vocabulary of {self.vocab_size}: the student's "
                "vocabulary is padded further and it sampled from the padding; use a teacher of the same vocabulary"
            )


@dataclass(frozen=True)
class Teacher(FrozenModel):
    """A scorer whose log-probs are learned from."""

    plan: TeacherPlan

    async def look(
        self,
        experiences: Sequence[Experience],
        temperature: float,
        objective: ObjectivePlan,
        ids: Sequence[np.ndarray] | None,
    ) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Return log-probs as `score` does, and with them the `TeacherTargets.arrays` that the objective needs.

        Args:
            ids: for a top-k of the student's, its tokens, int32 [T-P, K] each.
        """
        self._check_tokens(experiences)
        if objective.opd_objective == "full":
            wanted: dict[str, Any] = {"hidden": True}
        elif ids is not None:
            wanted = {"ids": ray.put(Compact(ids)), "vocab_size": objective.opd_vocab_size}
        else:
            wanted = {"topk": objective.opd_topk, "vocab_size": objective.opd_vocab_size}
        answers = await gathered(self.group, "score", experiences, temperature, **wanted)
        return [(answer.pop("logprobs"), answer) for answer in answers]

    async def output_head(self) -> list[ray.ObjectRef]:
        """A reference to the whole output embedding."""
        return next(head for head in await self.group.call("output_head") if head)


class Student(Learner):
    """The policy that learns from what it sampled."""

    async def logprobs(self, experiences: Sequence[Experience], temperature: float) -> list[Experience]:
        """Fill in `old_logprobs` from the training engine."""
        values = await gathered(self.group, "logprobs", experiences, temperature)
        return [replace(e, old_logprobs=v) for e, v in zip(experiences, values, strict=True)]

    async def topk_ids(
        self, experiences: Sequence[Experience], temperature: float, objective: ObjectivePlan
    ) -> list[np.ndarray]:
        """Return the most likely tokens at every response token, int32 [T-P, K] each."""
        wanted = {"topk": objective.opd_topk, "vocab_size": objective.opd_vocab_size}
        answers = await gathered(self.group, "score", experiences, temperature, **wanted)
        return [answer["topk_ids"] for answer in answers]

    async def load_teacher_head(self, teacher: Teacher) -> None:
        """Take in a teacher's output head, with which its hidden states become distributions here."""
        await self.group.call("load_teacher_head", teacher.plan.name, await teacher.output_head())

    async def learn(
        self,
        experiences: Sequence[Experience],
        teachers: Sequence[TeacherPlan],
        objective: ObjectivePlan,
        temperature: float,
        step: int,
    ) -> tuple[list[Experience], dict[str, float]]:
        """Run all updates of step `step` of the run, counted from 0.

        Returns the experiences with `old_logprobs` filled in (where they were not, the update computed them on its
        way), and `actor/*` metrics.
        """
        learned = list(experiences)
        results = []
        size = self.plan.mini_batch_sequences
        for _ in range(objective.ppo_epochs):
            for start in range(0, len(learned), size):
                batch = learned[start : start + size]
                ranks = await self._update("update", _for_training(batch), teachers, objective, temperature, step)
                results.append(ranks)
                for number, values in (item for rank in ranks for item in rank.logprobs.items()):
                    if learned[start + number].old_logprobs is None:
                        learned[start + number] = replace(learned[start + number], old_logprobs=values)
                self._check_applied(ranks, learned[start : start + size])
        return learned, _actor_metrics(results)

    async def weights(self) -> list[ray.ObjectRef]:
        """References to buckets that together hold all weights."""
        answers = await self.group.call("weights")
        return next(references for references in answers if references)


def _for_training(experiences: Sequence[Experience]) -> list[Experience]:
    """Without what only rewards read: the test cases of a batch can be larger than all the rest of it."""
    return [replace(e, extra=FrozenDict()) if e.extra else e for e in experiences]


def _actor_metrics(results: Sequence[Sequence[TrainResult]]) -> dict[str, float]:
    """Metrics of a step's updates (each the list of its ranks' results): means over tokens or updates."""
    tokens = sum(rank.sums.get("tokens", 0.0) for ranks in results for rank in ranks) or 1.0

    def total(name: str) -> float:
        return sum(rank.sums.get(name, 0.0) for ranks in results for rank in ranks)

    reported = {name for ranks in results for rank in ranks for name in rank.sums}
    parts = {
        "actor/opd_loss": "opd_loss",
        "actor/entropy": "entropy",
        "actor/demonstration_loss": "demonstration_loss",
        "actor/demonstration_tokens": "demonstration_tokens",
    }
    return {
        **{metric: total(name) / len(results) for metric, name in parts.items() if name in reported},
        "actor/pg_loss": total("policy_loss") / len(results),
        "actor/total_loss": total("weighted_loss") / len(results),
        "actor/ratio_mean": total("ratio") / tokens,
        "actor/clipfrac": total("clipped") / tokens,
        "actor/approx_kl": total("approx_kl") / tokens,
        "actor/kl_loss": total("kl_loss") / len(results),
        **optimizer_metrics(results),
    }


def optimizer_metrics(results: Sequence[Sequence[TrainResult]]) -> dict[str, float]:
    """What every student's optimizer says of a step's updates."""
    return {
        "actor/grad_norm": float(np.mean([ranks[0].grad_norm for ranks in results])),
        "actor/lr": results[-1][0].learning_rate,
        "actor/skipped_updates": float(sum(not ranks[0].applied for ranks in results)),
    }


@dataclass(frozen=True)
class Sampler:
    """The student's inference engines."""

    engines: Sequence[ray.actor.ActorHandle]

    async def sample(
        self,
        requests: Sequence[Request],
        sampling: SamplingPlan,
        chunk: int,
        finish: Callable[[int, Completion], None] = lambda index, completion: None,
    ) -> AsyncIterator[list[tuple[int, Completion]]]:
        """Spread groups over the engines; yield lists of (index of the request, its completion).

        A list holds `chunk` samples that one engine finished one after another, and its last one what is left; `finish`
        hears of each as soon as it is there. Leaving the iterator early aborts what is still being written (use
        `contextlib.aclosing`).
        """
        finished: asyncio.Queue[list[tuple[int, Completion]] | Exception] = asyncio.Queue()

        async def follow(engine: ray.actor.ActorHandle, share: list[int]) -> None:
            asked = Compact([requests[index] for index in share])
            stream = engine.generate.options(num_returns="streaming").remote(asked, sampling, chunk)
            left, whole = len(share), []
            try:
                async for reference in stream:
                    for number, completion in await reference:
                        left -= 1
                        finish(share[number], completion)
                        whole.append((share[number], completion))
                        if len(whole) == chunk or not left:
                            finished.put_nowait(whole)
                            whole = []
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

    async def end(self) -> None:
        """End the engines and their processes."""
        await asyncio.gather(*[engine.close.remote() for engine in self.engines])
        for engine in self.engines:
            ray.kill(engine)  # what they had outside their memory is gone; the rest takes seconds to tidy up
