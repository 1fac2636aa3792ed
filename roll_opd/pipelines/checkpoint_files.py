"""Check before a run starts that the files of a checkpoint are complete."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch

from roll_opd.models.model_info import ModelFilesError, read_model


def damage(checkpoint: Path) -> str | None:
    """Return the first defect of a checkpoint in words; None: all parts can be loaded.

    OSError if the file system fails, which may be temporary.
    """
    return next(chain(_of_states(checkpoint), _of_models(checkpoint)), None)


def _of_states(checkpoint: Path) -> Iterator[str]:
    from torch.distributed.checkpoint import FileSystemReader  # takes half a second

    for state in sorted(checkpoint.glob("**/state")):
        try:
            stored = FileSystemReader(state).read_metadata().storage_data.values()
            torch.load(state / "common.pt", map_location="cpu", weights_only=False)
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise
            yield f"{state} cannot be read ({': '.join((type(error).__name__, *str(error).splitlines()[:1]))})"
            return
        ends: dict[str, int] = {}
        for piece in stored:
            ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
        for name, end in ends.items():
            file = state / name
            if not file.is_file():
                yield f"{file} is missing"
            elif (size := file.stat().st_size) < end:
                yield f"{file} is cut off: {size} of {end} bytes"


def _of_models(checkpoint: Path) -> Iterator[str]:
    for config in sorted(checkpoint.glob("**/config.json")):
        try:
            read_model(config.parent)
        except ModelFilesError as error:
            yield str(error)
