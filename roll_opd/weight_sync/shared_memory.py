"""vLLM weight-transfer backend "shared_memory": the worker's half of a weight update through host memory.

It runs inside vLLM's engine core (and in every tensor-parallel worker), maps the buckets that a process on this machine
wrote, loads them with vLLM's layerwise reload, and then checks that the model holds them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from roll_opd.samples.weight_bucket import map_bucket
from roll_opd.weight_sync.verify_weights import Arrival, keep_waiting


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """No information is exchanged before the first update."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """One bucket, as `BucketMemory` describes it, and the version it belongs to."""

    path: str
    size: int
    tensors: list[dict[str, Any]]
    version: int


class SharedMemoryWeightTransferEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Load buckets from shared memory into this worker's model and check that they arrived."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.version = 0  # of the last update that was finished and checked
        self._arrival: Arrival | None = None

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Do nothing: memory is mapped bucket by bucket."""

    def start_weight_update(self) -> None:
        """Begin an update: from here every layer waits for all its values."""
        self._arrival = Arrival(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Map one bucket and hand it to the model's own loader.

        Nothing of the bucket is needed when this returns: what layerwise reload keeps, until the rest of its layer has
        come in a later bucket, is copied.
        """
        assert self._arrival is not None
        self._arrival.expect(update_info.tensors, update_info.version)
        try:
            memory, weights = map_bucket(update_info.path, update_info.size, update_info.tensors)
        except OSError as error:
            raise RuntimeError(
                f"cannot map the weight bucket {update_info.path}: {error}. The shared_memory backend "
                "needs the sender of weights on the same machine, in the same PID namespace, as the same user"
            ) from error
        model: Any = self.model
        model.load_weights(weights)
        keep_waiting(self.model, memory)

    def finish_weight_update(self) -> None:
        """Pack what was loaded, then check it; RuntimeError names what did not arrive."""
        assert self._arrival is not None
        self.version = self._arrival.finish(lambda: finalize_layerwise_reload(self.model, self.model_config))
        self._arrival = None

    def shutdown(self) -> None:
        """Nothing is held between updates."""
