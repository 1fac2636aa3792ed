"""Ranks of models, each a Ray actor: a frozen model (a teacher or reference policy), and the base class of all ranks.

`Learner` is the driver's part of a trained model: it makes updates, counts skipped updates and writes checkpoints. The
driver's clients of frozen models are `teachers.megatron_teacher.MegatronScorer` and `Follower`.

Megatron is imported inside methods, so only the processes of the actors import it. The driver's machine does not need
Megatron.
"""

import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray

from roll_opd.base.failures import SkippedUpdates
from roll_opd.config.plan import FollowingPlan, MegatronPlan, TrainPlan
from roll_opd.models.device_phases import NOTHING, STATE, WEIGHTS, Kind, Part, Phase, needs
from roll_opd.samples.micro_batches import Assignment, DPShard, Packing, ShardedBatch, TrainResult
from roll_opd.samples.transport import Compact
from roll_opd.samples.weight_bucket import Description, map_bucket
from roll_opd.tracking.console import Count
from roll_opd.tracking.update_metrics import Update
from roll_opd.weight_sync.bucket_writer import BucketHost
from roll_opd.workers.actor_group import WorkerGroup, actor
from roll_opd.workers.liveness import beat_in_thread
from roll_opd.workers.target_refs import bundled, bundles_of, opened
from roll_opd.workers.worker_progress import MicroBatches, Writing

_WRITER = ThreadPoolExecutor(1, "checkpoint")


