"""Read the JSON files of a model directory. Errors name the file and the remedy."""

import json
from pathlib import Path
from typing import Any

from roll_opd.base.paths import PathError, content

POINTER = b"version https://git-lfs.github.com/spec/"  # start of a git-LFS pointer file


class ModelFilesError(Exception):
    """A model directory is unusable; the message has the reason and the remedy."""


def is_pointer(file: Path) -> bool:
    """Return whether `file` is a git-LFS pointer."""
    with file.open("rb") as stream:
        return stream.read(len(POINTER)) == POINTER


def pointer_sentence(file: Path) -> str:
    """Return the error message for a git-LFS pointer."""
    return f"{file} is a git-LFS pointer, not the file itself; run `git lfs pull` in {file.parent}"


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object. Raises ModelFilesError with file and line if it is not one."""
    try:
        found = content(path)
        if found.startswith(POINTER):
            raise ModelFilesError(pointer_sentence(path))
        value = json.loads(found.decode("utf-8"))
    except PathError as error:
        raise ModelFilesError(str(error)) from None
    except UnicodeDecodeError as error:
        raise ModelFilesError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); download it again"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} is not valid JSON: {error}; download it again") from None
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} should contain a JSON object")
    return value
