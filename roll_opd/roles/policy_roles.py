"""The models of a run as the driver sees them: what a student, a teacher and a reference policy can do."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from roll_opd.actors.megatron_actor import Text
from roll_opd.base.failures import RunError
from roll_opd.cluster.group import FrozenGroup, Reference, WorkerGroup
from roll_opd.cluster.worker_progress import Writing
from roll_opd.config.plan import FollowingPlan, ObjectivePlan, TeacherPlan
from roll_opd.objective.columns import loss_columns
from roll_opd.roles.learner_role import Learner, Update, optimizer_metrics, total
from roll_opd.samples.dp_shards import ShardedBatch, shard_batch
from roll_opd.samples.experience import Experience, as_read_by, changed
from roll_opd.samples.sample import Sample
from roll_opd.samples.training import ROUTER_LOSSES, TargetRef
from roll_opd.teachers.target_refs import as_sent


async def gathered(
    group: FrozenGroup,
    method: str,
    samples: Sequence[Experience],
    *args: Any,
    routed: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Have every rank run `method` on its share of the sequences; return the answer for each sample, in order.

    Where it is `routed`, the samples' routes come along.
    """
    if not samples:
        return []
    sharded = _texts(group, samples, routed)
    merged = sharded.merged(await group.scatter(method, sharded, *args, **kwargs))
    return [merged[number] for number in range(len(samples))]


async def gathered_and_held(
    group: FrozenGroup,
    samples: Sequence[Experience],
    temperature: float,
    held: Sequence[Mapping[str, TargetRef]] = (),
    routed: bool = False,
    **wanted: Any,
) -> list[tuple[np.ndarray, TargetRef]]:
    """Do what `gathered` does, but have the ranks keep what they compute; return log-probs f32 [T-P], and the rest.

    `held` is what ranks are to open of each sample.
    """
    sharded = _texts(group, samples, routed, held)
    answers = [
        (rank, answer) for rank, answer in await group.scatter("hold_targets", sharded, temperature, **wanted) if answer
    ]
    small, kept = (sharded.merged((rank, answer[part]) for rank, answer in answers) for part in (0, 1))
    return [(small[n][0], replace(kept[n], hits=small[n][1])) for n in range(len(samples))]


def _texts(
    group: FrozenGroup, samples: Sequence[Any], routed: bool, held: Sequence[Mapping[str, TargetRef]] = ()
) -> ShardedBatch[Text]:
    """Cut a batch into what forward passes read."""
    texts = [(sample.tokens, sample.prompt_length, sample.routes if routed else None) for sample in samples]
    assignment = group.packing.assign([text[:2] for text in texts], group.plan.forward_limits)
    sent = [as_sent(one) for one in held]
    return shard_batch(texts, assignment, [text[2] is None for text in texts], _without_tokens, held=sent)


def _without_tokens(text: Text) -> Text:
    tokens, _, routes = text
    return tokens[:1], 1, None if routes is None else routes[:0]


@dataclass(frozen=True)
class FrozenModel:
    """A model that computes log-probs and does not learn: a teacher, or the reference policy."""

    name: str
    group: FrozenGroup
    vocab_size: int

    async def compute_logprobs(self, samples: Sequence[Experience], temperature: float) -> list[np.ndarray]:
        """Return log-probs, f32 [T-P] each. Where one is not finite, the update that was to learn from it is skipped.

        RunError for tokens that the model does not have.
        """
        self._check_tokens(samples)
        return await gathered(self.group, "compute_logprobs", samples, temperature)

    def _check_tokens(self, samples: Sequence[Experience]) -> None:
        largest = max((int(sample.tokens.max()) for sample in samples), default=0)
        if largest >= self.vocab_size:
            raise RunError(
                f"token {largest} is outside {self.name}'s vocabulary of {self.vocab_size}: the student's "
                "vocabulary is padded further and it sampled from the padding; use a teacher of the same vocabulary"
            )


