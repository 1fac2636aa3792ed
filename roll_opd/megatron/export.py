"""Weights out of Megatron in Hugging Face's names and shapes: as buckets for an inference engine, or as a directory."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from roll_opd.megatron.engine import MegatronEngine
from roll_opd.megatron.model import unwrapped

BUCKET_BYTES = 512 * 2**20
_NOT_COPIED = (".safetensors", ".bin", ".index.json", ".pt", ".pth")  # the old weights


@dataclass(frozen=True)
class WeightBucket:
    """Some named tensors in one flat buffer, which travels between processes without a copy."""

    entries: tuple[tuple[str, str, tuple[int, ...], int], ...]  # name, torch dtype name, shape, byte offset
    buffer: np.ndarray  # uint8

    def tensors(self) -> dict[str, Tensor]:
        """Views into the buffer, by name."""
        flat = torch.from_numpy(self.buffer)
        result = {}
        for name, dtype_name, shape, offset in self.entries:
            dtype = getattr(torch, dtype_name)
            count = int(np.prod(shape)) * dtype.itemsize
            result[name] = flat[offset : offset + count].view(dtype).view(shape)
        return result


def hf_tensors(engine: MegatronEngine) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) on every rank. Collective: all ranks must exhaust it together."""
    seen = set()
    models = [unwrapped(chunk) for chunk in engine.chunks]
    for name, tensor in engine.bridge.export_weights(models):
        if name not in seen:  # tied embeddings live on two pipeline stages
            seen.add(name)
            yield name, tensor.detach()


def weight_buckets(engine: MegatronEngine, bucket_bytes: int = BUCKET_BYTES) -> Iterator[WeightBucket]:
    """Yield the weights in buckets on rank 0 and nothing on the others. Collective."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in hf_tensors(engine):
        if dist.get_rank() != 0:
            continue
        if held and size + tensor.nbytes > bucket_bytes:
            yield _bucket(held)
            held, size = [], 0
        held.append((name, tensor.to("cpu", copy=True).contiguous()))
        size += tensor.nbytes
    if held:
        yield _bucket(held)


def _bucket(named: list[tuple[str, Tensor]]) -> WeightBucket:
    entries, pieces, offset = [], [], 0
    for name, tensor in named:
        raw = tensor.flatten().view(torch.uint8).numpy()
        entries.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset))
        padding = -raw.nbytes % 16  # views of any dtype need aligned offsets
        pieces += [raw, np.zeros(padding, np.uint8)]
        offset += raw.nbytes + padding
    return WeightBucket(tuple(entries), np.concatenate(pieces))


def save_hf(engine: MegatronEngine, directory: Path) -> None:
    """Write a Hugging Face model directory that `transformers` and vLLM load. Collective; rank 0 writes.

    Configuration and tokenizer files are those of the model the engine was loaded from. OSError when the disk
    refuses; the caller decides what becomes of the unfinished directory.
    """
    state = {}
    for name, tensor in hf_tensors(engine):
        if dist.get_rank() == 0:
            state[name] = tensor.cpu().contiguous().clone()
    if dist.get_rank() != 0:
        return
    directory.mkdir(parents=True, exist_ok=True)
    source = Path(engine.plan.model.path)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_NOT_COPIED):
            shutil.copyfile(file, directory / file.name)
    config = json.loads((source / "config.json").read_text())
    dtype_key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[dtype_key] = str(next(iter(state.values())).dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    split = split_torch_state_dict_into_shards(state, max_shard_size="5GB")
    for filename, names in split.filename_to_tensors.items():
        save_file({name: state[name] for name in names}, directory / filename, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
