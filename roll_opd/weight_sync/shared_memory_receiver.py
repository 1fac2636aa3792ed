"""vLLM weight-transfer backend "shared_memory", which receives weight updates through host memory.

The backend runs in vLLM's engine core and in every tensor-parallel worker. Another process on the same machine writes
the buckets. The backend maps each bucket, loads its weights with vLLM's layerwise reload, and verifies the model.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from roll_opd.samples.weight_bucket import map_bucket
from roll_opd.weight_sync.verify_weights import WeightVerifier, clone_pending, load_sinks_by_loader


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Has no fields, because no connection is needed before the first update."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """Description of one bucket (see `BucketMemory`), with the version of the update."""

    path: str
    size: int
    stacks: list[dict[str, Any]]
    version: int


class SharedMemoryWeightTransferEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Loads weights from buckets in shared memory into this worker's model, and verifies the loaded weights."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        load_sinks_by_loader(model)
        self.version = 0  # version of the last verified update
        self._verifier: WeightVerifier | None = None

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Do nothing, because each bucket is mapped separately."""

    def start_weight_update(self) -> None:
        """Start an update. From this call on, a layer is incomplete until all its values have arrived."""
        self._verifier = WeightVerifier(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Map one bucket, and load its weights with the model's `load_weights`.

        Layers that are still incomplete need some tensors of the bucket later, so these tensors are copied. The sender
        may therefore overwrite the bucket after this call.
        """
        assert self._verifier is not None
        self._verifier.expect(update_info.stacks, update_info.version)
        try:
            memory, weights = map_bucket(update_info.path, update_info.size, update_info.stacks)
        except OSError as error:
            raise RuntimeError(
                f"cannot map the weight bucket {update_info.path}: {error}. The shared_memory backend requires that the"
                " sender of weights runs on the same machine, in the same PID namespace, and as the same user"
            ) from error
        model: Any = self.model
        model.load_weights(weights)
        clone_pending(self.model, memory)

    def finish_weight_update(self) -> None:
        """Finalize and verify the loaded weights.

        Raises a RuntimeError that names missing or different weights.
        """
        assert self._verifier is not None
        self.version = self._verifier.finish(lambda: finalize_layerwise_reload(self.model, self.model_config))
        self._verifier = None

    def shutdown(self) -> None:
        """Do nothing, because no resource is held between updates."""
