"""Read the records of the steps in a run directory, for `audit`.

Every file may be missing, cut or damaged. A value has its type after reading; whatever has another type is damage.
"""

import json
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from roll_opd.tracking.ledger import FATES, VERSIONS
from roll_opd.tracking.run_directory import (
    LEDGER,
    METRICS,
    PROMPTS,
    RESUMING,
    RUN_FACTS,
    SAMPLES,
    checkpoints_of,
)

STATE = "run_state.json"
CONFIG, SUMMARY, CONSOLE = "config.yaml", "summary.json", "console.log"
NOT_WRITTEN = re.compile(rf"{re.escape(METRICS)} cannot be written at step (\d{{1,9}})")  # the run has warned of it
DRAW = re.compile(r"(.*)#(\d{1,18})(?::.*)?", re.DOTALL)  # a group id: id of the prompt, draw, and kind
BROKEN = (
    ValueError,
    RecursionError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
)  # of reading a damaged value
LARGEST = 10**15  # draws and steps; a larger number is damage
T = TypeVar("T")


@dataclass(frozen=True)
class LedgerRow:
    """A row of the ledger."""

    step: int
    fates: Mapping[str, list[int]]  # fate -> draws
    versions: list[tuple[int, int]]  # (oldest, newest) of each trained draw; rows of earlier versions may have none
    checksum: int
    run: str | None  # id of the run, in the first row
    content: Mapping[str, Any] = field(repr=False)  # the row as it was written, for the checksum

    @property
    def draws(self) -> list[int]:
        return [draw for draws in self.fates.values() for draw in draws]


@dataclass(frozen=True)
class LoggedSample:
    """The part of a logged sample that is compared."""

    prompt: str | None  # id of the prompt; None if the group id has another form
    draw: int
    versions: tuple[int, int] | None  # oldest and newest version of its tokens
    tokens: int
    actions: int
    demonstration: bool


@dataclass(frozen=True)
class SourcePosition:
    """Position of the prompt source in a checkpoint: draws below `position` and those in `passed` are done."""

    position: int
    passed: frozenset[int]
    seed: int | None
    size: int | None  # number of prompts, if one stream has all of them
    bounds: tuple[tuple[int, int], ...]  # (first step, `async_generation_ratio`) of each part of the run


@dataclass(frozen=True)
class PartSettings:
    """Consecutive steps with the same settings. None: the setting is unknown."""

    first: int
    bound: int | None  # `async_generation_ratio`
    depth: int | None  # `async_depth`; None also if it is not set
    max_steps: int | None
    samples: int | None  # samples per prompt, if each prompt has the same number


@dataclass
class Evidence:
    """The content of a run directory. None: the file is missing or cannot be read at all."""

    run: Path
    missing: list[str] = field(default_factory=list)  # names of files
    cut: list[str] = field(default_factory=list)  # sentences on files that end in an incomplete line
    damaged: dict[str, list[str]] = field(default_factory=dict)  # file -> sentences
    ledger: list[LedgerRow] | None = None
    metrics: dict[int, dict[str, float]] | None = None
    prompts: dict[int, dict[str, list[str]]] | None = None
    samples: dict[int, list[LoggedSample]] | None = None
    states: dict[int, SourcePosition] = field(default_factory=dict)
    sources: dict[int, dict[str, Any]] = field(default_factory=dict)  # step -> state of the prompt source
    facts: Mapping[str, Any] | None = None
    config: Mapping[str, Any] | None = None
    summary: Mapping[str, Any] | None = None
    # `config.yaml` is not that of the last start: a kill between the writes of it and of `run.json` leaves this too
    is_config_foreign: bool = False
    unwritten: frozenset[int] = frozenset()  # steps whose metrics could not be written

    @property
    def is_ended(self) -> bool:
        """Whether the run has reached its end: its summary was written after its last start."""
        facts = self.facts or {}
        started = None if RESUMING in facts else facts.get("started")
        return self.summary is not None and started is not None and self.summary.get("started") == started

    @property
    def parts(self) -> list[PartSettings] | None:
        """The parts of the run, in ascending order. None if they are unknown."""
        if self.config is None or self.facts is None:
            return None
        try:
            return _parts(self.config, self.facts)
        except BROKEN as error:
            self._damage(RUN_FACTS, f"its parts cannot be read ({_reason(error)})")
            return None

    def _damage(self, name: str, what: str) -> None:
        sentences = self.damaged.setdefault(name, [])
        if (sentence := f"{name}: {what}") not in sentences:
            sentences.append(sentence)


