"""The directory a run leaves behind: where each thing is, and JSON lines that survive a kill.

`<output_dir>/<exp_name>/<run id>/` holds the run, `<output_dir>/<exp_name>/latest` links to the newest.
Appended files may end in half a line when a run is killed; resuming cuts them back to the step it resumes
from.
"""

import itertools
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
PROMPTS = "prompts.jsonl"
SKIPPED_SAMPLES = "skipped_samples.jsonl"
PREFLIGHT = "teacher_preflight.json"
VALIDATION_SAMPLES = "validation_samples.jsonl"
RUN_FACTS = "run.json"
CHECKPOINTS, STEP, SUPERSEDED = "checkpoints", "step_", "superseded_"  # where checkpoints are, and how they are named
STEP_FILES = (METRICS, SAMPLES, PROMPTS, SKIPPED_SAMPLES, VALIDATION_SAMPLES)  # JSON lines whose rows carry a `step`


@dataclass(frozen=True)
class RunDirectory:
    """One run's directory; make it with `create` or `resume`."""

    path: Path
    made: tuple[Path, ...] = ()  # it and those above it that were made with it, innermost first
    set_aside: tuple[Path, ...] = ()  # checkpoints of later steps than the one that it goes on from

    @classmethod
    def create(cls, output_dir: str | Path, exp_name: str) -> "RunDirectory":
        """Make `<output_dir>/<exp_name>/<run id>` with a new id, and point `latest` at it.

        Raises `OSError` where it cannot be written, and `FileExistsError` where `latest` is not a link.
        """
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        path = Path(output_dir) / exp_name / run_id
        run = cls(path, tuple(takewhile(lambda parent: not parent.exists(), (path, *path.parents))))
        run.path.mkdir(parents=True)
        run._link_latest()
        return run

    @classmethod
    def resume(cls, path: str | Path, step: int) -> "RunDirectory":
        """Reopen a run, cut its `STEP_FILES` back to rows of `step` and earlier, and point `latest` at it.

        Checkpoints of later steps are set aside under another name: what goes on from `step` does not come after them.
        Raises `FileNotFoundError` where there is no such directory.
        """
        path = Path(path).resolve()
        if not path.is_dir():
            raise FileNotFoundError(f"there is no run at {path} to resume")
        # first of all: what is newest counts where this is killed
        aside = [_set_aside(later) for saved, later in checkpoints_of(path).items() if saved > step]
        run = cls(path, set_aside=tuple(aside))
        for name in STEP_FILES:
            truncate_jsonl(run.path / name, step)
        run._link_latest()
        return run

    @property
    def has_begun(self) -> bool:
        """Whether anything is on record: the state before the first step, or a checkpoint."""
        return self.metrics_file.exists() or bool(checkpoints_of(self.path))

    def discard(self) -> None:
        """Remove a run that never began, with the directories that were made for it, and point `latest` at another."""
        shutil.rmtree(self.path, ignore_errors=True)
        earlier = self.runs(self.path.parent.parent, self.path.parent.name)
        if earlier:
            RunDirectory(earlier[0])._link_latest()
        else:
            (self.path.parent / "latest").unlink(missing_ok=True)
        for parent in self.made[1:]:
            with suppress(OSError):  # another run is in it
                parent.rmdir()

    @staticmethod
    def runs(output_dir: str | Path, exp_name: str) -> list[Path]:
        """Return the run directories of an experiment, newest first; empty where there are none."""
        parent = Path(output_dir) / exp_name
        if not parent.is_dir():
            return []
        found = [entry for entry in parent.iterdir() if entry.is_dir() and not entry.is_symlink()]
        return sorted(found, key=lambda entry: entry.name, reverse=True)

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        return self.path / METRICS

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def checkpoint(self, step: int) -> Path:
        """Return the path of the checkpoint of `step`, which need not exist."""
        return self.checkpoints / f"{STEP}{step}"

    def write_config(self, yaml: str) -> None:
        """Write the resolved configuration, whole or not at all."""
        write_atomic(self.config_file, yaml)

    def read_config(self) -> dict[str, Any]:
        """Return what `write_config` wrote, as plain data; empty before that."""
        if not self.config_file.exists():
            return {}
        return yaml.safe_load(self.config_file.read_text(encoding="utf-8")) or {}

    def keep_preflight(self, teacher: str, rows: list[dict[str, str]]) -> None:
        """Keep what the preflight of a teacher found: a run that it stops has it on record, too."""
        write_atomic(self.path / PREFLIGHT, json.dumps({**self.read_preflight(), teacher: rows}, indent=2) + "\n")

    def read_preflight(self) -> dict[str, Any]:
        """Return what `keep_preflight` kept, by teacher; empty before that."""
        file = self.path / PREFLIGHT
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def append_jsonl(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append `rows` to the file `name`, one JSON object a line, as `to_json` writes them.

        Raises `OSError` where they cannot all be written (a full disk); then none of them is in the file.
        """
        text = "".join(f"{to_json(row)}\n" for row in rows)
        rest = text.encode(errors="backslashreplace")  # half of a surrogate pair is written as JSON writes it
        with (self.path / name).open("ab", buffering=0) as file:  # a buffer would be written again by `close`
            whole = file.tell()
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError as error:
                file.truncate(whole)  # else the next row would join half a line, and both would be lost
                error.filename = str(self.path / name)
                raise

    def _link_latest(self) -> None:
        latest = self.path.parent / "latest"
        if latest.exists() and not latest.is_symlink():
            raise FileExistsError(f"{latest} should be a link to the newest run and is none: move it away")
        fresh = self.path.parent / f".latest-{secrets.token_hex(3)}"
        fresh.symlink_to(self.path.name, target_is_directory=True)
        os.replace(fresh, latest)


def checkpoints_of(run: Path) -> dict[int, Path]:
    """Return the checkpoints of a run directory, whole or not, by step in descending order."""
    names = {path: path.name.removeprefix(STEP) for path in (run / CHECKPOINTS).glob(f"{STEP}*")}
    found = {int(name): path for path, name in names.items() if name.isdecimal()}
    return dict(sorted(found.items(), reverse=True))


def _set_aside(checkpoint: Path) -> Path:
    """Give a checkpoint a name that is none's; return its new path."""
    places = (checkpoint.with_name(f"{SUPERSEDED}{checkpoint.name}.{number}") for number in itertools.count(1))
    place = next(place for place in places if not place.exists())
    os.replace(checkpoint, place)
    return place


def to_json(value: Any) -> str:
    """Return one line of strict JSON: numpy values become plain ones, NaN and infinity null, arrays of f32 their
    shortest decimals.
    """
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        if value.dtype == np.float32:  # the shortest decimals that read back as the same f32, half as long
            value = value.astype(str).astype(np.float64)
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file, without incomplete lines; none where the file is missing."""
    path = Path(path)
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut off by a kill
        if isinstance(row, dict):
            rows.append(row)
    return rows


def truncate_jsonl(path: Path, step: int) -> None:
    """Keep the rows whose `step` is at most `step` (and those that have none); the file is replaced whole."""
    if path.exists():
        kept = [row for row in read_jsonl(path) if row.get("step", step) <= step]
        write_atomic(path, "".join(f"{to_json(row)}\n" for row in kept))


def write_atomic(path: Path, text: str) -> None:
    """Write `text` so that a reader, or a run after a kill, finds either the old file or the new one."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(3)}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)
