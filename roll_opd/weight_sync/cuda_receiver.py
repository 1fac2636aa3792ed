"""vLLM's weight-transfer engines "ipc" and "nccl" for GPUs, with an added check that all weights have arrived.

The engine "ipc" reads the student's memory through CUDA IPC handles. The engine "nccl" receives a broadcast. The last
message of an update has no weights. It lists the entries of all tensors that were sent.
"""

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from roll_opd.weight_sync.verify_weights import WeightVerifier, load_sinks_by_loader

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine as _Engine
else:
    _Engine = object


@dataclass
class SentEntries:
    """Fields that only the last message of an update sets: `version`, and the `entries` of all tensors that were sent.

    See `weight_bucket.entry_of` for the format of an entry.
    """

    entries: list[dict[str, Any]] | None = None
    version: int = 0


@dataclass
class CheckedIpcUpdateInfo(SentEntries, IPCWeightTransferUpdateInfo):
    """One message of an update.

    The last message has the entries of all tensors. Every other message has a chunk of the weights.
    """

    handles: bytes | None = None  # `ipc_handles`, pickled: vLLM's messages cannot hold types

    def __post_init__(self) -> None:
        """Unpickle the IPC handles."""
        if self.handles is not None:
            self.ipc_handles = pickle.loads(self.handles)
        super().__post_init__()


@dataclass
class CheckedNcclUpdateInfo(SentEntries, NCCLWeightTransferUpdateInfo):
    """One message of an update.

    The last message has the entries of all tensors. The message before it has all weights.
    """


class _CheckedEngine(_Engine):
    """Mixin for weight-transfer engines that verifies each update."""

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        load_sinks_by_loader(self.model)

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._verifier = WeightVerifier(self.model)
        super().start_weight_update()

    def receive_weights(self, update_info: Any) -> None:
        """Load the weights of a message. If the message has entries instead of weights, record the entries."""
        assert isinstance(update_info, SentEntries)
        if update_info.entries is None:
            super().receive_weights(update_info)
        else:
            self._verifier.expect(update_info.entries, update_info.version)

    def finish_weight_update(self) -> None:
        """Finalize and verify the loaded weights.

        Raises a RuntimeError that names missing or different weights.
        """
        self._verifier.finish(super().finish_weight_update)


class CheckedIpcEngine(_CheckedEngine, IPCWeightTransferEngine):
    """Loads weights from the memory of the student rank that uses the same GPU."""

    update_info_cls = CheckedIpcUpdateInfo


class CheckedNcclEngine(_CheckedEngine, NCCLWeightTransferEngine):
    """Loads the weights that rank 0 of the student broadcasts."""

    update_info_cls = CheckedNcclUpdateInfo
