"""Ray actors around the Megatron engines: one rank each. Import Megatron only inside, where the process is theirs."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from roll_opd.config.plan import CriticPlan, MegatronPlan, ObjectivePlan, TeacherPlan, TrainPlan
from roll_opd.data.compact import Compact
from roll_opd.data.experience import Experience
from roll_opd.data.training import TrainSample, ValueSample
from roll_opd.workers.samples import train_samples


class _Rank:
    """What every rank of a Megatron role has."""

    _engine: Any

    def address(self) -> tuple[str, int]:
        """This node's address and a free port: where rank 0's process group will listen."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def setup(self, *, master_addr: str, master_port: int, plan: MegatronPlan, seed: int, deterministic: bool) -> None:
        """Join the process group and load the model."""
        os.environ |= {"MASTER_ADDR": master_addr, "MASTER_PORT": str(master_port)}
        self._engine = self._build(plan, seed, deterministic)

    def _build(self, plan: MegatronPlan, seed: int, deterministic: bool) -> Any:
        from roll_opd.megatron.engine import MegatronEngine

        return MegatronEngine(plan, seed=seed, deterministic=deterministic)

    def logprobs(self, sequences: Sequence[tuple[np.ndarray, int]], temperature: float) -> Compact:
        """Log-probs of every response token; see `MegatronEngine.compute_logprobs`, whose answer it is."""
        return Compact(self._engine.compute_logprobs(sequences, temperature))

    def score(self, sequences: Sequence[tuple[np.ndarray, int]], temperature: float, **wanted: Any) -> Compact:
        """Log-probs and what else is `wanted`; see `MegatronEngine.compute_targets`, whose answer it is."""
        return Compact(self._engine.compute_targets(sequences, temperature, **wanted))

    def output_head(self) -> list[ray.ObjectRef] | None:
        """A reference to the whole output embedding from one rank; None elsewhere."""
        head = self._engine.output_head()
        return None if head is None else [ray.put(head)]


@ray.remote
class LogprobWorker(_Rank):
    """A rank of a frozen model."""


@ray.remote
class TrainWorker(_Rank):
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
        """One optimizer update from one mini-batch; see `MegatronTrainer.update`, whose answer it is."""
        samples = train_samples(experiences, teachers, objective)
        return Compact(self._engine.update(samples, objective, temperature, step))

    def load_teacher_head(self, name: str, head: Sequence[ray.ObjectRef]) -> None:
        """Take in what a teacher's `output_head` gave."""
        self._engine.load_teacher_head(name, ray.get(head[0]))

    def fit(self, samples: Sequence[TrainSample], objective: ObjectivePlan) -> Compact:
        """One optimizer update from rows that brought their answers; see `MegatronTrainer.update`."""
        return Compact(self._engine.update(samples, objective, temperature=1.0))

    def weights(self) -> list[ray.ObjectRef] | None:
        """All weights under Hugging Face names, as references to `WeightBucket`s, from rank 0; None elsewhere."""
        from roll_opd.megatron.export import weight_buckets

        references = [ray.put(bucket) for bucket in weight_buckets(self._engine)]
        return references or None

    def save(self, directory: Path) -> None:
        """Write training state into `directory`/state and the Hugging Face model into `directory`/hf."""
        from roll_opd.megatron.checkpoint import save_state
        from roll_opd.megatron.export import save_hf

        save_state(self._engine, directory / "state")
        save_hf(self._engine, directory / "hf")

    def load(self, directory: Path) -> None:
        """Put back what `save` wrote."""
        from roll_opd.megatron.checkpoint import load_state

        load_state(self._engine, directory / "state")


@ray.remote
class CriticWorker(_Rank):
    """A rank of the critic."""

    def _build(self, plan: MegatronPlan, seed: int, deterministic: bool) -> Any:
        from roll_opd.megatron.critic import MegatronCritic

        assert isinstance(plan, CriticPlan)
        return MegatronCritic(plan, seed=seed, deterministic=deterministic)

    def values(self, sequences: Sequence[tuple[np.ndarray, int]]) -> Compact:
        """Values of the states before every response token; see `MegatronCritic.values`, whose answer it is."""
        return Compact(self._engine.values(sequences))

    def update(self, samples: Sequence[ValueSample]) -> Compact:
        """One optimizer update from one mini-batch; see `MegatronCritic.update`, whose answer it is."""
        return Compact(self._engine.update(samples))

    def save(self, directory: Path) -> None:
        """Write training state into `directory`/state and the Hugging Face model into `directory`/hf."""
        from roll_opd.megatron.checkpoint import save_state
        from roll_opd.megatron.critic import save_critic_hf

        save_state(self._engine, directory / "state")
        save_critic_hf(self._engine, directory / "hf")

    def load(self, directory: Path) -> None:
        """Put back what `save` wrote."""
        from roll_opd.megatron.checkpoint import load_state

        load_state(self._engine, directory / "state")
