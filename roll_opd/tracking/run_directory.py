"""The run directory: paths of its files, a lock, atomic writes, and JSON Lines files that survive a kill.

The directory of a run is `<output_dir>/<exp_name>/<run id>/`. The link `<output_dir>/<exp_name>/latest` points to the
run that was the last to log its first step or to resume. The driver locks the directory, because a second driver would
truncate the files of the first driver.

A kill may leave an incomplete last line in a JSON Lines file. A resume truncates the JSON Lines files to the resumed
step.
"""

import errno
import fcntl
import itertools
import json
import math
import os
import secrets
import shutil
import socket
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from roll_opd.base.failures import ConfigError

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
PROMPTS = "prompts.jsonl"
LEDGER = "ledger.jsonl"
LOSSES = "losses.jsonl"
SKIPPED_SAMPLES = "skipped_samples.jsonl"
PREFLIGHT = "preflight.json"
VALIDATION_SAMPLES = "validation_samples.jsonl"
RUN_FACTS = "run.json"
RESUMING = "resuming_after"  # key of run.json while a resume changes the directory: the step
TEACHER_ANSWERS = "teacher_answers"
CHECKPOINTS, STEP, SUPERSEDED = "checkpoints", "step_", "superseded_"  # directory and name prefixes of checkpoints
STATE_FILE = "run_state.json"  # the last file of a checkpoint
# JSON Lines with a `step` in each row
STEP_FILES = (METRICS, SAMPLES, PROMPTS, LEDGER, SKIPPED_SAMPLES, VALIDATION_SAMPLES)


