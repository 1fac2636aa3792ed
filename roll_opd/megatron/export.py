"""Weights out of Megatron in Hugging Face's names and shapes: as buckets for an inference engine, or as a directory."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from roll_opd.megatron.engine import MegatronEngine
from roll_opd.megatron.model import unwrapped
from roll_opd.megatron.weights.stream import Shapes
from roll_opd.models import adapter_files
from roll_opd.models.device_phases import Part
from roll_opd.models.model_files import with_dtype
from roll_opd.samples.weight_bucket import BUCKET_BYTES, BucketMemory, bucketed

Bundle = list[tuple[str, Tensor]]  # some weights, by name
Written = Callable[[], list[Path]]  # ends a save: writes what is left to write, and returns all files
FILE_BYTES = 5 * 10**9
# old weights, of any framework, and what describes the old model
_NOT_COPIED = (".safetensors", ".bin", ".index.json", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", "readme.md")


def hf_tensors(engine: MegatronEngine) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) on rank 0, nothing on the others. Collective: iterate to the end.

    Adapters are in the weights that they stand beside.
    """
    engine.memory.check("its weights", Part.WEIGHTS)
    engine.settle()
    return engine.weights.whole_tensors([unwrapped(chunk) for chunk in engine.chunks])


def hf_tensors_everywhere(engine: MegatronEngine, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Yield what `hf_tensors` does on every rank; `shapes` are those of all."""
    engine.settle()
    return engine.weights.whole_tensors([unwrapped(chunk) for chunk in engine.chunks], shapes)


def weight_buckets(
    engine: MegatronEngine, memories: Sequence[BucketMemory], model_dtype: torch.dtype, limit: int = BUCKET_BYTES
) -> Iterator[tuple[BucketMemory, bool]]:
    """Yield the weights on rank 0 as `bucketed` does, and nothing on the others. Collective: iterate to the end."""
    return bucketed(hf_tensors(engine), memories, model_dtype, limit)


def save_adapter(engine: MegatronEngine, directory: Path, *, later: bool = False) -> Written:
    """Write the adapters of a LoRA student as `peft` does; return the files. Collective; rank 0 writes.

    With `later`, copies are taken, and written as the answer is called.
    """
    adapters = engine.adapters
    assert adapters is not None
    engine.memory.check("its adapters", Part.WEIGHTS)
    engine.settle()
    state = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in adapters.tensors()}
    plan = adapters.plan
    config = adapter_files.adapter_config(engine.plan.model.path, plan.rank, plan.alpha, plan.targets)

    def write() -> list[Path]:
        if not state:
            return []
        directory.mkdir(parents=True, exist_ok=True)
        beside = directory / adapter_files.CONFIG
        beside.write_text(json.dumps(config, indent=2) + "\n")
        return [beside, _write_tensors(state, directory / adapter_files.WEIGHTS, beside)]

    return write if later else partial(list, write())


def save_hf(
    engine: MegatronEngine,
    directory: Path,
    *,
    later: bool = False,
    amended: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Written:
    """Write a Hugging Face model directory that `transformers` and vLLM load; return the files. Collective.

    Rank 0 writes, one file after the other, and has room for one of them. With `later`, it takes a copy of the whole
    model, which is written as the answer is called. Configuration (`amended`) and tokenizer files are those of the
    model the engine was loaded from; its README.md is not copied. OSError where a file cannot be written; the caller
    then deals with the unfinished directory.
    """
    bundles: Iterable[Bundle] = _bundles(engine, FILE_BYTES)
    write = partial(_write_hf, Path(engine.plan.model.path), directory, list(bundles) if later else bundles, amended)
    return write if later else partial(list, write())


def _bundles(engine: MegatronEngine, size: int) -> Iterator[Bundle]:
    """Yield the weights on rank 0, copied into the host's memory, `size` bytes or one tensor at a time. Collective."""
    bundle: Bundle = []
    held = 0
    for name, tensor in hf_tensors(engine):
        if bundle and held + tensor.nbytes > size:
            yield bundle
            bundle, held = [], 0
        bundle.append((name, tensor.to("cpu", copy=True).contiguous()))
        held += tensor.nbytes
    if bundle:
        yield bundle


def _write_hf(
    source: Path, directory: Path, bundles: Iterable[Bundle], amended: Callable[[dict[str, Any]], dict[str, Any]]
) -> list[Path]:
    """Write a model directory from the one at `source` and other weights; return its files. None without weights."""
    files: list[Path] = []
    places: dict[str, int] = {}  # name of a tensor -> number of its file
    size = 0
    for bundle in bundles:
        if not files:
            _write_beside_weights(source, directory, str(bundle[0][1].dtype), amended)
        places |= {name: len(files) for name, _ in bundle}
        size += sum(tensor.nbytes for _, tensor in bundle)
        file = directory / f"part-{len(files)}.safetensors"
        files.append(_write_tensors(dict(bundle), file, directory / "config.json"))
    if not files:
        return []
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{number + 1:05}-of-{len(files):05}.safetensors" for number in range(len(files))]
        index = {"metadata": {"total_size": size}, "weight_map": {name: names[n] for name, n in places.items()}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for file, name in zip(files, names, strict=True):
        file.rename(directory / name)
    return [file for file in directory.iterdir() if file.is_file()]


def _write_beside_weights(
    source: Path, directory: Path, dtype: str, amended: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.lower().endswith(_NOT_COPIED):
            shutil.copyfile(file, directory / file.name)
    config = json.loads((source / "config.json").read_text())
    config = with_dtype(config, dtype.removeprefix("torch."))
    (directory / "config.json").write_text(json.dumps(amended(config), indent=2) + "\n")


def _write_tensors(tensors: dict[str, Tensor], file: Path, config: Path) -> Path:
    """Write a safetensors file that may be read by those who may read `config`; by itself it is the owner's alone."""
    save_file(tensors, file, metadata={"format": "pt"})
    shutil.copymode(config, file)
    return file