def read(run: Path) -> Evidence:
    """Read the files of a run directory. Raises OSError if the directory cannot be read."""
    names = {path.name for path in run.iterdir()}
    # a run may be in progress; lines that it writes after this moment are not read
    ends = {name: (run / name).stat().st_size for name in (METRICS, PROMPTS, LEDGER, SAMPLES) if name in names}
    found = Evidence(run)
    found.summary = _object(found, SUMMARY, json.loads) if SUMMARY in names else None
    found.facts = _object(found, RUN_FACTS, json.loads)
    found.config = _object(found, CONFIG, yaml.safe_load)
    if found.config is not None and not _is_of_the_start(found):
        found.config, found.is_config_foreign = None, True
    for step, checkpoint in checkpoints_of(run).items():
        name = f"{checkpoint.relative_to(run)}/{STATE}"
        if (checkpoint / STATE).exists() and (state := _object(found, name, json.loads)) is not None:
            try:
                if _whole(state["step"]) != step:
                    raise ValueError(f"its step is {state['step']}")
                found.states[step] = _state(state["source"], state.get("parts"))
                found.sources[step] = state["source"]
            except BROKEN as error:
                found._damage(name, _reason(error))
    if CONSOLE in names:
        text = (_bytes(found, CONSOLE) or b"").decode(errors="replace")
        found.unwritten = frozenset(int(step) for step in NOT_WRITTEN.findall(" ".join(text.split())))
    metrics = _rows(found, METRICS, ends, _metrics)
    prompts = _rows(found, PROMPTS, ends, _prompts)
    found.ledger = None if (rows := _rows(found, LEDGER, ends, _ledger_row)) is None else [row for _, row in rows]
    samples = _rows(found, SAMPLES, ends, _sample)
    found.metrics = None if metrics is None else _by_step(found, METRICS, metrics)
    found.prompts = None if prompts is None else _by_step(found, PROMPTS, prompts)
    if samples is not None:
        found.samples = {}
        for step, sample in samples:
            found.samples.setdefault(step, []).append(sample)
    return found


def _is_of_the_start(found: Evidence) -> bool:
    """Return whether `run.json` has the checksum of `config.yaml`. An earlier version wrote no checksum."""
    written = (found.facts or {}).get("config_checksum")
    return written is None or written == zlib.crc32(_bytes(found, CONFIG) or b"")


def _bytes(found: Evidence, name: str) -> bytes | None:
    """Return the content of a file; None if it is missing or cannot be read, which is recorded."""
    try:
        return (found.run / name).read_bytes()
    except FileNotFoundError:
        found.missing.append(name)
    except OSError as error:
        found._damage(name, f"it cannot be read ({error.strerror or error})")
    return None


def _object(found: Evidence, name: str, parse: Callable[[str], Any]) -> Mapping[str, Any] | None:
    """Return the mapping in a file; None if there is none."""
    data = _bytes(found, name)
    if data is None:
        return None
    try:
        value = parse(data.decode("utf-8"))
    except (*BROKEN, yaml.YAMLError) as error:
        found._damage(name, f"it cannot be read ({_reason(error)})")
        return None
    if not isinstance(value, dict):
        found._damage(name, "its content is not a mapping")
        return None
    return value


def _rows(
    found: Evidence, name: str, ends: Mapping[str, int], read_row: Callable[[dict[str, Any]], T]
) -> list[tuple[int, T]] | None:
    """Return (step, row) for each row of a JSON Lines file. An incomplete last line is cut, another one is damaged."""
    if name not in ends:
        found.missing.append(name)
        return None
    rows: list[tuple[int, T]] = []
    try:
        with (found.run / name).open("rb") as file:  # line by line, as the file may have gigabytes
            lines = iter(lambda: file.readline(max(0, ends[name] - file.tell())), b"")
            for number, line in enumerate(lines, 1):
                try:
                    value = json.loads(line)
                    rows.append((_whole(value["step"]), read_row(value)))
                except BROKEN as error:
                    if line.endswith(b"\n"):
                        found._damage(name, f"line {number} cannot be read ({_reason(error)})")
                    else:
                        found.cut.append(f"{name}: its last line, {number}, is cut off")
    except OSError as error:
        found._damage(name, f"it cannot be read ({error.strerror or error})")
        return None
    return rows


