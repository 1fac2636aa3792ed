"""vLLM's weight-transfer engine "nccl_m2n" for several senders, with an added check that all weights have arrived.

Not run yet: it needs a GPU for each rank, and the package nccl-extensions. vLLM's engine knows one mesh of trainer
ranks. Here each owner of tensors (`sync_plan.Owner`) is a sender with its own mesh and NCCL group, so an engine has one
of vLLM's engines for each sender.
"""

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.m2n_engine import (
    M2NWeightTransferEngine,
    M2NWeightTransferInitInfo,
    M2NWeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from roll_opd.weight_sync.cuda_receiver import SentEntries
from roll_opd.weight_sync.verify_weights import WeightVerifier, load_sinks_by_loader


@dataclass(kw_only=True)
class SenderInitInfo(M2NWeightTransferInitInfo):
    """vLLM's description of one sender. `sender`: its number; `engine`: the number of this engine."""

    sender: int
    engine: int


@dataclass(kw_only=True)
class SenderUpdateInfo(SentEntries, M2NWeightTransferUpdateInfo):
    """One message of an update: the names of a sender's tensors, or the entries of the tensors that it has sent."""

    sender: int


class CheckedM2NEngine(WeightTransferEngine[SenderInitInfo, SenderUpdateInfo]):
    """Loads the parts that the student's ranks send, one sender after the other, and verifies the loaded weights."""

    init_info_cls = SenderInitInfo
    update_info_cls = SenderUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        load_sinks_by_loader(model)
        self._given = config, vllm_config, device, model
        self._senders: dict[int, M2NWeightTransferEngine] = {}
        self._direct: set[str] = set()  # layers of the running update that were written without a weight loader

    def init_transfer_engine(self, init_info: SenderInitInfo) -> None:
        """Connect to one sender."""
        if earlier := self._senders.pop(init_info.sender, None):
            earlier.shutdown()
        one = M2NWeightTransferEngine(*self._given)
        one.parallel_config = copy(self.parallel_config)
        one.parallel_config.data_parallel_index = init_info.engine  # gives each engine its own ranks in the group
        one.init_transfer_engine(init_info)
        self._senders[init_info.sender] = one

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._verifier, self._direct = WeightVerifier(self.model), set()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SenderUpdateInfo) -> None:
        """Receive the tensors of a message. If the message has entries instead, record the entries."""
        if update_info.entries is not None:
            self._verifier.expect(update_info.entries, update_info.version)
            return
        sender = self._senders[update_info.sender]
        sender.receive_weights(update_info)
        names = set(update_info.names)
        found: Any = sender._parameter_destinations
        self._direct |= {one.name.rpartition(".")[0] for one in found if one.direct and one.name in names}

    def finish_weight_update(self) -> None:
        """Finalize and verify the loaded weights.

        Raises a RuntimeError that names missing or different weights.
        """
        self._verifier.finish(lambda: finalize_layerwise_reload(self.model, self.model_config), self._direct)

    def shutdown(self) -> None:
        """Close the connections to all senders."""
        for sender in self._senders.values():
            sender.shutdown()
        self._senders.clear()