@dataclass(frozen=True)
class Teacher(FrozenModel):
    """A model that the student learns from; frozen, or one whose weights follow the student's."""

    plan: TeacherPlan

    async def compute_targets(
        self,
        experiences: Sequence[Experience],
        temperature: float,
        objective: ObjectivePlan,
        ids: Sequence[TargetRef] | None,
    ) -> list[tuple[np.ndarray, TargetRef]]:
        """Return log-probs as `compute_logprobs` does, each with the targets that the objective needs.

        Args:
            ids: for a top-k of the student's, what `Student.topk_ids` returned.
        """
        self._check_tokens(experiences)
        wanted: dict[str, Any] = {"vocab_size": objective.opd_vocab_size}
        if objective.opd_objective == "full":
            wanted = {"hidden": True}
        elif ids is None:
            wanted["topk"] = objective.opd_topk
        held = [{"ids": one} for one in ids or ()]
        return await gathered_and_held(self.group, experiences, temperature, held, **wanted)

    async def output_head(self) -> list[Reference]:
        """Return a reference to the whole output embedding."""
        return next(head for head in await self.group.call("output_head") if head)


@dataclass(frozen=True)
class Follower:
    """The processes of teachers whose weights follow the student's."""

    plan: FollowingPlan
    group: WorkerGroup

    def is_due(self, step: int) -> bool:
        """Whether the weights after `step` are taken over."""
        return step % self.plan.every == 0

    async def save(self, directory: Path) -> Writing:
        """Write the weights, as `Learner.save` does; those of the student itself are in its own checkpoint."""
        if self.plan.is_live:
            return Writing([])
        await self.group.call("save", directory / self.plan.name)
        return Writing([self.group])

    async def load(self, directory: Path) -> None:
        """Put back what `save` wrote; one that is the student itself is sent its weights."""
        if not self.plan.is_live:
            await self.group.call("load", directory / self.plan.name)