def _by_step(found: Evidence, name: str, rows: Sequence[tuple[int, T]]) -> dict[int, T]:
    by_step: dict[int, T] = {}
    for step, row in rows:
        if step in by_step:
            found._damage(name, f"step {step} occurs twice")
        by_step[step] = row
    return by_step


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error}"
    text = next(iter(str(error).splitlines()), "")
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise ValueError(f"{str(value)[:40]!r} is not a whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]} is not a text")
    return value


def _list(value: Any, of: Callable[[Any], T]) -> list[T]:
    if not isinstance(value, list):
        raise ValueError(f"{str(value)[:40]} is not a list")
    return [of(item) for item in value]


def _pair(value: Any) -> tuple[int, int]:
    oldest, newest = _list(value, _whole)
    return oldest, newest


def _ledger_row(row: dict[str, Any]) -> LedgerRow:
    fates = {fate: _list(row[fate], _whole) for fate in FATES if fate in row or fate in FATES[:2]}
    run = None if row.get("run") is None else _text(row["run"])
    return LedgerRow(_whole(row["step"]), fates, _list(row.get(VERSIONS, []), _pair), _whole(row["checksum"]), run, row)


def _metrics(row: dict[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _prompts(row: dict[str, Any]) -> dict[str, list[str]]:
    return {name: _list(ids, _text) for name, ids in row.items() if name != "step" and (name != "ids" or ids)} | {
        "ids": _list(row["ids"], _text)
    }


def _sample(row: dict[str, Any]) -> LoggedSample:
    match = DRAW.fullmatch(row["group_id"]) if isinstance(row.get("group_id"), str) else None
    versions = [version for version, count in _list(row.get("versions") or [], tuple) if version is not None and count]
    actions = sum(map(bool, _list(row["action_mask"], bool)))
    return LoggedSample(
        match[1] if match else None,
        int(match[2]) if match else 0,
        (min(map(_whole, versions)), max(map(_whole, versions))) if versions else None,
        len(_list(row["tokens"], _whole)),
        actions,
        bool(row.get("demonstration")),
    )


def _state(source: Mapping[str, Any], parts: Any) -> SourcePosition:
    streams, seed, size = source.get("streams"), source.get("seed"), None
    taken = _whole(source["taken"]) if "taken" in source else sum(_whole(stream["taken"]) for stream in streams or ())
    if streams and len(streams) == 1 and streams[0].get("tags") is None and streams[0]["name"] == "all":
        size = sum(_whole(of_file["prompts"]) for of_file in source["files"])
    passed = frozenset(_list(source.get("passed", []), _whole))
    known = [(_whole(part["first"]), part["settings"]) for part in parts or () if part.get("settings")]
    bounds = tuple(
        (first, bound) for first, of in known if (bound := _versions(of.get("async_generation_ratio"))) is not None
    )
    return SourcePosition(taken, passed, seed if type(seed) is int else None, size or None, bounds)


def _parts(config: Mapping[str, Any], facts: Mapping[str, Any]) -> list[PartSettings]:
    """Return the parts of a run.

    `config.yaml` has the settings of the last part, and `run.json` has the settings that changed before each part.
    """
    settings: dict[str, Any] = {
        "async_generation_ratio": config.get("async_generation_ratio", 0),
        "async_depth": config.get("async_depth"),
        "max_steps": config.get("max_steps"),
        "num_return_sequences_in_group": config.get("num_return_sequences_in_group"),
    }
    is_single_turn = facts.get("pipeline") == "rlvr"
    found: list[PartSettings] = []
    for part in reversed(_list(facts["parts"], dict)):
        bound, depth, steps, samples = settings.values()
        found.append(
            PartSettings(
                _whole(part["first"]),
                _versions(bound),
                _versions(depth),
                steps if type(steps) is int and steps > 0 else None,
                samples if type(samples) is int and is_single_turn else None,
            )
        )
        changed = part["changed"]
        settings = {
            key: None if changed is None else changed[key][0] if key in changed else value
            for key, value in settings.items()
        }
    return found[::-1]


def _versions(value: Any) -> int | None:
    """Return a number of versions, which a file may have as a float (1.0); None if it is none."""
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    return value if type(value) is int and 0 <= value <= LARGEST else None


def steps_of(rows: Mapping[int, Any]) -> list[int]:
    """Return the steps of the updates in ascending order: all but step 0, which is the state before training."""
    return sorted(step for step in rows if step)
