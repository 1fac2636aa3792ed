"""Send each rank's parts of the student's weights with vLLM's `nccl_m2n` transfer. It runs on every student rank.

Not run yet: it needs a GPU for each rank, and the package nccl-extensions. vLLM's sender knows one mesh with a replica
axis and a split axis. A pipeline stage is such a mesh, and so are the ranks of one expert rank of a stage; each of them
is a sender with a separate NCCL group, and they send one after the other. Tensors whose parts vLLM cannot place are
gathered within the sender: padded or fused rows, and the embedding and head, whose rows the engines verify.
"""

import socket
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.m2n_common import MAX_TENSOR_DIMS, REPLICATE, M2NMesh, M2NParamMeta, Placements
from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource
from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo

from roll_opd.megatron.weights.sync_plan import FullTensor, Owner, Seat, SyncPlan
from roll_opd.models.engine_options import DTYPE_NAMES
from roll_opd.models.weight_files import EMBEDDING, HEAD
from roll_opd.samples.weight_bucket import DTYPES, entry_of
from roll_opd.weight_sync.cuda_sender import WeightSyncClient, nbytes


class M2NSender:
    """Sends the student's weights to all engines. All methods are collective over the student's ranks."""

    def __init__(
        self, engine: Any, plan: SyncPlan, engines: Sequence[ray.actor.ActorHandle], engine_ranks: int, dtype: str
    ) -> None:
        """Connect this rank of the student to the engines, once for each owner of tensors.

        Args:
            engine: training engine of the student.
            plan: plan of the student's weights.
            engines: handles of the `RolloutWorker` actors.
            engine_ranks: number of devices per inference engine.
            dtype: dtype of the model in the inference engines.
        """
        self._engine = engine
        self._bytes = sum(nbytes(ParamMeta(one.name, one.dtype, one.shape)) for group in plan.groups for one in group)
        self._senders: list[tuple[OwnerClient, Any] | None] = []  # of each owner; None: of other ranks
        owners = plan.owners()
        addresses = _addresses([plan.seat(owner) for owner in owners])
        for number, (owner, (address, port)) in enumerate(zip(owners, addresses, strict=True)):
            seat, sender = plan.seat(owner), None
            if seat:
                source = OwnerSource(plan, owner, seat, DTYPES[DTYPE_NAMES[dtype]])
                client = OwnerClient(engines, engine_ranks, source, number, len(owners))
                info = M2NTrainerInitInfo(
                    rank=seat.number,
                    master_address=address,
                    master_port=port,
                    world_size=seat.ranks * seat.replicas + len(engines) * engine_ranks,
                    num_trainer_ranks=seat.ranks * seat.replicas,
                    dst_mesh_dims=(len(engines), engine_ranks),
                )
                made: Any = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
                sender = client, made
            self._senders.append(sender)
            dist.barrier()  # an engine connects to one sender after the other

    def send(self, version: int) -> int:
        """Replace all weights of the engines. Collective. Return the bytes of the weights."""
        self._engine.wait_for_weights()
        torch.accelerator.synchronize()
        for sender in self._senders:
            if sender:
                sender[0].version = version
                sender[1].send_weights()
            dist.barrier()  # an engine receives from one sender after the other
        return self._bytes


class OwnerSource(M2NWeightSource):
    """The weights of one owner, on its ranks: each rank's parts, or full tensors where vLLM cannot place parts."""

    def __init__(self, plan: SyncPlan, owner: Owner, seat: Seat, model_dtype: torch.dtype) -> None:
        self._plan, self._owner, self._seat, self._model_dtype = plan, owner, seat, model_dtype
        described = {one.name: one for group in plan.groups for one in group}
        self._tensors = [described[name] for name in plan.names_of(owner)]
        self._whole = {one.name for one in self._tensors if placements(one) is None}
        self.entries: list[dict[str, Any]] = []  # entries of the last update

    def mesh(self) -> M2NMesh:
        """Return the mesh of this owner's ranks: replicas, and the parts of a tensor."""
        return M2NMesh((self._seat.replicas, self._seat.ranks), 0)

    def metadata(self) -> list[ParamMeta]:
        """Return the names, dtypes, shapes and placements of all weights, in the order of sending."""
        return [M2NParamMeta(one.name, one.dtype, one.shape, placements(one)) for one in self._tensors]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, part or full tensor) for each weight. Collective over the ranks of this owner."""
        self.entries = []
        for name, tensor in self._plan.shares(self._owner, self._whole):
            if name in self._whole and not self._seat.number:
                self.entries.append(entry_of([name], tensor[None], self._model_dtype))
            yield name, tensor
        parts = [one.name for one in self._tensors if one.name not in self._whole]
        self.entries.append({"names": parts, "shape": [], "fingerprint": {}})  # engines count these values


class OwnerClient(WeightSyncClient):
    """Client of one sender. The first sender starts an update, and the last one ends it."""

    def __init__(
        self, actors: Sequence[ray.actor.ActorHandle], ranks: int, source: OwnerSource, number: int, senders: int
    ) -> None:
        super().__init__(actors, ranks, source, sends_handles=False)
        self._sender, self._is_last = {"sender": number}, number == senders - 1

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect the engines to this sender."""
        info = init_info | self._sender
        ray.get([a.init_weight_transfer.remote(info | {"engine": n}) for n, a in enumerate(self._actors)])

    def start_weight_update(self) -> None:
        """Start an update in all engines, if this is the first sender."""
        if not self._sender["sender"]:
            super().start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        """Receive the weights of this sender in all engines."""
        super().update_weights({**update_info, **self._sender})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Send the entries of this sender's tensors. After the last sender, the engines verify their weights."""
        entries = {"names": [], "entries": self._source.entries, "version": self.version}
        self._load(entries | self._sender, last=self._is_last)


def placements(tensor: FullTensor) -> Placements | None:
    """Return vLLM's placement of a tensor on (replicas, parts). None: every rank of its owner must have all of it."""
    dim, is_verified = tensor.split.dim, tensor.name in (EMBEDDING, HEAD)
    if dim is None or is_verified or not tensor.split.is_even or len(tensor.shape) > MAX_TENSOR_DIMS:
        return None
    return REPLICATE, dim


def _addresses(seats: Sequence[Seat | None]) -> list[tuple[str, int]]:
    """Return the address and a free port of the first rank of each owner. Collective."""
    own: list[tuple[str, int] | None] = []
    for seat in seats:
        port = 0
        if seat and seat.number == 0:
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
        own.append((ray.util.get_node_ip_address(), port) if port else None)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return [next(found for found in of_owner if found) for of_owner in zip(*everyone, strict=True)]
