"""Ray actors around the Megatron engines, one rank each, and what the student's ranks make of experiences.

Megatron is imported inside the methods, for it belongs into the actors' processes: the driver, which imports this
module to start them, may be a machine without it.
"""

import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ray

from roll_opd.algorithms.sample_masks import sample_weights
from roll_opd.cluster.progress import MicroBatches
from roll_opd.config.plan import CriticPlan, FollowingPlan, MegatronPlan, ObjectivePlan, TeacherPlan, TrainPlan
from roll_opd.data.compact import Compact
from roll_opd.data.experience import Experience
from roll_opd.data.training import TeacherTargets, TrainSample, ValueSample
from roll_opd.phases import Part, Phase

_WRITER = ThreadPoolExecutor(1, "checkpoint")


class _Rank:
    """What every rank of a Megatron role has."""

    _engine: Any
    _async_save: bool
    _files: Future[list[Path]]  # of what is being saved
    _listening: socket.socket | None = None  # of rank 0, from the moment that its port is named to the others
    _store: Any = None  # where the ranks of a process group meet; of rank 0

    def address(self) -> tuple[str, int]:
        """Return this node's address and the port at which rank 0's process group listens, which is taken at once."""
        self._listening = socket.create_server(("", 0), backlog=1024)
        return ray.util.get_node_ip_address(), self._listening.getsockname()[1]

    def setup(
        self,
        *,
        master_addr: str,
        master_port: int,
        plan: MegatronPlan,
        seed: int,
        deterministic: bool,
        async_save: bool = False,
    ) -> None:
        """Join the process group and load the model; with `async_save`, saving takes copies and goes on beside work."""
        self._async_save = async_save
        os.environ |= {"MASTER_ADDR": master_addr, "MASTER_PORT": str(master_port)}
        # as under torchrun, no rank opens the port: rank 0 has it, and no other run can take it in between
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        if self._listening is not None:
            from torch.distributed import TCPStore

            self._store = TCPStore(
                master_addr,
                master_port,
                len(plan.devices),
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=self._listening.detach(),
            )
        self._engine = self._build(plan, seed, deterministic)
        if os.environ["RANK"] == "0":
            self._engine.on_micro_batch = MicroBatches(plan.name)

    def _build(self, plan: MegatronPlan, seed: int, deterministic: bool) -> Any:
        from roll_opd.megatron.engine import MegatronEngine

        return MegatronEngine(plan, seed=seed, deterministic=deterministic)

    def give_back(self, parts: Sequence[Part], phase: Phase) -> None:
        """Leave the device to other roles in a phase."""
        self._engine.give_back(parts, phase)

    def take_back(self, parts: Sequence[Part]) -> None:
        """Have what `give_back` brought away on the device again."""
        self._engine.memory.take_back(parts)

    def compute_logprobs(
        self, sequences: Sequence[tuple[np.ndarray, int]], temperature: float, **routes: Any
    ) -> Compact:
        """Return what `MegatronEngine.compute_logprobs` does."""
        return Compact(self._engine.compute_logprobs(sequences, temperature, **routes))

    def compute_targets(
        self, sequences: Sequence[tuple[np.ndarray, int]], temperature: float, **wanted: Any
    ) -> Compact:
        """Return what `MegatronEngine.compute_targets` does."""
        return Compact(self._engine.compute_targets(sequences, temperature, **wanted))

    def written(self, *, wait: bool) -> list[Path] | None:
        """Return the files of what was saved last, once they are written; None where that would be to `wait` for."""
        return self._files.result() if wait or self._files.done() else None

    def _write(self, *parts: Callable[[], list[Path]]) -> None:
        """Write what saving has left to write: beside the work that follows, or now."""
        if self._async_save:
            self._files = _WRITER.submit(_all_files, parts)
        else:
            self._files = Future()
            self._files.set_result(_all_files(parts))

    def output_head(self) -> list[ray.ObjectRef] | None:
        """Return a reference to the whole output embedding from one rank; None elsewhere."""
        head = self._engine.output_head()
        return None if head is None else [ray.put(head)]


