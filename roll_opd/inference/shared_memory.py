"""vLLM weight-transfer backend "shared_memory": the worker's half of a weight update through host memory.

It runs inside vLLM's engine core (and in every tensor-parallel worker), maps the buckets that the front-end process
wrote, loads them with vLLM's layerwise reload, and then checks that the model holds them: every layer got all its
values, and what can be compared (norms, embeddings) is bit for bit what was sent.
"""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from roll_opd.inference.bucket import map_bucket, row_checksums, sampled_rows

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """No information is exchanged before the first update."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """One bucket, as `bucket.shared_bucket` describes it, and the version it belongs to."""

    path: str
    size: int
    tensors: list[dict[str, Any]]
    version: int


class SharedMemoryWeightTransferEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Load buckets from shared memory into this worker's model and check that they arrived."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: "VllmConfig", device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        # it warns, at every update, of layers without weights of their own; `incomplete_layers` checks that instead
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        self.version = 0  # of the last update that was finished and checked
        self._pending_version = 0
        self._sent: dict[str, dict[str, Any]] = {}  # tensor name -> its entry in the bucket, of this update
        self._tied_heads: list[tuple[str, ParallelLMHead]] = []

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Do nothing: memory is mapped bucket by bucket."""

    def start_weight_update(self) -> None:
        """Begin an update: from here every layer waits for all its values."""
        self._sent = {}
        self._tied_heads = tied_heads(self.model)  # before layerwise reload takes the shared parameter apart
        forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Map one bucket and hand it to the model's own loader.

        Layerwise reload may keep a tensor until its layer is complete, possibly in a later bucket; the
        mapping stays alive until then.
        """
        repeated = sorted({entry["name"] for entry in update_info.tensors} & set(self._sent))
        if repeated:
            raise ValueError(f"weights sent twice in one update: {_listed(repeated)}")
        self._pending_version = update_info.version
        try:
            weights = map_bucket(update_info.path, update_info.size, update_info.tensors)
        except OSError as error:
            raise RuntimeError(
                f"cannot map the weight bucket {update_info.path}: {error}. The shared_memory backend "
                "needs the sender of weights on the same machine, in the same PID namespace, as the same user"
            ) from error
        self._sent.update({entry["name"]: entry for entry in update_info.tensors})
        model: Any = self.model
        model.load_weights(weights)

    def finish_weight_update(self) -> None:
        """Pack what was loaded, then check it; RuntimeError names what did not arrive."""
        incomplete = incomplete_layers(self.model, set(self._sent), {name for name, _ in self._tied_heads})
        finalize_layerwise_reload(self.model, self.model_config)
        for _, head in self._tied_heads:
            # reload sees only the embedding; on CPU a tied head has a packed copy of its own, now stale
            head.quant_method.process_weights_after_loading(head)
        if incomplete:
            raise RuntimeError(f"weights version {self._pending_version} did not arrive: {_listed(incomplete)}")
        check_arrival(self.model, self._sent, self._pending_version)
        self.version = self._pending_version
        self._sent = {}

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def tied_heads(model: torch.nn.Module) -> list[tuple[str, ParallelLMHead]]:
    """Return the output heads that share their weight with an embedding, with their module names."""
    embeddings = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    }
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, ParallelLMHead) and id(module.weight) in embeddings
    ]


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Have experts packed for the CPU's kernels again after an update.

    vLLM packs them when it makes a layer's kernel, and makes that once: values that are loaded later would be copied
    as they are to where packed ones belong.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "unquantized_backend", None) is UnquantizedMoeBackend.CPU:
            assert method is not None
            method.moe_kernel = None


def incomplete_layers(model: torch.nn.Module, sent: set[str], exempt: set[str]) -> list[str]:
    """Return layers that lack values, as "name (got of expected values)". Call it before finalising."""
    missing = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if name in exempt or not info.can_load():  # complete layers have left the waiting state
            continue
        if isinstance(layer, VocabParallelEmbedding):  # padded: never full, so ask whether its rows were sent
            if f"{name}.weight" not in sent:
                missing.append(f"{name} (not sent)")
            continue
        expected = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
        if info.load_numel < expected:
            missing.append(f"{name} ({info.load_numel} of {expected} values)")
    return missing


def check_arrival(model: torch.nn.Module, sent: dict[str, dict[str, Any]], version: int) -> None:
    """Compare vectors and embeddings in the model with the fingerprints of what was sent, bit for bit.

    Matrices of linear layers are fused, packed or sharded and cannot be compared. RuntimeError when a value differs, or
    when nothing could be compared: the update is unproven then.
    """
    compared, different = 0, []
    for layer_name, layer in model.named_modules():
        for parameter_name, parameter in layer.named_parameters(recurse=False):
            name = f"{layer_name}.{parameter_name}"
            if name not in sent:
                continue
            same = holds(layer, parameter, sent[name])
            compared += same is not None
            if same is False:
                different.append(name)
    if different:
        raise RuntimeError(f"weights version {version}: the model does not hold what was sent: {_listed(different)}")
    if not compared:
        raise RuntimeError(
            f"weights version {version} cannot be proven: of the {len(sent)} tensors sent, none has a "
            f"counterpart of the same name, shape and dtype in {type(model).__name__}; sent: {_listed(sorted(sent))}"
        )


def holds(layer: torch.nn.Module, parameter: torch.Tensor, entry: dict[str, Any]) -> bool | None:
    """Whether `parameter` has the fingerprint in `entry`; None where the two cannot be compared."""
    expected = entry["fingerprint"].get(str(parameter.dtype).removeprefix("torch."))
    shape = entry["shape"]
    if expected is None or parameter.ndim != len(shape):
        return None
    if parameter.ndim == 1:
        return None if list(parameter.shape) != shape else row_checksums(parameter[None], [0]) == expected
    if not isinstance(layer, VocabParallelEmbedding) or list(parameter.shape[1:]) != shape[1:]:
        return None
    first = layer.shard_indices.org_vocab_start_index
    last = layer.shard_indices.org_vocab_end_index  # exclusive
    here = [
        (row - first, value) for row, value in zip(sampled_rows(shape[0]), expected, strict=True) if first <= row < last
    ]
    if not here:
        return None
    return row_checksums(parameter, [row for row, _ in here]) == [value for _, value in here]


def _listed(names: list[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
