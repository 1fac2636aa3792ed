"""The student's half of a weight transfer from GPU to GPU, on each of its ranks: by vLLM's own senders.

They take the weights from a source, say to the engines what comes, and pack it into buffers. Importing this imports
vLLM.
"""

import math
import pickle
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from roll_opd.inference.plugin import CUDA_IPC
from roll_opd.inference.settings import DTYPE_NAMES
from roll_opd.megatron.export import hf_tensors, hf_tensors_everywhere
from roll_opd.samples.weight_bucket import DTYPES, entry_of

BUFFER_BYTES = 256 * 2**20  # of a GPU's memory; with NCCL two of them on either side


class CudaSender:
    """Sends the student's weights to engines whenever it is asked to, on all ranks at once."""

    def __init__(
        self, way: str, engine: Any, engines: Sequence[ray.actor.ActorHandle], engine_ranks: int, dtype: str
    ) -> None:
        """Meet `engines`, which are `RolloutWorker`s of `engine_ranks` devices each; `dtype` is that of their model."""
        by_handles = way == CUDA_IPC
        source = StudentSource(engine, DTYPES[DTYPE_NAMES[dtype]], everywhere=by_handles)
        self._engines = Engines(engines, engine_ranks, source, hands_over=by_handles)
        info: TrainerInitInfo
        if by_handles:
            info = IPCTrainerInitInfo(
                rank=dist.get_rank(), packed=True, packed_buffer_size_bytes=buffer_size(source.metadata())
            )
        else:
            with socket.socket() as probe:  # only the first rank's is used
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

    def send(self, version: int) -> None:
        """Replace all weights of the engines. Collective."""
        self._engines.version = version
        torch.accelerator.synchronize()  # the senders read in streams of their own what the optimizer has written
        self._sender.send_weights()


class StudentSource(WeightSource):
    """The student's weights under Hugging Face's names: whole on its first rank, or on each."""

    def __init__(self, engine: Any, model_dtype: torch.dtype, *, everywhere: bool) -> None:
        self._engine, self._model_dtype, self._everywhere = engine, model_dtype, everywhere
        self._metadata: list[ParamMeta] = []
        self.entries: list[dict[str, Any]] = []  # of what was sent last, on the first rank

    def metadata(self) -> list[ParamMeta]:
        """Return name, dtype and shape of all, in order, on every rank. Collective when it is first asked."""
        if not self._metadata:
            found = [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in hf_tensors(self._engine)]
            box = [found]
            dist.broadcast_object_list(box, 0)
            self._metadata = box[0]
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor). Collective: iterate to the end."""
        self.entries = []
        tensors = hf_tensors(self._engine)
        if self._everywhere:
            tensors = hf_tensors_everywhere(self._engine, {m.name: (m.dtype, m.shape) for m in self.metadata()})
        for name, tensor in tensors:
            if dist.get_rank() == 0:
                self.entries.append(entry_of(name, tensor, self._model_dtype))
            yield name, tensor


class Engines:
    """The engines, as vLLM's senders address them: a `VLLMWeightSyncClient`. Only the first rank calls it."""

    def __init__(
        self, actors: Sequence[ray.actor.ActorHandle], ranks: int, source: StudentSource, *, hands_over: bool
    ) -> None:
        """With `hands_over`, what they are told has handles of CUDA's."""
        self.version = 0
        self._actors, self._ranks, self._source, self._hands_over = actors, ranks, source, hands_over

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the engines meet the sender."""
        ray.get(
            [
                actor.init_weight_transfer.remote(for_engine(init_info, number, self._ranks))
                for number, actor in enumerate(self._actors)
            ]
        )

    def start_weight_update(self) -> None:
        """Have running requests end, and the engines ready."""
        ray.get([actor.begin_update.remote(self.version) for actor in self._actors])

    def update_weights(self, update_info: Any) -> None:
        """Have the engines load what is described; returns when they have."""
        self._load(update_info, last=False)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Tell the engines what was sent; they check it, and go on."""
        nothing: dict[str, list[Any]] = {"names": [], "dtype_names": [], "shapes": []}
        self._load({**nothing, "entries": self._source.entries, "version": self.version}, last=True)

    def _load(self, info: Mapping[str, Any], *, last: bool) -> None:
        portable = ray.put(self._portable(info))
        ray.get([actor.load_weights.remote(portable, last=last) for actor in self._actors])

    def _portable(self, info: Mapping[str, Any]) -> dict[str, Any]:
        if not self._hands_over:
            return dict(info)
        rest = {key: value for key, value in info.items() if key != "ipc_handles"}
        return rest | {"handles": pickle.dumps(info.get("ipc_handles", {}))}


def for_engine(init_info: Mapping[str, Any], number: int, ranks: int) -> dict[str, Any]:
    """Return what engine `number` is told: of a group, that its ranks come behind those of the engines before it."""
    offset = {"rank_offset": init_info["rank_offset"] + number * ranks} if "rank_offset" in init_info else {}
    return {**init_info, **offset}


def buffer_size(metadata: Sequence[ParamMeta]) -> int:
    """Return the bytes of a buffer that holds any one of the tensors."""
    return max(BUFFER_BYTES, *(math.prod(m.shape) * m.dtype.itemsize for m in metadata))
