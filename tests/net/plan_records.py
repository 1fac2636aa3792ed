"""Results of the planner for a configuration, as JSON: the plan with all its fields, or the messages of the refusal."""

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from planner_adapter import REPOSITORY, Planner, plan_as_json, problems_of

KEY = re.compile(r"([A-Za-z_][\w.@*-]*(?:\[\d+\])?): ")  # how a message begins that is about a key

Record = dict[str, Any]


def message(severity: str, text: str) -> dict[str, str]:
    """Return a message with its key, or "" if it has none."""
    found = KEY.match(text)
    return {"severity": severity, "key": found[1] if found else "", "text": text}


def recording(planner: Planner, records: list[Record], roots: Iterable[Path] = ()) -> Planner:
    """Return the planner, which also appends the arguments and the result of each call to `records`.

    Paths below `roots`, which differ from run to run, are written as {root}.
    """

    def load_plan(config_path: str, config_name: str, *arguments: Any, **options: Any) -> Any:
        shown = {name: value for name, value in options.items() if not callable(value)}
        record: Record = {
            "inputs": {
                "config": f"{config_path}/{config_name}",
                "yaml": _text(Path(config_path), config_name),
                "overrides": [list(map(str, part)) for part in arguments],
                "options": shown,
            }
        }
        try:
            plan = planner(config_path, config_name, *arguments, **options)
        except Exception as error:
            problems = problems_of(error)
            said = [message("problem", text) for text in problems or ()]
            outcome = {"messages": said} if problems is not None else {"error": type(error).__name__}
            records.append(without_roots(record | outcome, roots))
            raise
        records.append(without_roots(record | plan_record(plan), roots))
        return plan

    return load_plan


def plan_record(plan: Any) -> Record:
    """Return a plan as `roll-opd plan --json` shows it, all its fields, and its warnings as messages."""
    content = plan_as_json(plan)
    warnings = content.pop("warnings")
    fields = plain(plan)
    fields.pop("warnings")
    return {"plan": content, "fields": fields, "messages": [message("warning", text) for text in warnings]}


def plain(value: Any) -> Any:
    """Return dataclasses, mappings and sequences as JSON values, with the class of each dataclass."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def without_roots(record: Any, roots: Iterable[Path]) -> Any:
    """Return a record without the directories of this run and this checkout."""
    text = json.dumps(record, sort_keys=True, ensure_ascii=False)
    for root in roots:
        # with the directory of a test, whose name ends in a number
        text = re.sub(re.escape(str(root)) + r'(?:/[^/"\\ ,;:)\']*\d)?', "{root}", text)
    return json.loads(text.replace(str(REPOSITORY), "{repository}").replace(str(Path.home()), "{home}"))


def paths_of_difference(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each place where two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            if key not in one or key not in other:
                yield f"{path}.{key}: only {'after' if key in other else 'before'}"
            else:
                yield from paths_of_difference(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from paths_of_difference(*pair, f"{path}[{number}]")
    elif one != other:
        yield f"{path}: {_short(one)} -> {_short(other)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 120 else f"{text[:117]}..."


def _text(directory: Path, name: str) -> str:
    """Return the YAML text of a configuration, or "" if it cannot be read, as for examples in other directories."""
    file = directory / name
    file = file if file.suffix in (".yaml", ".yml") else file.with_name(f"{file.name}.yaml")
    try:
        return file.read_text(encoding="utf-8") if file.stat().st_size < 200_000 else ""
    except (OSError, UnicodeDecodeError, ValueError):
        return ""
