"""Names and shards between Hugging Face and Megatron: mbridge, fitted to this stack.

mbridge knows how each architecture's weights map and split. It does not know that local norms carry other names than
Transformer Engine's fused ones, and that two models in one process must not share a name table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mbridge.core.bridge import _MODEL_REGISTRY, Bridge
from torch import Tensor
from transformers import PretrainedConfig

from roll_opd.hf.weight_files import EMBEDDING, HEAD, may_be_zero
from roll_opd.megatron.supported import unsupported

# The norm before a linear layer: its name in the local spec -> its name fused into Transformer Engine's layer
_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
# A critic's output layer, under its name in Hugging Face's models for sequence classification, reward models among them
VALUE_HEAD = {"value_head.weight": "score.weight"}
ROWS_LOOKED_AT = 64  # of a matrix, spread over it


class _LocalNames(Bridge):
    """Translates the local spec's norm names before mbridge looks them up, and refuses weights that were lost."""

    def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
        for local, fused in _FUSED_NORMS.items():
            if name.endswith(local):
                name = name.removesuffix(local) + fused
        return super()._weight_name_mapping_mcore_to_hf(name)

    given: Mapping[str, Tensor] | None = None  # weights that stand in for those of files

    def _get_safetensor_io(self, weights_path: str) -> Any:
        if self.given is not None:
            return _Given(self.given)
        files = super()._get_safetensor_io(weights_path)
        read = files.load_some_hf_weight

        def read_whole(names: Sequence[str]) -> dict[str, Tensor]:
            tensors = read(names)
            if lost := zero_tensors(tensors):
                raise ValueError(
                    f"{files.hf_dir}: {', '.join(lost)} hold zeros alone, or in half of their rows; get the model again"
                )
            return tensors

        files.load_some_hf_weight = read_whole
        return files


@dataclass(frozen=True)
class _Given:
    """What mbridge reads files through, over tensors that are there."""

    tensors: Mapping[str, Tensor]

    def load_some_hf_weight(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self.tensors[name] for name in names}


def load_tensors(bridge: Bridge, models: Sequence[torch.nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Load whole `tensors`, by Hugging Face's names, as `load_weights` does from files. Collective."""
    assert isinstance(bridge, _LocalNames)
    bridge.given = tensors
    try:
        bridge.load_weights(list(models), "")
    finally:
        bridge.given = None


def zero_tensors(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of those that are zero, wholly or in half of their rows: a model without them gives no error.

    Biases may be zero, and so may rows of the vocabulary.
    """
    lost = []
    for name, tensor in tensors.items():
        rows = tensor.flatten(1) if tensor.dim() > 1 else tensor[None]
        looked_at = rows[:: -(-len(rows) // ROWS_LOOKED_AT)].any(1)
        few = 2 * int(looked_at.sum()) <= len(looked_at)
        if few and not may_be_zero(name) and (name not in (EMBEDDING, HEAD) or not tensor.any()):
            lost.append(name)
    return lost


def bridge_for(hf_config: PretrainedConfig, dtype: torch.dtype, *, padding: int, overrides: dict[str, Any]) -> Bridge:
    """Return the bridge of `hf_config.model_type`; its `config` is Megatron's, with `overrides` applied.

    Args:
        padding: the vocabulary is padded to a multiple of it.

    Raises:
        ValueError: for an architecture, or a variant of one, whose numerics are not proven here.
    """
    problems = unsupported(Path(str(hf_config.name_or_path)))
    if problems:
        raise ValueError("; ".join(problems))
    base = _MODEL_REGISTRY[hf_config.model_type]
    fitted = type(base.__name__, (_LocalNames, base), {"_DIRECT_MAPPING": base._DIRECT_MAPPING | VALUE_HEAD})
    bridge = fitted(hf_config, dtype=dtype, make_vocab_size_divisible_by=padding)
    bridge.set_extra_args(**overrides)
    bridge.vocab_size = hf_config.vocab_size
    bridge.padded_vocab_size = -(-hf_config.vocab_size // padding) * padding
    return bridge