@ray.remote
class LogprobWorker(_Rank):
    """A rank of a frozen model."""


@ray.remote
class FollowingWorker(_Rank):
    """A rank of a teacher whose weights follow the student's."""

    def _build(self, plan: MegatronPlan, seed: int, deterministic: bool) -> Any:
        from roll_opd.megatron.follower import MegatronFollower

        assert isinstance(plan, FollowingPlan)
        return MegatronFollower(plan, seed=seed, deterministic=deterministic)

    def follow(self, buckets: Sequence[ray.ObjectRef]) -> None:
        """Do what `MegatronFollower.follow` does with what the student's `weights` returned."""
        weights: dict[str, Any] = {}
        for bucket in ray.get(list(buckets)):
            weights |= bucket.tensors()
        self._engine.follow(weights)

    def save(self, directory: Path) -> None:
        """Write the weights into `directory`; see `written`."""
        self._write(self._engine.save(directory, later=self._async_save))

    def load(self, directory: Path) -> None:
        """Put back what `save` wrote."""
        self._engine.load(directory)


class _LearningRank(_Rank):
    """What every rank of a model that learns has."""

    def save(self, directory: Path) -> None:
        """Write training state into `directory`/state, the Hugging Face model into /hf, an adapter into /adapter.

        See `written`.
        """
        from roll_opd.megatron.checkpoint import save_state
        from roll_opd.megatron.export import save_adapter

        later = self._async_save
        parts = [save_state(self._engine, directory / "state", later=later), self._save_hf(directory / "hf", later)]
        if self._engine.adapters:
            parts.append(save_adapter(self._engine, directory / "adapter", later=later))
        self._write(*parts)

    def load(self, directory: Path) -> None:
        """Put back what `save` wrote."""
        from roll_opd.megatron.checkpoint import load_state

        load_state(self._engine, directory / "state")

    def _save_hf(self, directory: Path, later: bool) -> Callable[[], list[Path]]:
        from roll_opd.megatron.export import save_hf

        return save_hf(self._engine, directory, later=later)


