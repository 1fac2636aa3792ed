"""The student, as the driver sees it: log-probs, top-k tokens, and the updates of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from roll_opd.config.plan import (
    EngineCheckPlan,
    MegatronPlan,
    ObjectivePlan,
    TeacherPlan,
    TrainPlan,
)
from roll_opd.models.device_phases import LEARNING, NOTHING, WEIGHTS, Kind, needs
from roll_opd.models.engine_options import DTYPE_NAMES
from roll_opd.objective.columns import loss_columns
from roll_opd.objective.corrections import check_staleness
from roll_opd.objective.engine_evidence import TESTED_SETTINGS, marked
from roll_opd.samples.micro_batches import DPShard, ShardedBatch, TrainResult, shard_batch
from roll_opd.samples.sample import Sample, TargetRef, changed, shard_sample, with_columns
from roll_opd.samples.transport import Compact
from roll_opd.samples.weight_bucket import DTYPES, BucketMemory
from roll_opd.tracking.update_metrics import Update, evidence_metrics, loss_metrics, optimizer_metrics
from roll_opd.weight_sync.bucket_writer import BucketWriter, Written
from roll_opd.workers.actor_group import Reference, actor, gathered, gathered_and_held
from roll_opd.workers.model_worker import Learner, TrainableRank
from roll_opd.workers.target_refs import with_targets


class Student(Learner):
    """The model that is trained."""

    async def compute_logprobs(self, samples: Sequence[Sample], temperature: float = 1.0) -> list[np.ndarray]:
        """Return the log-probs of each response under the current weights, as arrays f32 [T-P]."""
        return await gathered(self.group, "compute_logprobs", _routed(samples), temperature)

    async def compute_old_logprobs(self, samples: Sequence[Sample], temperature: float) -> list[Sample]:
        """Return the samples with `old_logprobs` set to log-probs from the training engine."""
        values = await self.compute_logprobs(samples, temperature)
        return with_columns(samples, old_logprobs=values)

    async def moments(self, samples: Sequence[Sample], temperature: float, plan: EngineCheckPlan) -> list[np.ndarray]:
        """Return the moments of the sampling distribution at each response token, f32 [T-P, X] for each sample.

        See `OutputHead.moments`. The samples have the columns of `engine_evidence.marked`.
        """
        sent = [
            changed(
                routed, columns={name: values for name, values in sample.columns.items() if name == TESTED_SETTINGS}
            )
            for sample, routed in zip(samples, _routed(samples), strict=True)
        ]
        found = await gathered(self.group, "compute_targets", sent, temperature, moments=plan)
        return [values["moments"] for values in found]

    async def topk_ids(
        self, samples: Sequence[Sample], temperature: float, objective: ObjectivePlan
    ) -> list[TargetRef]:
        """Return references to the student's top-k tokens at each response token."""
        wanted: dict[str, Any] = {"topk": objective.opd_topk, "vocab_size": objective.opd_vocab_size}
        held = await gathered_and_held(self.group, _routed(samples), temperature, kept=("topk_ids",), **wanted)
        return [ids for _, ids in held]

    async def load_teacher_head(self, teacher: str, head: list[Reference], logit_cap: float | None) -> None:
        """Load a teacher's output head on the student's ranks.

        The ranks use the head to compute the teacher's distributions from its hidden states.
        """
        await self.group.call("load_teacher_head", teacher, head, logit_cap)

    async def learn(
        self,
        samples: Sequence[Sample],
        teachers: Sequence[TeacherPlan],
        objective: ObjectivePlan,
        temperature: float,
        step: int,
    ) -> tuple[list[Sample], dict[str, float]]:
        """Make all optimizer updates of one training step.

        Returns (samples, metrics): the samples with `old_logprobs` and with the columns of `objective.opd_loss`, and
        the metrics `actor/*` and `rollout/engine/*`. If a sample had no `old_logprobs`, they are the log-probs that
        were computed during the update.
        """
        learned = list(samples)
        updates: list[Update] = []
        size = self.plan.mini_batch_sequences
        self.updates.begin(objective.ppo_epochs * -(-len(learned) // size))
        for _ in range(objective.ppo_epochs):
            for start in range(0, len(learned), size):
                batch = learned[start : start + size]
                check_staleness(batch, step - 1, len(updates), objective.max_age)
                read = batch
                if objective.engine_check and not updates:  # later updates have other weights than the samples
                    read = marked(batch, step - 1, objective.engine_check)
                shards = self._shards(read, teachers, objective)
                results = await self.group.scatter("update", shards, objective, temperature, step)
                update, columns = self._counted(shards, results)
                updates.append(update)
                learned[start : start + size] = _with_results(batch, columns)
                self._check_applied(update, learned[start : start + size])
        return learned, loss_metrics(updates) | optimizer_metrics(updates) | evidence_metrics(updates[0])

    async def forward_backward(
        self,
        samples: Sequence[Sample],
        teachers: Sequence[TeacherPlan],
        objective: ObjectivePlan,
        temperature: float,
        step: int,
    ) -> tuple[list[Sample], dict[str, float]]:
        """Accumulate the gradient of one mini-batch's loss.

        Returns (samples, metrics) as `learn` does, but without the optimizer's metrics.
        """
        check_staleness(samples, step - 1, 0, objective.max_age)
        read = marked(samples, step - 1, objective.engine_check) if objective.engine_check else samples
        shards = self._shards(read, teachers, objective)
        results = await self.group.scatter("forward_backward", shards, objective, temperature, step)
        update, columns = self._counted(shards, results)
        return _with_results(samples, columns), loss_metrics([update]) | evidence_metrics(update)

    async def optim_step(self, samples: Sequence[Sample], learning_rate: float | None) -> dict[str, float]:
        """Make one optimizer update from the accumulated gradients, and return the optimizer's metrics.

        Args:
            samples: the samples whose gradients were accumulated.
            learning_rate: learning rate of this update. If None, the scheduled learning rate is used.
        """
        update: Update = await self.group.call("optim_step", learning_rate)
        self._check_applied(update, samples)
        return optimizer_metrics([update])

    async def discard_gradient(self) -> None:
        """Discard the accumulated gradients."""
        await self.group.call("discard_gradient")

    def _shards(
        self, samples: Sequence[Sample], teachers: Sequence[TeacherPlan], objective: ObjectivePlan
    ) -> ShardedBatch:
        """Split a mini-batch into one shard for each data-parallel rank.

        The samples of a shard have the columns that the loss reads.
        """
        read = loss_columns(samples, teachers, objective)
        has_targets = objective.opd_objective != "sampled"
        return shard_batch(
            read,
            self._assigned(read, group_size=2 if objective.paired else 1),
            [_held(sample) for sample in samples] if has_targets else (),
        )


def _routed(samples: Sequence[Sample]) -> list[Sample]:
    return [shard_sample(sample, routed=True) for sample in samples]


def _held(sample: Sample) -> dict[str, TargetRef]:
    return {name: target.for_ranks() for name, target in sample.teacher_targets.items()}


def _with_results(samples: Sequence[Sample], columns: Mapping[int, Mapping[str, np.ndarray]]) -> list[Sample]:
    """Return the samples with the columns of an update. Samples that already have `old_logprobs` keep them.

    Args:
        columns: map from the index of a sample to its new columns.
    """
    kept = [{} if s.old_logprobs is None else {"old_logprobs": s.old_logprobs} for s in samples]
    return [sample.with_columns(**{**columns.get(number, {}), **kept[number]}) for number, sample in enumerate(samples)]


@actor(Kind.STUDENT)
class TrainWorker(TrainableRank, BucketWriter):
    """Rank of the student."""

    _sender: Any = None  # sends weights between GPUs

    def __init__(self) -> None:
        super().__init__()
        self._sync_plans: dict[bool, Any] = {}  # of the whole weights (False) and of the adapter (True)

    def _build(self, plan: MegatronPlan, seed: int, deterministic: bool) -> Any:
        from roll_opd.megatron.student_engine import MegatronTrainer

        assert isinstance(plan, TrainPlan)
        return MegatronTrainer(plan, seed=seed, deterministic=deterministic)

    @needs(LEARNING)
    def update(self, shard: DPShard, objective: ObjectivePlan, temperature: float, step: int) -> Compact:
        """Make one optimizer update from a mini-batch; see `MegatronTrainer.update`.

        The result contains log-probs only for demonstrations and for samples that have no old log-probs, and the
        advantages of all samples.
        """
        samples = self._with_targets(shard)
        result = self._engine.update(samples, objective, temperature, step, assigned=shard.micro_batches)
        return _with_new_columns(result, samples)

    @needs(LEARNING)
    def forward_backward(self, shard: DPShard, objective: ObjectivePlan, temperature: float, step: int) -> Compact:
        """Accumulate the gradient of a mini-batch; see `MegatronTrainer.forward_backward`.

        Returns what `update` returns.
        """
        samples = self._with_targets(shard)
        result = self._engine.forward_backward(samples, objective, temperature, step, assigned=shard.micro_batches)
        return _with_new_columns(result, samples)

    def _with_targets(self, shard: DPShard) -> Sequence[Sample]:
        return with_targets(shard.samples, self._opened(shard)) if shard.held else shard.samples

    @needs(LEARNING)
    def optim_step(self, learning_rate: float | None) -> Any:
        """Make one optimizer update from the accumulated gradients; see `MegatronTrainer.optim_step`."""
        return self._engine.optim_step(learning_rate)

    @needs(NOTHING)
    def discard_gradient(self) -> None:
        """See `MegatronLearner.discard_gradient`."""
        self._engine.discard_gradient()

    @needs(WEIGHTS)
    def load_teacher_head(self, name: str, head: Sequence[ray.ObjectRef], logit_cap: float | None) -> None:
        """Load a teacher's output embedding, and the cap of the teacher's logits.

        `head` is the list that the teacher's `output_head` returned.
        """
        self._engine.load_teacher_head(name, ray.get(head[0]), logit_cap)

    def _without_adapter(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of this rank with the LoRA adapters disabled; see `ActorGroup.without_adapter`.

        The method then computes with the initial weights of the student.
        """
        with self._engine.adapters.disabled():
            return getattr(self, method)(*args, **kwargs)

    @needs(WEIGHTS)
    def send_weights(
        self,
        backend: str,
        engines: Sequence[ray.actor.ActorHandle],
        engine_ranks: int,
        dtype: str,
        version: int,
        is_new: bool,
    ) -> int:
        """Send all weights to `engines` from GPU to GPU (see `cuda_sender` and `m2n_sender`). Return their bytes.

        `is_new` states that the engines are not those of the last call, so that a new connection is needed.
        """
        if self._sender is None or is_new:
            from roll_opd.inference.plugin import M2N

            given = self._engine, self._planned(), engines, engine_ranks, dtype
            if backend == M2N:
                from roll_opd.weight_sync.m2n_sender import M2NSender

                self._sender = M2NSender(*given)
            else:
                from roll_opd.weight_sync.cuda_sender import CudaSender

                self._sender = CudaSender(backend, *given)
        return self._sender.send(version)

    @needs(WEIGHTS)
    def begin_writing(self, memories: Sequence[BucketMemory], dtype: str, *, adapter: bool) -> Written:
        """See `BucketWriter.begin_writing`."""
        from roll_opd.megatron.export import weight_buckets

        return weight_buckets(self._engine, memories, DTYPES[DTYPE_NAMES[dtype]], plan=self._planned(adapter=adapter))

    def _planned(self, *, adapter: bool = False) -> Any:
        """Return the plan of this student's weights, or only of its adapter. The first call is collective."""
        from roll_opd.megatron.export import adapter_plan, sync_plan

        if adapter not in self._sync_plans:
            self._sync_plans[adapter] = (adapter_plan if adapter else sync_plan)(self._engine)
        return self._sync_plans[adapter]


def _with_new_columns(result: TrainResult, samples: Sequence[Sample]) -> Compact:
    """Return a result without the log-probs of samples that have old log-probs."""
    columns = {
        number: {name: array for name, array in found.items() if name != "old_logprobs" or _lacks_old(samples[number])}
        for number, found in result.columns.items()
    }
    return Compact(replace(result, columns=columns))


def _lacks_old(sample: Sample) -> bool:
    demonstration = sample.columns.get("demonstration")
    return "old_logprobs" not in sample.columns or (demonstration is not None and bool(demonstration.all()))
