"""Export weights with Hugging Face names: as tensors or buckets for inference engines, or as a model directory."""

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
from roll_opd.megatron.model_builder import unwrapped
from roll_opd.megatron.weights.fused_experts import as_stored
from roll_opd.megatron.weights.source import FileSource
from roll_opd.megatron.weights.sync_plan import Receivers, Stack, SyncPlan, unstacked
from roll_opd.models import adapter_files
from roll_opd.models.device_phases import Part
from roll_opd.models.model_files import with_dtype
from roll_opd.models.model_info import read_model
from roll_opd.samples.weight_bucket import BUCKET_BYTES, BucketMemory, bucketed

Bundle = list[tuple[str, Tensor]]  # weights of one file, by name
Written = Callable[[], list[Path]]  # finishes a save and returns the paths of all files
FILE_BYTES = 5 * 10**9
# endings of file names that are not copied: weights of any framework, and the README.md of the old model
_NOT_COPIED = (".safetensors", ".bin", ".index.json", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", "readme.md")


def sync_plan(engine: MegatronEngine) -> SyncPlan:
    """Return the plan of an engine's full weights, with adapters merged. Collective."""
    return engine.weights.sync_plan([unwrapped(chunk) for chunk in engine.chunks])


def adapter_plan(engine: MegatronEngine) -> SyncPlan:
    """Return the plan of the matrices of an engine's adapters, with their names in `peft`. Collective."""
    assert engine.adapters is not None
    return engine.adapters.sync_plan()


def hf_tensors(
    engine: MegatronEngine, plan: SyncPlan | None = None, receivers: Receivers = Receivers.FIRST
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) on the receivers, and nothing on other ranks.

    Collective: every rank must iterate to the end. Adapters are merged into the weights.

    `plan`: result of `sync_plan` or `adapter_plan`, if the caller has one. It is valid as long as the parameters keep
    their dtypes.
    """
    return (
        (name, tensor)
        for stack in _stacks(engine, plan, receivers)
        for name, tensor in unstacked(stack)
        if tensor is not None
    )


def weight_buckets(
    engine: MegatronEngine,
    memories: Sequence[BucketMemory],
    model_dtype: torch.dtype,
    limit: int = BUCKET_BYTES,
    plan: SyncPlan | None = None,
) -> Iterator[tuple[BucketMemory, bool]]:
    """Yield the weights in buckets (see `bucketed`) on rank 0, and nothing on other ranks.

    Collective: every rank must iterate to the end. `plan`: as for `hf_tensors`.
    """
    present = ((names, tensors) for names, tensors in _stacks(engine, plan) if tensors is not None)
    return bucketed(present, memories, model_dtype, limit)


def save_adapter(engine: MegatronEngine, directory: Path, *, later: bool = False) -> Written:
    """Save the adapters in `peft`'s format on rank 0. Collective.

    Returns a callable that returns the written files. With `later`, the adapters are only copied to host memory, and
    the callable writes them.
    """
    adapters = engine.adapters
    assert adapters is not None
    matrices = hf_tensors(engine, adapter_plan(engine))
    state = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in matrices}
    plan = adapters.plan
    config = adapter_files.adapter_config(engine.plan.model.path, plan.rank, plan.alpha, plan.targets)

    def write() -> list[Path]:
        if not state:
            return []
        directory.mkdir(parents=True, exist_ok=True)
        config_file = directory / adapter_files.CONFIG
        config_file.write_text(json.dumps(config, indent=2) + "\n")
        return [config_file, _write_tensors(state, directory / adapter_files.WEIGHTS, config_file)]

    return write if later else partial(list, write())


def save_hf(
    engine: MegatronEngine,
    directory: Path,
    *,
    later: bool = False,
    amended: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Written:
    """Save a model directory for `transformers` and vLLM. Collective.

    Returns a callable that returns the files of the directory. Rank 0 writes one file after another, and holds only one
    file in memory. With `later`, rank 0 only copies the whole model to host memory, and the callable writes the files.

    `amended` is a function that takes the config.json of the loaded model and returns the new config.json. The
    tokenizer files of the loaded model are copied, but its README.md is not.

    If a file cannot be written, OSError is raised. The caller then removes the unfinished directory.
    """
    bundles: Iterable[Bundle] = _bundles(engine, FILE_BYTES)
    write = partial(_write_hf, Path(engine.plan.model.path), directory, list(bundles) if later else bundles, amended)
    return write if later else partial(list, write())


def _stacks(engine: MegatronEngine, plan: SyncPlan | None, receivers: Receivers = Receivers.FIRST) -> Iterator[Stack]:
    engine.memory.check("export its weights", Part.WEIGHTS)
    engine.wait_for_weights()
    return (plan or sync_plan(engine)).stacks(receivers)


def _bundles(engine: MegatronEngine, size: int) -> Iterator[Bundle]:
    """Yield host copies of the weights on rank 0, in bundles (see `_grouped`). Collective."""
    tensors = as_stored(hf_tensors(engine), read_model(Path(engine.plan.model.path)))
    return _grouped(((name, tensor.to("cpu", copy=True).contiguous()) for name, tensor in tensors), size)


def _grouped(tensors: Iterable[tuple[str, Tensor]], size: int) -> Iterator[Bundle]:
    """Yield the tensors in bundles. A bundle has at most `size` bytes, or a single larger tensor."""
    bundle: Bundle = []
    held = 0
    for name, tensor in tensors:
        if bundle and held + tensor.nbytes > size:
            yield bundle
            bundle, held = [], 0
        bundle.append((name, tensor))
        held += tensor.nbytes
    if bundle:
        yield bundle


def _write_hf(
    source: Path, directory: Path, bundles: Iterable[Bundle], amended: Callable[[dict[str, Any]], dict[str, Any]]
) -> list[Path]:
    """Write a model directory with new weights and the other files of `source`. Returns the written files.

    If there are no bundles, nothing is written, and the list is empty.
    """
    files: list[Path] = []
    places: dict[str, int] = {}  # tensor name -> index of its file
    size = 0
    for bundle in _with_kept(bundles, source):
        if not files:
            _copy_model_files(source, directory, str(bundle[0][1].dtype), amended)
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


def _with_kept(bundles: Iterable[Bundle], source: Path) -> Iterator[Bundle]:
    """Yield the bundles, and then the unchanged tensors of `source` that are never loaded (`ModelInfo.kept`)."""
    is_written = False
    for bundle in bundles:
        is_written = True
        yield bundle
    if not is_written:  # another rank writes
        return
    with FileSource(source) as files:
        yield from _grouped(((name, files.whole(name)) for name in read_model(source).kept), FILE_BYTES)


def _copy_model_files(
    source: Path, directory: Path, dtype: str, amended: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.lower().endswith(_NOT_COPIED):
            shutil.copyfile(file, directory / file.name)
    config = json.loads((source / "config.json").read_text())
    config = with_dtype(config, dtype.removeprefix("torch."))
    config.pop("quantization_config", None)  # the weights are written in `dtype`
    (directory / "config.json").write_text(json.dumps(amended(config), indent=2) + "\n")


def _write_tensors(tensors: dict[str, Tensor], file: Path, config: Path) -> Path:
    """Write a safetensors file with the permissions of the file `config`.

    Without these permissions, only the owner could read the file.
    """
    save_file(tensors, file, metadata={"format": "pt"})
    shutil.copymode(config, file)
    return file