@ray.remote
class TrainWorker(_LearningRank):
    """A rank of the student that learns."""

    def _build(self, plan: MegatronPlan, seed: int, deterministic: bool) -> Any:
        from roll_opd.megatron.trainer import MegatronTrainer

        assert isinstance(plan, TrainPlan)
        return MegatronTrainer(plan, seed=seed, deterministic=deterministic)

    def update(
        self,
        experiences: Sequence[Experience],
        teachers: Sequence[TeacherPlan],
        objective: ObjectivePlan,
        temperature: float,
        step: int,
    ) -> Compact:
        """Make one optimizer update from one mini-batch; return what `MegatronTrainer.update` does."""
        samples = train_samples(experiences, teachers, objective)
        return Compact(self._engine.update(samples, objective, temperature, step))

    def load_teacher_head(self, name: str, head: Sequence[ray.ObjectRef]) -> None:
        """Take in what a teacher's `output_head` returned."""
        self._engine.load_teacher_head(name, ray.get(head[0]))

    def update_supervised(self, samples: Sequence[TrainSample], objective: ObjectivePlan) -> Compact:
        """Make one optimizer update from rows that brought their answers; return what `MegatronTrainer.update` does."""
        return Compact(self._engine.update(samples, objective, temperature=1.0))

    def without_adapter(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return what a method of a frozen model's rank does of the weights that a LoRA student began with."""
        with self._engine.adapters.disabled():
            return getattr(self, method)(*args, **kwargs)

    def weights(self) -> list[ray.ObjectRef] | None:
        """Return references to `WeightBucket`s, all weights under Hugging Face names, from rank 0; None elsewhere."""
        from roll_opd.megatron.export import weight_buckets

        references = [ray.put(bucket) for bucket in weight_buckets(self._engine)]
        return references or None


@ray.remote
class CriticWorker(_LearningRank):
    """A rank of the critic."""

    def _build(self, plan: MegatronPlan, seed: int, deterministic: bool) -> Any:
        from roll_opd.megatron.critic import MegatronCritic

        assert isinstance(plan, CriticPlan)
        return MegatronCritic(plan, seed=seed, deterministic=deterministic)

    def values(self, sequences: Sequence[tuple[np.ndarray, int]]) -> Compact:
        """Return what `MegatronCritic.values` does: of the states before every response token."""
        return Compact(self._engine.values(sequences))

    def update(self, samples: Sequence[ValueSample]) -> Compact:
        """Make one optimizer update from one mini-batch; return what `MegatronCritic.update` does."""
        return Compact(self._engine.update(samples))

    def _save_hf(self, directory: Path, later: bool) -> Callable[[], list[Path]]:
        from roll_opd.megatron.critic import save_critic_hf

        return save_critic_hf(self._engine, directory, later=later)


def _all_files(parts: Sequence[Callable[[], list[Path]]]) -> list[Path]:
    return [file for part in parts for file in part()]


def train_samples(
    experiences: Sequence[Experience], teachers: Sequence[TeacherPlan], objective: ObjectivePlan
) -> list[TrainSample]:
    """Return one `TrainSample` an experience.

    Where the teachers' part is an advantage, they are merged into two numbers a token (see algorithms.opd); where it is
    a part of the loss, each comes along with its targets, and the numbers are 0.
    """
    sampled = objective.opd_objective == "sampled"
    weights = _policy_weights(experiences, objective)
    coefficients = {teacher.name: teacher.opd_kl_coef for teacher in teachers}
    # a coefficient of 0 takes part: what is not finite then still shows, as 0 times it is NaN
    of_advantages = {name: np.float32(value if sampled else 0) for name, value in coefficients.items()}
    samples = []
    for experience, weight in zip(experiences, weights, strict=True):
        mask, by_teacher = experience.action_mask, experience.teacher_logprobs
        targets = {} if sampled else experience.teacher_targets
        total = np.float32(sum(of_advantages[name] for name in by_teacher))
        with np.errstate(invalid="ignore"):
            weighted = sum(
                (of_advantages[name] * logprobs for name, logprobs in by_teacher.items()),
                np.zeros(len(mask), np.float32),
            )
        samples.append(
            TrainSample(
                tokens=experience.tokens,
                prompt_length=experience.prompt_length,
                action_mask=mask if experience.loss_mask is None else experience.loss_mask,
                advantages=_advantages(experience),
                opd_coefficients=total * mask.astype(np.float32),
                # where, not a product: what lies under the mask may be infinite
                opd_teacher=np.where(mask, weighted, np.float32(0)).astype(np.float32),
                old_logprobs=experience.old_logprobs,
                ref_logprobs=experience.ref_logprobs,
                importance_weights=weight,
                reward=0.0 if experience.excluded else experience.reward,
                teachers={name: TeacherTargets(coefficients[name], arrays) for name, arrays in targets.items()},
                demonstration=experience.demonstration,
                actions=mask,
                routes=experience.routes,
            )
        )
    return samples


def _policy_weights(experiences: Sequence[Experience], objective: ObjectivePlan) -> list[np.ndarray | None]:
    """Return the weights of an update's policy loss, f32 [T-P]: a correction's, times those of whole samples."""
    if not (objective.difficulty_loss_weight or objective.length_loss_weight):
        return [experience.importance_weights for experience in experiences]
    own = [number for number, experience in enumerate(experiences) if not experience.demonstration]
    lengths = [int(experiences[number].action_mask.sum()) for number in own]
    difficulties = [experiences[number].difficulty for number in own] if objective.difficulty_loss_weight else None
    found = sample_weights(lengths, difficulties, by_length=objective.length_loss_weight)
    weights: list[np.ndarray | None] = [None] * len(experiences)
    for number, weight in zip(own, found, strict=True):
        corrected = experiences[number].importance_weights
        ones = np.ones(experiences[number].response_length, np.float32)
        weights[number] = np.float32(weight) * (ones if corrected is None else corrected)
    return weights


def _advantages(experience: Experience) -> np.ndarray:
    if experience.advantages is None:  # pure distillation, or a demonstration
        return np.zeros(experience.response_length, np.float32)
    return experience.advantages.astype(np.float32)
