"""`RunWorkers`: the roles of a run, and operations on several roles."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from roll_opd.config.plan import ObjectivePlan, RunPlan
from roll_opd.models.device_phases import Phase
from roll_opd.models.model_info import read_model
from roll_opd.pipelines.checkpoints import CRITIC, FOLLOWERS
from roll_opd.samples.sample import Sample, present
from roll_opd.teachers.megatron_teacher import Follower, MegatronScorer
from roll_opd.teachers.scoring import Scorers, Teacher, check_targets
from roll_opd.tracking.console import Count
from roll_opd.tracking.summary import LEARNED_TOKENS
from roll_opd.tracking.update_metrics import ACTOR_METRICS
from roll_opd.weight_sync.send_weights import receivers_of, stream
from roll_opd.workers.colocation import DeviceScheduler
from roll_opd.workers.critic import Critic
from roll_opd.workers.process_replacement import attended, started_again
from roll_opd.workers.reward_pool import RewardPool
from roll_opd.workers.sampler import Sampler
from roll_opd.workers.student import Student
from roll_opd.workers.worker_progress import Writing

T = TypeVar("T")


@dataclass(frozen=True)
class RunWorkers:
    """The roles of a run.

    `teachers_measured` is an awaitable that ends when the teachers have been validated.
    """

    student: Student
    sampler: Sampler  # supervised runs have no engines
    scorers: Scorers
    critic: Critic | None
    followers: Sequence[Follower] = ()
    turns: DeviceScheduler = field(default_factory=DeviceScheduler)  # turns of the roles that share devices
    reward_pools: tuple[RewardPool, ...] = ()
    teachers_measured: "asyncio.Future[None] | None" = None
    validation_sampler: Sampler | None = None  # engines that are reserved for validation

    async def learn(self, plan: RunPlan, samples: list[Sample], step: int) -> tuple[list[Sample], dict[str, float]]:
        """Update student and critic. Return (samples, metrics): the samples have old log-probs.

        The two are updated concurrently, unless they share devices. In the steps of `critic_warmup`, only the critic is
        updated.
        """
        await self.turns.enter(Phase.TRAIN)
        if self.critic and plan.critic and step <= plan.critic.critic_warmup:
            return samples, await self.critic.learn(samples) | {LEARNED_TOKENS: 0.0}
        temperature = plan.rollout.sampling.temperature if plan.rollout else 1.0
        student = self.student.learn(samples, plan.teachers, plan.objective, temperature, step)
        tokens = {LEARNED_TOKENS: float(sum(sample.learned_tokens for sample in samples))}
        if self.critic is None:
            learned, metrics = await student
            return learned, metrics | tokens
        if self.turns.share(self.student.plan.name, self.critic.plan.name):  # else each update would swap the models
            learned, metrics = await student
            return learned, metrics | await self.critic.learn(samples) | tokens
        (learned, metrics), of_critic = await asyncio.gather(student, self.critic.learn(samples))
        return learned, metrics | of_critic | tokens

    async def learn_supervised(
        self, plan: RunPlan, samples: Sequence[Sample], step: int
    ) -> tuple[list[np.ndarray], float, dict[str, float]]:
        """Update the student on given answers. Return (logprobs, loss, metrics).

        - `logprobs`: log-probs of each answer from before its update.
        - `loss`: mean loss over the updates.
        - `metrics`: metrics of the optimizer.
        """
        learned, metrics = await self.learn(plan, list(samples), step)
        logprobs = [present(sample.old_logprobs) for sample in learned]
        return logprobs, metrics["actor/total_loss"], {name: metrics[name] for name in ACTOR_METRICS}

    @property
    def updates(self) -> list[Count]:
        """Counters of the updates in a step, one counter per trained role."""
        return [learner.updates for learner in (self.student, self.critic) if learner]

    async def send_weights(self, version: int, *, updated: bool = True) -> dict[str, float]:
        """Send the student's weights to the inference engines, and to teachers that follow the student.

        Returns the metric `system/weight_sync_bytes`.

        `version` is the version of these weights. If `updated` is False, teachers get no weights, because they started
        with the same weights.
        """
        await self.turns.enter(Phase.WEIGHT_SYNC)
        due = [follower for follower in self.followers if updated and follower.is_due(version)]
        assert self.sampler.sync
        sent = await self.sampler.sync.push(version, [follower.group for follower in due])
        self.turns.engines_have_weights()
        await self._send_heads(due)
        return {"system/weight_sync_bytes": sent}

    async def attended(self, work: Awaitable[T], version: int) -> T:
        """Return the result of `work`; meanwhile, send the weights to engines that replace lost ones.

        Meanwhile the student must not train. `version` is the version of its weights.
        """

        async def send() -> None:
            sync = self.sampler.sync
            if sync and sync.lacking():
                async with self.student.group.without_batches():
                    await sync.push(version, only_lacking=True)

        return await attended(work, self.sampler.returned, send)

    async def attending(self, items: AsyncGenerator[T, None], version: Callable[[], int]) -> AsyncGenerator[T, None]:
        """Yield the items; while one is awaited, do as `attended`. `version` returns the version of the weights."""
        while True:
            try:
                item = await self.attended(anext(items), version())
            except StopAsyncIteration:
                return
            yield item

    async def send_for_validation(self, version: int) -> None:
        """Send the student's weights to the engines that are reserved for validation, as version `version`."""
        assert self.validation_sampler and self.validation_sampler.sync
        await self.turns.enter(Phase.WEIGHT_SYNC)
        await self.validation_sampler.sync.push(version)

    async def begin_generation(self, version: int) -> None:
        """Load the engines onto their devices.

        If the engines have no weights, the student's weights are sent to them as version `version`.
        """
        if self.turns.lack_weights:
            await self.send_weights(version, updated=False)
        await self.turns.enter(Phase.GENERATE)

    async def save(self, directory: Path) -> Writing:
        """Save the state of student and critic, and the weights of teachers that follow the student."""
        await self.turns.enter(Phase.CHECKPOINT)
        parts = [await self.student.save(directory)]
        if self.critic:
            parts.append(await self.critic.save(directory / CRITIC))
        parts += [await follower.save(directory / FOLLOWERS) for follower in self.followers]
        return Writing([group for part in parts for group in part.groups])

    async def load(self, directory: Path) -> None:
        """Restore the state that `save` wrote."""
        await self.turns.enter(Phase.RESTORE)
        await self.student.load(directory)
        if self.critic:
            await self.critic.load(directory / CRITIC)
        for follower in self.followers:
            await follower.load(directory / FOLLOWERS)
        if live := [follower for follower in self.followers if follower.plan.is_live]:
            await self.turns.enter(Phase.WEIGHT_SYNC)
            dtype = self.student.plan.model.dtype
            receivers = receivers_of([follower.group for follower in live])
            await stream(self.student.group, receivers, dtype, version=0)
        await self._send_heads(self.followers)

    async def _send_heads(self, followers: Sequence[Follower]) -> None:
        """Send output heads that have changed to the student, if the objective needs output heads.

        `followers` are the teachers that have just received new weights.
        """
        objective = self.scorers.targets_for
        if objective and objective.opd_objective == "full":
            for teacher in self.scorers.teachers:
                scorer = teacher.scorer
                if isinstance(scorer, MegatronScorer) and scorer.group in [follower.group for follower in followers]:
                    await self._load_head(teacher)

    async def _load_head(self, teacher: Teacher) -> None:
        assert isinstance(teacher.scorer, MegatronScorer)
        cap = read_model(Path(teacher.scorer.group.plan.model.path)).logit_cap
        await self.student.load_teacher_head(teacher.plan.name, await teacher.scorer.output_head(), cap)

    async def start_again(self) -> None:
        """Start the models that are trained or follow the student again, and all roles that share devices.

        Their state is then that of the start of the run.
        """
        every = [role.group for role in (self.student, self.critic) if role]
        every += [follower.group for follower in self.followers]
        models = [*(teacher.scorer for teacher in self.scorers.teachers), self.scorers.reference]
        others = [one.group for one in models if isinstance(one, MegatronScorer)]
        every += [group for group in others if self.turns.takes_turns(group.plan.name)]
        engines = [] if self.sampler.survives_losses else [self.sampler.engines]
        # a model may have several views, and supervised runs have no engines
        groups = {group.actors: group for group in reversed([*every, *engines]) if group.actors}
        self.turns.forget()
        await started_again([handle for actors in groups for handle in actors])
        for group in reversed(groups.values()):  # one after another, since one that starts needs its devices for itself
            await group.set_up_again()
        objective = self.scorers.targets_for
        if objective and objective.opd_objective == "full":
            for teacher in self.scorers.teachers:
                await self._load_head(teacher)

    async def end(self) -> None:
        """End all processes."""
        for sampler in filter(None, (self.sampler, self.validation_sampler)):
            await sampler.end()
        scorers = [teacher.scorer for teacher in self.scorers.teachers]
        for role in (self.student, self.critic, self.scorers.reference, *scorers):
            if role:
                role.end()
        for pool in self.reward_pools:
            await pool.end()

    async def for_objective(self, objective: ObjectivePlan) -> "RunWorkers":
        """Return the roles after they have been set up for an objective.

        Depending on the objective, this loads the output heads of teachers, or selects the targets and the top-k
        tokens.
        """
        scorers = self.scorers
        check_targets(scorers.teachers, objective)
        if objective.opd_objective == "full":
            for teacher in scorers.teachers:
                await self._load_head(teacher)
        if objective.opd_objective != "sampled":
            proposes = objective.opd_objective == "topk" and objective.opd_topk_source == "student"
            scorers = replace(scorers, targets_for=objective, student=self.student if proposes else None)
        return replace(self, scorers=scorers)