class Rank(BucketHost):
    """Base class of all ranks. It has the process group, the engine, log-probs, offloading and background saves."""

    _engine: Any
    _async_save: bool
    _files: Future[list[Path]]  # files of the current save
    _listening: socket.socket | None = None  # on rank 0: keeps the port from being taken by other processes
    _store: Any = None  # rendezvous of the process group, on rank 0

    @needs(NOTHING)
    def address(self) -> tuple[str, int]:
        """Open a port for the process group's rendezvous; return this node's address and the port."""
        self._listening = socket.create_server(("", 0), backlog=1024)
        return ray.util.get_node_ip_address(), self._listening.getsockname()[1]

    @needs(NOTHING)
    def setup(
        self,
        *,
        master_addr: str,
        master_port: int,
        plan: MegatronPlan,
        seed: int,
        deterministic: bool,
        async_save: bool = False,
    ) -> tuple[int, Packing]:
        """Join the process group and load the model; return (data-parallel rank, packing rules).

        Args:
            async_save: whether saves run in the background.
        """
        self._async_save = async_save
        os.environ |= {"MASTER_ADDR": master_addr, "MASTER_PORT": str(master_port)}
        # As under torchrun, the process group does not open the port: rank 0 holds it, so that no other run takes it.
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
        beat_in_thread()
        return self._engine.data_parallel_rank, self._engine.packing

    def _build(self, plan: MegatronPlan, seed: int, deterministic: bool) -> Any:
        from roll_opd.megatron.engine import MegatronEngine

        return MegatronEngine(plan, seed=seed, deterministic=deterministic)

    @needs(NOTHING)
    def offload(self, parts: Sequence[Part], phase: Phase) -> None:
        """Release the device memory of `parts` during `phase`, so that other roles can use it."""
        self._engine.offload(parts, phase)

    @needs(NOTHING)
    def onload(self, parts: Sequence[Part]) -> None:
        """Restore offloaded parts on the device."""
        self._engine.memory.onload(parts)

    @needs(WEIGHTS)
    def compute_logprobs(self, shard: DPShard, temperature: float) -> Compact:
        """See `MegatronEngine.compute_logprobs`."""
        return Compact(self._engine.compute_logprobs(temperature=temperature, **_read(shard)))

    @needs(WEIGHTS)
    def compute_targets(self, shard: DPShard, temperature: float, **wanted: Any) -> Compact:
        """Return the result of `MegatronEngine.compute_targets`.

        If the shard has references to the student's top-k ids, the ids are read from the object store.
        """
        return Compact(self._targets(shard, temperature, wanted))

    @needs(WEIGHTS)
    def hold_targets(self, shard: DPShard, temperature: float, kept: Sequence[str] | None = None, **wanted: Any) -> Any:
        """Compute targets; return a description of them, followed by the arrays of each of the shard's bundles.

        The description is None if this rank has no targets. Otherwise, it is a pair of dicts with sample numbers as
        keys. A value of the first dict is (log-probs, mask). The mask is True where the sampled token is in the top-k;
        without a top-k, the mask is None. A value of the second dict has the columns of the sample's arrays.

        Args:
            kept: names of the arrays to return; None: all arrays except the log-probs.
        """
        computed, bundles = (
            self._targets(shard, temperature, wanted),
            bundles_of([one.response_length for one in shard.samples]),
        )
        if computed is None:
            return None, *[None for _ in bundles]
        small = {}
        for number, values in computed.items():
            ids = values.get("topk_ids")
            hits = None if ids is None else (ids == shard.samples[number].response_tokens[:, None]).any(1)
            small[number] = values.pop("logprobs"), hits
        if kept:
            computed = {number: {name: values[name] for name in kept} for number, values in computed.items()}
        columns, objects = bundled(computed, bundles)
        return Compact((small, columns)), *objects

    def _opened(self, shard: DPShard) -> list[dict[str, dict[str, np.ndarray]]]:
        """Fetch the arrays that the shard's references point to, for the samples of this rank.

        Only the last pipeline stage needs these arrays. On other stages, the arrays are empty.
        """
        return opened(shard.held, shard.micro_batches if self._engine.is_last_stage else [])

    def _targets(self, shard: DPShard, temperature: float, wanted: dict[str, Any]) -> Any:
        from roll_opd.megatron.engine import TargetRequest

        if shard.held:
            wanted = {**wanted, "ids": [held["ids"]["topk_ids"] for held in self._opened(shard)]}
        if "moments" in wanted:
            wanted = {**wanted, "tested": [sample.columns for sample in shard.samples]}
        request = TargetRequest(**wanted)
        return self._engine.compute_targets(temperature=temperature, request=request, **_read(shard))

    @needs(NOTHING)
    def written(self, *, wait: bool) -> list[Path] | None:
        """Return the files of the last save.

        If the save is still running, return None. If `wait` is true, wait for the end of the save instead.
        """
        return self._files.result() if wait or self._files.done() else None

    def _write(self, *parts: Callable[[], list[Path]]) -> None:
        """Write the `parts` of a save.

        If `async_save` is set, the writes run in the background. Otherwise they finish before this method returns.
        """
        if self._async_save:
            self._files = _WRITER.submit(_all_files, parts)
        else:
            self._files = Future()
            self._files.set_result(_all_files(parts))

    @needs(WEIGHTS)
    def output_head(self) -> list[ray.ObjectRef] | None:
        """Return a list with a reference to the full output embedding on one rank, and None on all other ranks."""
        head = self._engine.output_head()
        return None if head is None else [ray.put(head)]


@actor(Kind.FROZEN)
class LogprobWorker(Rank):
    """Rank of a frozen model: a teacher or reference policy."""


@actor(Kind.FOLLOWER)
class FollowingWorker(Rank):
    """Rank of a teacher whose weights are an EMA or a copy of the student's weights (`follows_student`)."""

    def _build(self, plan: MegatronPlan, seed: int, deterministic: bool) -> Any:
        from roll_opd.megatron.ema_teacher_engine import MegatronFollower

        assert isinstance(plan, FollowingPlan)
        return MegatronFollower(plan, seed=seed, deterministic=deterministic)

    @needs(WEIGHTS)
    def load_weights(self, bucket: Description, *, last: bool) -> None:
        """Load a bucket of the student's weights; see `MegatronFollower.follow`."""
        _, weights = map_bucket(bucket["path"], bucket["size"], bucket["stacks"])
        self._engine.follow(dict(weights), last=last)

    @needs(NOTHING)
    def hold_bucket(self, content: Sequence[ray.ObjectRef], bucket: Description) -> Description:
        """Copy a bucket into this host's shared memory; return the description of the copy."""
        return self.hold(ray.get(content[0]), bucket)

    @needs(WEIGHTS)
    def save(self, directory: Path) -> None:
        """Save the weights in `directory`. Call `written` to get the list of files."""
        self._write(self._engine.save(directory, later=self._async_save))

    @needs(WEIGHTS)
    def load(self, directory: Path) -> None:
        """Load a saved state."""
        self._engine.load(directory)


def sequences_of(shard: DPShard) -> list[tuple[np.ndarray, int]]:
    return [(sample.tokens, sample.prompt_length) for sample in shard.samples]


def _read(shard: DPShard) -> dict[str, Any]:
    """Return the arguments of a forward pass for a shard.

    `routes` is included only if at least one sample has routes.
    """
    routes = [sample.routes for sample in shard.samples]
    arguments = {"sequences": sequences_of(shard), "assigned": shard.micro_batches}
    return arguments if all(taken is None for taken in routes) else {**arguments, "routes": routes}


def _all_files(parts: Sequence[Callable[[], list[Path]]]) -> list[Path]:
    return [file for part in parts for file in part()]


SKIPS_ALLOWED = 3  # consecutive updates without a finite loss and gradient


@dataclass
class Learner:
    """A trained model; subclasses prepare the samples."""

    plan: TrainPlan
    group: WorkerGroup
    updates: Count = field(init=False)  # counter of a step's updates
    _skipped: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.updates = Count(f"updates of {self.plan.name}")

    async def save(self, directory: Path) -> Writing:
        """Write the training state and a Hugging Face model into a directory.

        With `async_save`, they are written in the background.
        """
        (directory / "state").mkdir(parents=True, exist_ok=True)
        await self.group.call("save", directory)
        return Writing([self.group])

    async def load(self, directory: Path) -> None:
        """Restore the state that `save` wrote."""
        await self.group.call("load", directory)

    def end(self) -> None:
        """End the processes."""
        self.group.end()

    def _assigned(self, samples: Sequence[Any], group_size: int = 1) -> Assignment:
        """Return the assignment of samples to micro-batches.

        For each data-parallel rank, the assignment lists the rank's micro-batches. A micro-batch is a list of sample
        numbers.
        """
        sequences = [(sample.tokens, sample.prompt_length) for sample in samples]
        return self.group.packing.assign(sequences, self.plan.train_limits, group_size)

    def _counted(
        self, sharded: ShardedBatch, results: Sequence[tuple[int, TrainResult]]
    ) -> tuple[list[TrainResult], dict[int, dict[str, np.ndarray]]]:
        """Count an update. Return (results, columns): the new columns of each sample by its number.

        Args:
            results: (data-parallel rank, result) of each rank.
        """
        self.updates.one()
        return [result for _, result in results], sharded.merged((rank, result.columns) for rank, result in results)

    def _check_applied(self, update: Update, samples: Sequence[Any]) -> None:
        """Count the consecutive skipped updates; raise SkippedUpdates after `SKIPS_ALLOWED` of them.

        Args:
            samples: samples of the update, which the exception contains.
        """
        self._skipped = 0 if update[0].applied else self._skipped + 1
        if self._skipped >= SKIPS_ALLOWED:
            raise SkippedUpdates(
                f"{self._skipped} consecutive updates of {self.plan.name} were skipped, because their log-probs, loss"
                " or gradient were not finite; they did not change its weights. Lower its learning_rate, or look for"
                " values that are not finite in the samples of the last update",
                samples,
            )


class TrainableRank(Rank):
    """Base class of the ranks of trainable models. It saves and loads the training state."""

    @needs(STATE)
    def save(self, directory: Path) -> None:
        """Save the training state in state/, the model in hf/, and a LoRA adapter in adapter/.

        Call `written` to get the list of files.
        """
        from roll_opd.megatron.export import save_adapter
        from roll_opd.megatron.training_state import save_state

        later = self._async_save
        parts = [save_state(self._engine, directory / "state", later=later), self._save_hf(directory / "hf", later)]
        if self._engine.adapters:
            parts.append(save_adapter(self._engine, directory / "adapter", later=later))
        self._write(*parts)

    @needs(STATE)
    def load(self, directory: Path) -> None:
        """Load a saved state."""
        from roll_opd.megatron.training_state import load_state

        load_state(self._engine, directory / "state")

    def _save_hf(self, directory: Path, later: bool) -> Callable[[], list[Path]]:
        from roll_opd.megatron.export import save_hf

        return save_hf(self._engine, directory, later=later)
