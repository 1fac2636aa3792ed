"""Teachers that are Megatron roles of the run: frozen, EMA teachers, and copies of the student."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_opd.base.failures import RunError
from roll_opd.config.plan import FollowingPlan
from roll_opd.samples.sample import Sample
from roll_opd.teachers.teacher_interface import (
    EVERY_TARGET,
    LOGPROBS,
    Target,
    TeacherAnswer,
    TeacherScorer,
    TokenSequence,
    Wanted,
)
from roll_opd.teachers.teacher_registry import TeacherStart, register_teacher
from roll_opd.workers.actor_group import Reference, WorkerGroup, gathered, gathered_and_held
from roll_opd.workers.worker_progress import Writing


@dataclass(frozen=True)
class MegatronScorer:
    """A `TeacherScorer` that runs on the ranks of a Megatron role."""

    name: str
    group: WorkerGroup
    vocab_size: int
    targets: frozenset[Target] = EVERY_TARGET

    @property
    def is_exact(self) -> bool:
        return self.group.plan.model.dtype == "fp32"

    async def score(
        self, sequences: Sequence[TokenSequence], temperature: float, wanted: Wanted = LOGPROBS
    ) -> list[TeacherAnswer]:
        """Implement `TeacherScorer.score` with a forward pass over all sequences."""
        self._check_tokens(sequences)
        samples = [Sample(tokens, prompt_length) for tokens, prompt_length in sequences]
        if wanted.target is None:
            logprobs = await gathered(self.group, "compute_logprobs", samples, temperature)
            return [TeacherAnswer(one) for one in logprobs]
        options: dict[str, Any] = {"topk": wanted.topk, "hidden": wanted.hidden, "plain": wanted.plain}
        options = {"vocab_size": wanted.vocab_size, **{name: value for name, value in options.items() if value}}
        if wanted.fetched:
            arrays = await gathered(self.group, "compute_targets", samples, temperature, **options)
            return [TeacherAnswer(found["logprobs"], arrays=found) for found in arrays]
        held = [{"ids": ids} for ids in wanted.ids]
        kept = await gathered_and_held(self.group, samples, temperature, held, **options)
        return [TeacherAnswer(*one) for one in kept]

    async def output_head(self) -> list[Reference]:
        """Return references to the output embedding of all token ids."""
        return next(head for head in await self.group.call("output_head") if head)

    def drain_metrics(self) -> dict[str, float]:
        """Return no metrics. The run's clock measures the time of the ranks."""
        return {}

    def end(self) -> None:
        """End the processes."""
        self.group.end()

    def _check_tokens(self, sequences: Sequence[TokenSequence]) -> None:
        largest = max((int(tokens.max()) for tokens, _ in sequences), default=0)
        if largest >= self.vocab_size:
            raise RunError(
                f"token {largest} is outside {self.name}'s vocabulary of {self.vocab_size}: the student sampled a"
                " padding id that the teacher does not have; use a teacher with the same vocabulary"
            )
        scored = self.group.plan.vocab_size or self.vocab_size
        largest = max((int(tokens[prompt:].max(initial=0)) for tokens, prompt in sequences), default=0)
        if largest >= scored:
            raise RunError(
                f"token {largest} has no log-prob under {self.name}, whose log-probs are normalised over the {scored}"
                " token ids of the student; use a teacher with the same vocabulary"
            )


@register_teacher("megatron")
def megatron_scorer(start: TeacherStart) -> TeacherScorer:
    """Return the scorer of the teacher's Megatron role."""
    assert start.teacher.role
    return start.megatron(start.teacher.role)


@dataclass(frozen=True)
class Follower:
    """The processes of a teacher that follows the student: an EMA or a copy of the student (`follows_student`)."""

    plan: FollowingPlan
    group: WorkerGroup

    def is_due(self, step: int) -> bool:
        """Whether the teacher is updated from the student's weights after this step."""
        return step % self.plan.update_interval == 0

    async def save(self, directory: Path) -> Writing:
        """Write the weights to `directory`/NAME.

        For a live follower, nothing is written, because it has the student's weights.
        """
        if self.plan.is_live:
            return Writing([])
        await self.group.call("save", directory / self.plan.name)
        return Writing([self.group])

    async def load(self, directory: Path) -> None:
        """Restore the weights that `save` wrote.

        For a live follower, nothing is restored, because the weight sync sends it the student's weights.
        """
        if not self.plan.is_live:
            await self.group.call("load", directory / self.plan.name)
