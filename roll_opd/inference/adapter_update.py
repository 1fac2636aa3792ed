"""Receive the student's LoRA adapter in the front end of an engine, and give it to vLLM.

The weights of the base model are neither sent nor changed. vLLM reads an adapter from a directory, in each rank of the
engine. The directory is in shared memory, and exists only while vLLM reads it.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file
from torch import Tensor

from roll_opd.config.plan import LoraPlan
from roll_opd.models.adapter_files import CONFIG, WEIGHTS, adapted_modules, adapter_config, tensor_name
from roll_opd.models.model_info import read_model
from roll_opd.samples.weight_bucket import (
    dtype_name,
    map_bucket,
    row_checksums,
    sampled_rows,
    sent_checksums,
    sent_tensors,
)

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

SHARED = Path("/dev/shm")
NAME, NUMBER = "student", 1  # of the adapter in vLLM


class AdapterUpdate:
    """One update of the adapter of an engine."""

    def __init__(self, base: str, adapter: LoraPlan) -> None:
        """Expect all matrices of `adapter` for the model in the directory `base`."""
        self._config = adapter_config(base, adapter.rank, adapter.alpha, adapter.targets)
        modules = adapted_modules(read_model(Path(base)), adapter.targets)
        self._missing = {tensor_name(module, matrix) for module in modules for matrix in "AB"}
        self._tensors: dict[str, Tensor] = {}

    def receive(self, bucket: Mapping[str, Any]) -> None:
        """Copy the matrices of a bucket (see `BucketMemory.describe`).

        Raises ValueError for a matrix that was sent twice or that is not expected, and RuntimeError for wrong values.
        """
        sent = sent_tensors(bucket["stacks"])
        for name, tensor in map_bucket(bucket["path"], bucket["size"], bucket["stacks"])[1]:
            if name not in self._missing:
                raise ValueError(f"{name} was sent twice, or is no matrix of the adapter")
            expected = sent_checksums(sent[name], dtype_name(tensor.dtype))
            if row_checksums(tensor, sampled_rows(len(tensor))) != expected:
                raise RuntimeError(f"{name} differs from the sent matrix")
            self._missing.remove(name)
            self._tensors[name] = tensor.clone()

    async def install(self, llm: "AsyncLLM") -> "LoRARequest":
        """Replace the adapter of an engine. Return vLLM's description of it, with which requests ask for it.

        Raises RuntimeError if matrices are missing.
        """
        from vllm.lora.request import LoRARequest

        if self._missing:
            first = min(self._missing)
            raise RuntimeError(f"{len(self._missing)} matrices of the adapter did not arrive, among them {first}")
        place = SHARED if SHARED.is_dir() else None
        with tempfile.TemporaryDirectory(prefix="roll-opd-adapter-", dir=place) as directory:
            Path(directory, CONFIG).write_text(json.dumps(self._config))
            save_file(self._tensors, Path(directory, WEIGHTS))
            await llm.add_lora(LoRARequest(NAME, NUMBER, directory, load_inplace=True))
        return LoRARequest(NAME, NUMBER, directory)