@dataclass(frozen=True)
class RunDirectory:
    """Directory of one run. `create` makes a new directory, and `resume` opens an existing one."""

    path: Path
    # directories that `create` made: `path` and its new parents, innermost first
    made_directories: tuple[Path, ...] = ()
    set_aside: tuple[Path, ...] = ()  # renamed checkpoints of steps after the resumed checkpoint

    @classmethod
    def create(cls, output_dir: str | Path, exp_name: str) -> "RunDirectory":
        """Make the directory `<output_dir>/<exp_name>/<run id>` with a new run id.

        Raises `OSError` if the directory cannot be written, and `FileExistsError` if `latest` is not a link.
        """
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        path = Path(output_dir) / exp_name / run_id
        latest = path.parent / "latest"
        if latest.exists() and not latest.is_symlink():
            raise FileExistsError(f"{latest} must be a link to the newest run, but is not a link: move this path away")
        run = cls(path, tuple(takewhile(lambda parent: not parent.exists(), (path, *path.parents))))
        run.path.mkdir(parents=True)
        return run

    @classmethod
    def resume(cls, path: str | Path, step: int) -> "RunDirectory":
        """Reopen a run to continue it after step `step`, and point `latest` to it.

        Rows of later steps are removed from all `STEP_FILES`. Checkpoints of later steps are renamed, because they no
        longer belong to the history of this run. Raises `FileNotFoundError` if the directory does not exist.
        """
        path = Path(path).resolve()
        if not path.is_dir():
            raise FileNotFoundError(f"there is no run at {path} to resume")
        # a kill during the resume leaves this mark, so that an audit does not expect complete records
        if facts := cls(path).read_facts():
            write_atomic(path / RUN_FACTS, json.dumps({**facts, RESUMING: step}, indent=2) + "\n")
        # renamed before the logs are truncated: after a kill between the two, a resume must not find a checkpoint whose
        # steps are missing in the logs
        aside = [_set_aside(later) for saved, later in checkpoints_of(path).items() if saved > step]
        run = cls(path, set_aside=tuple(aside))
        for name in STEP_FILES:
            truncate_jsonl(run.path / name, step)
        run.link_latest()
        return run

    @property
    def has_begun(self) -> bool:
        """Whether the run has a checkpoint or a file of metrics. Metrics of step 0 also count."""
        return self.metrics_file.exists() or bool(checkpoints_of(self.path))

    def discard(self) -> None:
        """Remove a run without results, and the parent directories that `create` made for it."""
        shutil.rmtree(self.path, ignore_errors=True)
        for parent in self.made_directories[1:]:
            with suppress(OSError):  # not empty
                parent.rmdir()

    def inherit_answers(self, earlier: Path) -> None:
        """Copy the stored answers of teacher servers from the directory of the run that this run resumes."""
        if (earlier / TEACHER_ANSWERS).is_dir():
            shutil.copytree(earlier / TEACHER_ANSWERS, self.teacher_answers)

    @staticmethod
    def runs(output_dir: str | Path, exp_name: str) -> list[Path]:
        """Return the run directories of an experiment, from the newest to the oldest."""
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

    @property
    def teacher_answers(self) -> Path:
        """Directory of the answers of teacher servers, for resumes of this run."""
        return self.path / TEACHER_ANSWERS

    def checkpoint(self, step: int) -> Path:
        """Return the path of the checkpoint of `step`. The checkpoint need not exist."""
        return self.checkpoints / f"{STEP}{step}"

    def write_config(self, yaml: str) -> None:
        """Write the resolved configuration atomically."""
        write_atomic(self.config_file, yaml)

    def read_config(self) -> dict[str, Any]:
        """Return the configuration that `write_config` wrote, as plain data.

        The result is empty if no configuration was written.
        """
        if not self.config_file.exists():
            return {}
        return yaml.safe_load(self.config_file.read_text(encoding="utf-8")) or {}

    def read_facts(self) -> dict[str, Any]:
        """Return the content of `run.json`. The result is empty if the file is missing or cannot be read."""
        try:
            facts = json.loads((self.path / RUN_FACTS).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return facts if isinstance(facts, dict) else {}

    @property
    def id(self) -> str | None:
        """Id of the run: the name that its directory had at the start. None if an earlier version started the run."""
        facts = self.read_facts()
        return facts.get("id") if facts else self.path.name

    def write_preflight(self, name: str, rows: list[dict[str, str]]) -> None:
        """Store the preflight results of a role. They are stored even if the preflight then stops the run."""
        write_atomic(self.path / PREFLIGHT, json.dumps({**self.read_preflight(), name: rows}, indent=2) + "\n")

    def read_preflight(self) -> dict[str, Any]:
        """Return a dict from role to stored preflight results. The dict is empty if no results are stored."""
        file = self.path / PREFLIGHT
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def append_jsonl(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append `rows` to the file `name`, one JSON object per line. Either all rows are written or none.

        Raises `OSError` if a row cannot be written, for example on a full disk.
        """
        text = "".join(f"{to_json(row)}\n" for row in rows)
        rest = text.encode(errors="backslashreplace")  # half of a surrogate pair is escaped as in JSON
        with (self.path / name).open("ab", buffering=0) as file:  # `close` would write the buffer again
            end = file.tell()
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError as error:
                file.truncate(end)  # removes an incomplete line, to which the next row would be appended
                error.filename = str(self.path / name)
                raise

    def link_latest(self) -> None:
        """Point `latest` to this run. The link is replaced atomically."""
        latest = self.path.parent / "latest"
        fresh = self.path.parent / f".latest-{secrets.token_hex(3)}"
        fresh.symlink_to(self.path.name, target_is_directory=True)
        os.replace(fresh, latest)


def checkpoints_of(run: Path) -> dict[int, Path]:
    """Return a dict from step to checkpoint path, in descending order of steps.

    Incomplete checkpoints are included.
    """
    names = {path: path.name.removeprefix(STEP) for path in (run / CHECKPOINTS).glob(f"{STEP}*")}
    found = {int(name): path for path, name in names.items() if name.isdecimal()}
    return dict(sorted(found.items(), reverse=True))


def complete_checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run directory, newest first."""
    return [path for path in checkpoints_of(run).values() if (path / STATE_FILE).is_file()]


def _set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint so that a resume does not find it. Return the new path."""
    places = (checkpoint.with_name(f"{SUPERSEDED}{checkpoint.name}.{number}") for number in itertools.count(1))
    place = next(place for place in places if not place.exists())
    os.replace(checkpoint, place)
    return place


def to_json(value: Any) -> str:
    """Return `value` as one line of strict JSON.

    NaN and infinity become null. Values of f32 arrays are written with as few digits as possible.
    """
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        if value.dtype == np.float32:  # shortest decimals that read back as this f32
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
    """Return the objects of a JSON Lines file, or an empty list if the file is missing.

    Incomplete lines are skipped.
    """
    path = Path(path)
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # a line may be incomplete after a kill
        if isinstance(row, dict):
            rows.append(row)
    return rows


def truncate_jsonl(path: Path, step: int) -> None:
    """Remove the rows of all steps after `step`. Rows without a step are kept. The file is replaced atomically."""
    if path.exists():
        kept = [row for row in read_jsonl(path) if row.get("step", step) <= step]
        write_atomic(path, "".join(f"{to_json(row)}\n" for row in kept))


def checksum(text: str) -> int:
    """Return the CRC-32 of a text."""
    return zlib.crc32(text.encode(errors="surrogatepass"))


def write_atomic(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, so that after a kill the file has either the old or the new content."""
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


LOCK = ".driver"
# errors of file systems without locks, where other drivers cannot be detected
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Hold the lock of `run` inside the block. Raises `ConfigError` if another process holds the lock.

    The kernel releases the lock when the process ends, even after a kill. On a file system without locks, nothing is
    locked.
    """
    with open(run / LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip() or "a process"
            raise ConfigError(
                [f"{run} belongs to a run that is still running ({who}): wait for the end of the run, or stop it"]
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield
