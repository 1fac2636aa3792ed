"""Golden records: make a record from a run directory, write it to a file, and read it."""

import gzip
import hashlib
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import deserialize

# metrics and sample fields that depend on time or on the machine, as patterns of `fnmatch`
LEFT_OUT = (
    "time/*",
    "system/*",
    "workflow/seconds_mean",
    "workflow/seconds_max",
    "*env/*/model_seconds",
    "*env/*/environment_seconds",
)
ROWS = ("metrics", "samples", "prompts")  # files of one JSON object a line
SHOWN = 4  # first values of a tensor, for the report of a difference
NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"}

Record = dict[str, Any]


def read_run(directory: Path, command: list[str]) -> Record:
    """Return the record of a finished run: command, weights by tensor, metrics, samples and prompts."""
    parts = {name: _rows(directory / f"{name}.jsonl") for name in ROWS}
    tensors = _tensors(_last_checkpoint(directory))
    whole = {"weights": {name: tensor["sha256"] for name, tensor in tensors.items()}, **parts}
    digests = {name: hashlib.sha256(_canonical(value)).hexdigest() for name, value in whole.items()}
    return {"command": command, "digests": digests, "weights": tensors, **parts}


def write(record: Record, path: Path) -> None:
    """Write a record as gzip'd JSON; equal records give equal files."""
    path.write_bytes(gzip.compress(_canonical(record), compresslevel=9, mtime=0))


def read(path: Path) -> Record:
    """Return the record in a file of `write`."""
    return json.loads(gzip.decompress(path.read_bytes()))


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file without `LEFT_OUT`; an empty list if runs of this kind do not write the
    file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{name: value for name, value in row.items() if not _is_left_out(name)} for row in rows]


def _is_left_out(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in LEFT_OUT)


def _last_checkpoint(directory: Path) -> Path:
    steps = {int(path.name.removeprefix("step_")): path for path in directory.glob("checkpoints/step_*")}
    return steps[max(steps)]


def _tensors(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Return all tensors in the safetensors files of a checkpoint by 'file:name': student, adapter, followers."""
    found = {}
    for file in sorted(checkpoint.rglob("*.safetensors")):
        for name, tensor in sorted(deserialize(file.read_bytes())):
            data = bytes(tensor["data"])
            found[f"{file.relative_to(checkpoint)}:{name}"] = {
                "sha256": hashlib.sha256(data).hexdigest(),
                "dtype": tensor["dtype"],
                "shape": tensor["shape"],
                "first": _first(tensor["dtype"], data),
            }
    return found


def _first(dtype: str, data: bytes) -> list[float]:
    """Return the first values of a tensor; no values for a type that numpy lacks."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2")[:SHOWN].astype("<u4") << 16).view("<f4").tolist()
    return np.frombuffer(data, NUMPY[dtype])[:SHOWN].tolist() if dtype in NUMPY else []
