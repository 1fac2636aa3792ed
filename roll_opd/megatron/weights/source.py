"""Sources of weights: the safetensors files of a model directory (read in slices), and tensors in memory."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import safe_open
from torch import Tensor

from roll_opd.models.model_info import StoredTensor, read_model


class FileSource:
    """Weights of a model directory.

    As a context manager, it keeps the files open until exit.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stored: Mapping[str, StoredTensor] = read_model(directory).tensors
        self._files = ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> "FileSource":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def __str__(self) -> str:
        return str(self._directory)

    @property
    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def whole(self, name: str) -> Tensor:
        """Return a full tensor, with the shape and dtype of the file."""
        return self._file_of(name).get_tensor(name)

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        whole = self._file_of(name).get_slice(name)
        return whole[start:stop] if dim == 0 else whole[:, start:stop]

    def _file_of(self, name: str) -> Any:
        """Return the open file that contains a tensor."""
        file = self._tensor(name).file
        if file not in self._open:
            self._open[file] = self._files.enter_context(safe_open(file, framework="pt"))
        return self._open[file]

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self._stored:
            raise ValueError(f"{self} has no tensor {name}; use a complete model with its config.json")
        return self._stored[name]


class TensorSource:
    """Full tensors in memory, by Hugging Face name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __str__(self) -> str:
        return "the given weights"

    @property
    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        return self._tensors[name].narrow(dim, start, stop - start)
