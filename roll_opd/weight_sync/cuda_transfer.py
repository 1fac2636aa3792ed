"""vLLM's own "ipc" and "nccl" weight transfer, for GPUs: with our check that all weights arrived.

`ipc` reads the student's memory through handles of CUDA's, `nccl` takes part in a broadcast. At the end of an update
the sender says what it has sent, in a message without weights.
"""

import pickle
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from roll_opd.weight_sync.verify_weights import Arrival


@dataclass
class CheckedIpcUpdateInfo(IPCWeightTransferUpdateInfo):
    """A chunk of weights, or in the end `entries` of all that were sent (see `weight_bucket.entry_of`)."""

    handles: bytes | None = None  # `ipc_handles`, pickled: they hold types, which vLLM's messages cannot
    entries: list[dict[str, Any]] | None = None
    version: int = 0

    def __post_init__(self) -> None:
        """Unpack the handles."""
        if self.handles is not None:
            self.ipc_handles = pickle.loads(self.handles)
        super().__post_init__()


@dataclass
class CheckedNcclUpdateInfo(NCCLWeightTransferUpdateInfo):
    """All weights of an update, or in the end `entries` of all that were sent (see `weight_bucket.entry_of`)."""

    entries: list[dict[str, Any]] | None = None
    version: int = 0


class CheckedIpcEngine(IPCWeightTransferEngine):
    """Loads weights from the memory of the student's rank on the same GPU."""

    update_info_cls = CheckedIpcUpdateInfo

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._arrival = Arrival(self.model)
        super().start_weight_update()

    def receive_weights(self, update_info: IPCWeightTransferUpdateInfo) -> None:
        """Load a chunk, or note what was sent."""
        assert isinstance(update_info, CheckedIpcUpdateInfo)
        if update_info.entries is None:
            super().receive_weights(update_info)
        else:
            self._arrival.expect(update_info.entries, update_info.version)

    def finish_weight_update(self) -> None:
        """Pack what was loaded, then check it; RuntimeError names what did not arrive."""
        self._arrival.finish(super().finish_weight_update)


class CheckedNcclEngine(NCCLWeightTransferEngine):
    """Loads weights that the student's first rank broadcasts."""

    update_info_cls = CheckedNcclUpdateInfo

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._arrival = Arrival(self.model)
        super().start_weight_update()

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Load all weights, or note what was sent."""
        assert isinstance(update_info, CheckedNcclUpdateInfo)
        if update_info.entries is None:
            super().receive_weights(update_info)
        else:
            self._arrival.expect(update_info.entries, update_info.version)

    def finish_weight_update(self) -> None:
        """Pack what was loaded, then check it; RuntimeError names what did not arrive."""
        self._arrival.finish(super().finish_weight_update)