class Student(Learner):
    """The model that learns."""

    async def compute_logprobs(self, experiences: Sequence[Experience], temperature: float = 1.0) -> list[np.ndarray]:
        """Return the log-probs of every response, f32 [T-P] each, under the current weights."""
        return await gathered(self.group, "compute_logprobs", experiences, temperature, routed=True)

    async def compute_old_logprobs(self, experiences: Sequence[Experience], temperature: float) -> list[Experience]:
        """Fill in `old_logprobs` from the training engine."""
        values = await self.compute_logprobs(experiences, temperature)
        return [changed(e, old_logprobs=v) for e, v in zip(experiences, values, strict=True)]

    async def topk_ids(
        self, experiences: Sequence[Experience], temperature: float, objective: ObjectivePlan
    ) -> list[TargetRef]:
        """Return where the most likely tokens at every response token are."""
        wanted: dict[str, Any] = {"topk": objective.opd_topk, "vocab_size": objective.opd_vocab_size}
        held = await gathered_and_held(self.group, experiences, temperature, routed=True, kept=("topk_ids",), **wanted)
        return [ids for _, ids in held]

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
        """Run all updates of step `step` of the run.

        Returns the experiences with `old_logprobs` filled in (where they were not, the update computed them on its
        way), and `actor/*` metrics.
        """
        learned = list(experiences)
        updates = []
        size = self.plan.mini_batch_sequences
        self.updates.begin(objective.ppo_epochs * -(-len(learned) // size))
        for _ in range(objective.ppo_epochs):
            for start in range(0, len(learned), size):
                batch = learned[start : start + size]
                shards = self._shards(batch, teachers, objective)
                update, logprobs = await self._update("update", shards, objective, temperature, step)
                updates.append(update)
                for number, values in logprobs.items():
                    if batch[number].old_logprobs is None:
                        learned[start + number] = changed(batch[number], old_logprobs=values)
                self._check_applied(update, learned[start : start + size])
        return learned, _actor_metrics(updates)

    def _shards(
        self, experiences: Sequence[Experience], teachers: Sequence[TeacherPlan], objective: ObjectivePlan
    ) -> ShardedBatch[Sample]:
        """Return a mini-batch with the columns that the loss reads, in shards for the data-parallel ranks."""
        samples = loss_columns(experiences, teachers, objective)
        has_targets = objective.opd_objective != "sampled"
        return shard_batch(
            samples,
            self._assigned(samples, group_size=2 if objective.paired else 1),
            [(e.routes is None, *e.teacher_targets) for e in experiences],
            Sample.empty,
            held=[as_sent(e.teacher_targets) for e in experiences] if has_targets else (),
        )


def _actor_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Return metrics of a step's updates: means over tokens or updates."""
    tokens = total(updates, "tokens") or 1.0
    reported = {name for update in updates for rank in update for name in rank.sums}
    optional = {
        "actor/opd_loss": "opd_loss",
        "actor/entropy": "entropy",
        "actor/demonstration_loss": "demonstration_loss",
        "actor/demonstration_tokens": "demonstration_tokens",
    }
    return {
        **{metric: total(updates, name) / len(updates) for metric, name in optional.items() if name in reported},
        **_router_metrics(updates, reported),
        "actor/pg_loss": total(updates, "policy_loss") / len(updates),
        "actor/total_loss": total(updates, "weighted_loss") / len(updates),
        "actor/ratio_mean": total(updates, "ratio") / tokens,
        "actor/clipfrac": total(updates, "clipped") / tokens,
        "actor/approx_kl": total(updates, "approx_kl") / tokens,
        "actor/kl_loss": total(updates, "kl_loss") / len(updates),
        **optimizer_metrics(updates),
    }


def _router_metrics(updates: Sequence[Update], reported: set[str]) -> dict[str, float]:
    """Return metrics of routers: how often they would choose otherwise than the engine, and their own losses."""
    parts = {"router/rerouted_tokens": "routed_tokens", "router/rerouted_choices": "routed_choices"}
    shards = {
        name: total(updates, name.removeprefix("router/")) / (total(updates, of) or 1.0)
        for name, of in parts.items()
        if of in reported
    }
    losses = [name for name in ROUTER_LOSSES if name in reported]
    return shards | {f"router/{name}": total(updates, name) / len(updates) for name in losses}


@dataclass(frozen=True)
class FrozenModels:
    """The frozen models of a run: each teacher reads the samples of its tags, the reference policy reads all.

    Where `targets_for` is an objective, teachers give more than the log-probs of the sampled tokens; where `student` is
    there, they give it for the student's most likely tokens.
    """

    teachers: Sequence[Teacher] = ()
    reference: FrozenModel | None = None
    targets_for: ObjectivePlan | None = None
    student: Student | None = None

    async def compute_logprobs(self, experiences: Sequence[Experience], temperature: float) -> list[Experience]:
        """Fill in what every model has to say of its samples; all models work side by side.

        RunError for a sample whose tag no teacher accepts, where there are teachers.
        """
        result = list(experiences)
        ids = None
        if self.student and self.targets_for:
            ids = await self.student.topk_ids(experiences, temperature, self.targets_for)

        async def ask_teacher(teacher: Teacher) -> None:
            name = teacher.plan.name
            # a workflow may have brought a teacher's log-probs
            routed = [
                n for n, e in enumerate(experiences) if teacher.plan.accepts(e.tag) and name not in e.teacher_logprobs
            ]
            if not routed:
                return
            samples = [as_read_by(name, experiences[n]) for n in routed]
            computed: list[tuple[np.ndarray, TargetRef | None]]
            if self.targets_for is None:
                computed = [(logprobs, None) for logprobs in await teacher.compute_logprobs(samples, temperature)]
            else:
                own_ids = None if ids is None else [ids[n] for n in routed]
                computed = [*await teacher.compute_targets(samples, temperature, self.targets_for, own_ids)]
            for n, (logprobs, targets) in zip(routed, computed, strict=True):
                all_logprobs = {**result[n].teacher_logprobs, name: logprobs}
                all_targets = {**result[n].teacher_targets, **({name: targets} if targets else {})}
                result[n] = changed(result[n], teacher_logprobs=all_logprobs, teacher_targets=all_targets)

        async def ask_reference(reference: FrozenModel) -> None:
            for n, logprobs in enumerate(await reference.compute_logprobs(experiences, temperature)):
                result[n] = changed(result[n], ref_logprobs=logprobs)

        asked = [ask_teacher(teacher) for teacher in self.teachers]
        if self.reference:
            asked.append(ask_reference(self.reference))
        await asyncio.gather(*asked)
        unread = sorted({e.tag for e in result if not e.teacher_logprobs}) if self.teachers else []
        if unread:
            raise RunError(f"no teacher scores samples tagged {', '.join(unread)}: add the tag to a tag_included")
        return [self._in_order(e) for e in result] if len(self.teachers) > 1 else result

    def _in_order(self, experience: Experience) -> Experience:
        """Have the teachers' answers in the teachers' order, and not in that of their coming: they are summed in it."""
        names = [teacher.plan.name for teacher in self.teachers]
        logprobs, targets = experience.teacher_logprobs, experience.teacher_targets
        return changed(
            experience,
            teacher_logprobs={name: logprobs[name] for name in names if name in logprobs},
            teacher_targets={name: targets[name] for name in names if name in targets},
        )
