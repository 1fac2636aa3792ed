"""Read a run directory for the report.

For a missing, broken or incomplete file, a sentence is added to `problems`. A file may be large, come from an older
version, or end in an incomplete line. Values that are not finite numbers are left out.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from roll_opd.tracking.run_directory import METRICS, PREFLIGHT, RUN_FACTS, SAMPLES, VALIDATION_SAMPLES

CONFIG, SUMMARY = "config.yaml", "summary.json"
RUN_FILES = (METRICS, CONFIG, RUN_FACTS, SUMMARY)  # every run directory has at least one of these files
STEP = re.compile(rb'\{"step": ?(\d{1,9})[,}]')
BROKEN = (ValueError, RecursionError)  # of parsing


class NoRun(Exception):
    """There is no run at the path; the message is shown to the user."""


@dataclass(frozen=True)
class StepLines:
    """An index of a JSON Lines file by step.

    A line is parsed when it is accessed, because the file may have gigabytes.
    """

    path: Path
    places: Mapping[int, list[int]] = field(default_factory=dict)  # step -> byte offsets of its lines

    @property
    def steps(self) -> list[int]:
        return sorted(self.places)

    def rows(self, wanted: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Yield the rows of the steps in `wanted`; skip broken lines."""
        try:
            with self.path.open("rb") as file:
                for step in wanted:
                    for place in self.places.get(step, ()):
                        file.seek(place)
                        row = _parsed(file.readline())
                        if row is not None:
                            yield {**row, "step": step}
        except OSError:
            return  # the file was removed after indexing


@dataclass(frozen=True)
class RunRecord:
    """Content of a run directory."""

    path: Path
    metrics: list[dict[str, float]]  # one row per step, in ascending order; finite numbers only, including `step`
    summary: dict[str, Any]  # empty before the end of the run
    preflight: dict[str, Any]  # teacher -> checks
    facts: dict[str, Any]  # content of `run.json`, written at the start: mode, machine, versions
    config: dict[str, Any]
    config_text: str
    samples: StepLines
    answers: StepLines  # answers to held-out prompts
    written: datetime | None  # time of the last step
    problems: list[str]  # sentences

    @property
    def last_step(self) -> int:
        return int(self.metrics[-1]["step"]) if self.metrics else 0


def find_run(path: Path) -> Path:
    """Return the run directory: `path` itself, or the target of the link `latest` in it.

    Raises `NoRun` if there is no run at either place.
    """
    for place in (path, path / "latest"):
        if any((place / name).exists() for name in RUN_FILES):
            return place.resolve()
    if not path.is_dir():
        raise NoRun(f"{path}: no such directory; pass the path of a run directory, such as output/demo/latest")
    raise NoRun(f"{path} is not a run directory, as it has none of {', '.join(RUN_FILES)}")


def read_run(path: Path) -> RunRecord:
    """Read a run directory."""
    problems: list[str] = []
    metrics = _metrics(path / METRICS, problems)
    config_text = _text(path / CONFIG, problems)
    summary = _mapping(path / SUMMARY, problems, optional=True)
    if metrics and summary and summary.get("steps") != metrics[-1]["step"]:
        summary = {}  # an earlier part of a resumed run has written the summary
    return RunRecord(
        path=path,
        metrics=metrics,
        summary=summary,
        preflight=_mapping(path / PREFLIGHT, problems, optional=True) or summary.get("preflight", {}),
        facts=_mapping(path / RUN_FACTS, problems, optional=True),
        config=_config(config_text, problems),
        config_text=config_text,
        samples=_index(path / SAMPLES, problems),
        answers=_index(path / VALIDATION_SAMPLES, problems),
        written=_written(path / METRICS),
        problems=problems,
    )


def number(value: Any) -> float | None:
    """Return `value` as a float if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _metrics(path: Path, problems: list[str]) -> list[dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    broken = 0
    for line in _lines(path, problems):
        row = _parsed(line)
        step = row.get("step") if row is not None else None
        if row is None or not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**9:
            broken += 1
            continue
        numbers = {name: value for name, given in row.items() if (value := number(given)) is not None}
        found.setdefault(step, {}).update(numbers)
    _count_broken(path, broken, problems)
    return [found[step] for step in sorted(found)]


def _index(path: Path, problems: list[str]) -> StepLines:
    places: dict[int, list[int]] = {}
    broken = begin = 0
    for line in _lines(path, problems, optional=True):
        match = STEP.match(line)
        if match and line.rstrip().endswith(b"}"):
            places.setdefault(int(match[1]), []).append(begin)
        else:
            broken += 1
        begin += len(line)
    _count_broken(path, broken, problems)
    return StepLines(path, places)


def _count_broken(path: Path, lines: int, problems: list[str]) -> None:
    if lines:
        of_lines = f"{lines} lines cannot be read and are" if lines > 1 else "1 line cannot be read and is"
        problems.append(f"{path.name}: {of_lines} left out.")


def _lines(path: Path, problems: list[str], optional: bool = False) -> Iterator[bytes]:
    """Yield the lines of a regular file, with their line ends.

    Other files, such as a FIFO, are skipped, because reading them could block.
    """
    try:
        if path.is_file():
            with path.open("rb") as file:
                yield from file
        elif path.exists():
            problems.append(f"{path.name} is not a regular file and is left out.")
        elif not optional:
            problems.append(f"{path.name} is missing: its content is left out.")
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror}).")


def _text(path: Path, problems: list[str], optional: bool = False) -> str:
    return b"".join(_lines(path, problems, optional)).decode("utf-8", errors="replace")


def _mapping(path: Path, problems: list[str], optional: bool = False) -> dict[str, Any]:
    text = _text(path, problems, optional)
    value = _parsed(text.encode()) if text else {}
    if value is None:
        problems.append(f"{path.name} is not a JSON object and is left out.")
    return value or {}


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except BROKEN:
        return None
    return row if isinstance(row, dict) else None


def _config(text: str, problems: list[str]) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text) or {}
    except (yaml.YAMLError, *BROKEN):
        problems.append(f"{CONFIG} is not valid YAML; it is shown as text.")
        return {}
    return value if isinstance(value, dict) else {}


def _written(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError:
        return None
