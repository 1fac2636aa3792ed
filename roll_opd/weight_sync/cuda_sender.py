"""Send the student's weights from GPU to GPU with vLLM's senders. This code runs on every rank of the student.

A sender reads the weights from a `WeightSource`, announces them to the engines, and packs them into buffers. Importing
this module imports vLLM.
"""

import math
import pickle
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import ray
import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from roll_opd.inference.plugin import CUDA_IPC
from roll_opd.megatron.weights.sync_plan import Receivers, Stack, SyncPlan, unstacked
from roll_opd.models.engine_options import DTYPE_NAMES
from roll_opd.samples.weight_bucket import DTYPES, entry_of

BUFFER_BYTES = 256 * 2**20  # GPU memory of a buffer; with NCCL, sender and receiver have two buffers each


class CudaSender:
    """Sends the student's weights to all engines. All methods are collective over the student's ranks."""

    def __init__(
        self,
        backend: str,
        engine: Any,
        plan: SyncPlan,
        engines: Sequence[ray.actor.ActorHandle],
        engine_ranks: int,
        dtype: str,
    ) -> None:
        """Connect this rank of the student to the engines.

        Args:
            backend: CUDA IPC or NCCL (see `choose_transport.choose_backend`).
            engine: training engine of the student.
            plan: plan of the student's weights.
            engines: handles of the `RolloutWorker` actors.
            engine_ranks: number of devices per inference engine.
            dtype: dtype of the model in the inference engines.
        """
        uses_ipc = backend == CUDA_IPC
        receivers = Receivers.ALL if uses_ipc else Receivers.FIRST
        source = StudentSource(engine, plan, DTYPES[DTYPE_NAMES[dtype]], receivers)
        self._bytes = sum(map(nbytes, source.metadata()))
        self._engines = WeightSyncClient(engines, engine_ranks, source, sends_handles=uses_ipc)
        info: TrainerInitInfo
        if uses_ipc:
            info = IPCTrainerInitInfo(
                rank=dist.get_rank(), packed=True, packed_buffer_size_bytes=buffer_size(source.metadata())
            )
        else:
            with socket.socket() as probe:  # only rank 0's port is used
                probe.bind(("", 0))
                port = probe.getsockname()[1]
            info = NCCLTrainerInitInfo(
                rank=dist.get_rank(),
                master_address=ray.util.get_node_ip_address(),
                master_port=port,
                world_size=1 + len(engines) * engine_ranks,
                packed_buffer_size_bytes=BUFFER_BYTES,
            )
        self._sender: Any = WeightTransferTrainerFactory.trainer_init(info, client=self._engines, source=source)

    def send(self, version: int) -> int:
        """Replace all weights of the engines. Collective. Return the bytes of the weights.

        `version` is the number of the new weights.
        """
        self._engines.version = version
        torch.accelerator.synchronize()  # the senders read the optimizer's results in other CUDA streams
        self._sender.send_weights()
        return self._bytes


class StudentSource(WeightSource):
    """The student's full weights with Hugging Face names, on all ranks that receive them."""

    def __init__(self, engine: Any, plan: SyncPlan, model_dtype: torch.dtype, receivers: Receivers) -> None:
        self._engine, self._plan, self._model_dtype, self._receivers = engine, plan, model_dtype, receivers
        self.entries: list[dict[str, Any]] = []  # entries of the last update, on rank 0

    def metadata(self) -> list[ParamMeta]:
        """Return the names, dtypes and shapes of all weights, in the order of sending; equal on all ranks."""
        return [ParamMeta(full.name, full.dtype, full.shape) for group in self._plan.groups for full in group]

    def held_names(self) -> Collection[str] | None:
        """Return the names of the weights of this rank's stage and experts; None if each weight goes to each reader."""
        return self._plan.held_names() if self._receivers is Receivers.STAGE else None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) for each weight. Collective: every rank must iterate to the end."""
        self._begin()
        for stack in self._plan.stacks(self._receivers):
            self._record([stack])
            tensors: Iterator[Any] = unstacked(stack)
            yield from tensors

    def iter_groups(self) -> Iterator[tuple[list[str], list[Tensor]]]:
        """Yield the weights of one layer after the other, as (names, full tensors). Collective like `__iter__`."""
        self._begin()
        for stacks in self._plan.batches(self._receivers):
            self._record(stacks)
            tensors: list[Any] = [tensor for stack in stacks for _, tensor in unstacked(stack)]
            yield [name for names, _ in stacks for name in names], tensors

    def _begin(self) -> None:
        self.entries = []
        self._engine.wait_for_weights()

    def _record(self, stacks: Iterable[Stack]) -> None:
        if dist.get_rank() == 0:
            for names, tensors in stacks:
                self.entries += [] if tensors is None else [entry_of(names, tensors, self._model_dtype)]


class SentWeights(Protocol):
    """A source of weights that describes the tensors of its last iteration."""

    entries: list[dict[str, Any]]


class WeightSyncClient:
    """Client through which vLLM's senders call all engines (`VLLMWeightSyncClient`). Only rank 0 calls it."""

    def __init__(
        self, actors: Sequence[ray.actor.ActorHandle], ranks: int, source: SentWeights, *, sends_handles: bool
    ) -> None:
        """Create a client.

        Args:
            actors: handles of the `RolloutWorker` actors, one per engine.
            ranks: number of devices per engine.
            source: source of the sent weights.
            sends_handles: whether the messages contain CUDA IPC handles.
        """
        self.version = 0
        self._actors, self._ranks, self._source, self._sends_handles = actors, ranks, source, sends_handles

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect the engines to the sender."""
        ray.get(
            [
                actor.init_weight_transfer.remote(init_info_of(init_info, number, self._ranks))
                for number, actor in enumerate(self._actors)
            ]
        )

    def start_weight_update(self) -> None:
        """Start an update in all engines.

        See `WeightUpdates.begin` for what happens to running requests.
        """
        ray.get([actor.begin_update.remote(self.version) for actor in self._actors])

    def update_weights(self, update_info: Any) -> None:
        """Load one message of weights into all engines. Return after all engines have loaded it."""
        self._load(update_info, last=False)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Send the entries of all tensors to the engines. The engines then verify their weights and resume requests."""
        nothing: dict[str, list[Any]] = {"names": [], "dtype_names": [], "shapes": []}
        self._load({**nothing, "entries": self._source.entries, "version": self.version}, last=True)

    def _load(self, info: Mapping[str, Any], *, last: bool) -> None:
        portable = ray.put(self._portable(info))
        ray.get([actor.load_weights.remote(portable, last=last) for actor in self._actors])

    def _portable(self, info: Mapping[str, Any]) -> dict[str, Any]:
        if not self._sends_handles:
            return dict(info)
        rest = {key: value for key, value in info.items() if key != "ipc_handles"}
        return rest | {"handles": pickle.dumps(info.get("ipc_handles", {}))}


def init_info_of(init_info: Mapping[str, Any], number: int, ranks: int) -> dict[str, Any]:
    """Return the init info of one engine.

    In an NCCL group, the ranks of an engine follow the ranks of all engines with lower numbers.

    Args:
        init_info: init info from vLLM's sender. Its `rank_offset`, if present, is that of the first engine.
        number: index of the engine.
        ranks: number of ranks per engine.
    """
    offset = {"rank_offset": init_info["rank_offset"] + number * ranks} if "rank_offset" in init_info else {}
    return {**init_info, **offset}


def nbytes(meta: ParamMeta) -> int:
    """Return the size of a weight in bytes."""
    return math.prod(meta.shape) * meta.dtype.itemsize


def buffer_size(metadata: Sequence[ParamMeta]) -> int:
    """Return the size of a buffer in bytes: `BUFFER_BYTES` or the size of the largest tensor, whichever is larger."""
    return max(BUFFER_BYTES, *map(nbytes, metadata))
