"""Weights out of Megatron in Hugging Face's names and shapes: as buckets for an inference engine, or as a directory."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from roll_opd.data.tensors import WeightBucket
from roll_opd.hf import adapter_files
from roll_opd.megatron.engine import MegatronEngine
from roll_opd.megatron.model import unwrapped

BUCKET_BYTES = 512 * 2**20
# old weights, of any framework, and what describes the old model
_NOT_COPIED = (".safetensors", ".bin", ".index.json", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", "readme.md")


def hf_tensors(engine: MegatronEngine) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) on rank 0, nothing on the others. Collective: iterate to the end.

    Adapters are in the weights that they stand beside.
    """
    engine.settle()
    return engine.weights.whole_tensors([unwrapped(chunk) for chunk in engine.chunks])


def weight_buckets(engine: MegatronEngine, bucket_bytes: int = BUCKET_BYTES) -> Iterator[WeightBucket]:
    """Yield the weights in buckets on rank 0 and nothing on the others. Collective."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in hf_tensors(engine):
        if held and size + tensor.nbytes > bucket_bytes:
            yield WeightBucket.of(held)
            held, size = [], 0
        held.append((name, tensor.to("cpu", copy=True).contiguous()))
        size += tensor.nbytes
    if held:
        yield WeightBucket.of(held)


def save_adapter(engine: MegatronEngine, directory: Path) -> None:
    """Write the adapters of a LoRA student as `peft` does. Collective; rank 0 writes."""
    adapters = engine.adapters
    assert adapters is not None
    engine.settle()
    state = {name: tensor.cpu().contiguous().clone() for name, tensor in adapters.tensors()}
    if dist.get_rank() != 0:
        return
    directory.mkdir(parents=True, exist_ok=True)
    plan = adapters.plan
    config = adapter_files.adapter_config(engine.plan.model.path, plan.rank, plan.alpha, plan.targets)
    (directory / adapter_files.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(state, directory / adapter_files.WEIGHTS, metadata={"format": "pt"})
    shutil.copymode(directory / adapter_files.CONFIG, directory / adapter_files.WEIGHTS)


def save_hf(engine: MegatronEngine, directory: Path) -> None:
    """Write a Hugging Face model directory that `transformers` and vLLM load. Collective; rank 0 writes.

    Configuration and tokenizer files are those of the model the engine was loaded from; its README.md is not copied.
    OSError where a file cannot be written; the caller then deals with the unfinished directory.
    """
    state = {name: tensor.cpu().contiguous().clone() for name, tensor in hf_tensors(engine)}
    if dist.get_rank() != 0:
        return
    directory.mkdir(parents=True, exist_ok=True)
    source = Path(engine.plan.model.path)
    for file in source.iterdir():
        if file.is_file() and not file.name.lower().endswith(_NOT_COPIED):
            shutil.copyfile(file, directory / file.name)
    config = json.loads((source / "config.json").read_text())
    dtype_key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[dtype_key] = str(next(iter(state.values())).dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    split = split_torch_state_dict_into_shards(state, max_shard_size="5GB")
    for filename, names in split.filename_to_tensors.items():
        save_file({name: state[name] for name in names}, directory / filename, metadata={"format": "pt"})
        shutil.copymode(directory / "config.json", directory / filename)  # safetensors gives the owner alone access
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
