"""Record the planner's results for many configurations, and compare two records.

    python tests/net/plans.py record DIR [--roll CHECKOUT] [--without-tests]
    python tests/net/plans.py compare EARLIER LATER [--renamed NAMES.csv] [--texts TEXTS.csv]

`record` plans, by `roll-opd plan --json`, our examples, the fragments in `configs/` and ROLL's YAML files, and records
every plan of the tests in `tests/config`, with the `roll_opd` that is installed for this interpreter.

`compare` returns 1 unless plans with all their fields, and the severities and keys of messages, are equal. Texts of
messages may differ: `--texts` writes them as a table. `--renamed` is a table old,new of names of fields.
"""

import argparse
import contextlib
import csv
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "config")]

from plan_records import Record, message, paths_of_difference, recording, without_roots  # noqa: E402
from plan_sources import Source, our_sources, planned_in, roll_sources  # noqa: E402
from planner_adapter import REPOSITORY, replace_planner  # noqa: E402

PASSING = {  # what differs from run to run and from machine to machine: its pattern, and what stands for it
    re.escape(tempfile.gettempdir()) + r"/tmp\w{8}": "{temporary}",  # directories that tests make by themselves
    r"20\d{6}[-_]\d{6}": "{time}",
    r"[\d.]+ GiB free": "{space} free",
}
PROBLEM = re.compile(r"^  \d+\. ", re.MULTILINE)
SHOWN = 40  # lines of differences that are printed


def record(directory: Path, roll: Path | None, *, with_tests: bool) -> None:
    """Write `commands.jsonl` and `tests.jsonl` into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="plans-") as scratch:
        root = Path(scratch)
        if with_tests:
            _record_tests(directory / "tests.jsonl", root / "tests")
        sources = [*our_sources(root), *(roll_sources(roll, root) if roll else ())]
        calls: list[Record] = []
        replace_planner(lambda planner: recording(planner, calls, [root]))
        with (directory / "commands.jsonl").open("w", encoding="utf-8") as file:
            for source in sources:
                calls.clear()
                found = without_roots(_commanded(source), [root])
                fields = {"fields": calls[0]["fields"]} if calls and "fields" in calls[0] else {}
                print(json.dumps({"name": source.name, **found, **fields}, ensure_ascii=False), file=file)


def _commanded(source: Source) -> Record:
    """Return the output of `roll-opd plan --json` for a configuration."""
    words = ["roll-opd", "plan", "--json", str(source.file), *source.overrides]
    output, errors = io.StringIO(), io.StringIO()
    environment = mock.patch.dict(os.environ, {"COLUMNS": "100000"})
    with environment, planned_in(source), mock.patch.object(sys, "argv", words):
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                runpy.run_module("roll_opd", run_name="__main__")
                code = 0
            except SystemExit as ended:
                code = int(ended.code or 0)
    if code:
        _, *problems = PROBLEM.split(errors.getvalue())
        said = [message("problem", text.strip()) for text in problems or [errors.getvalue()]]
        return {"exit": code, "messages": said}
    plan = json.loads(output.getvalue())
    return {"exit": 0, "messages": [message("warning", text) for text in plan.pop("warnings")], "plan": plan}


def _record_tests(file: Path, root: Path) -> None:
    file.unlink(missing_ok=True)
    names = {"PYTHONPATH": HERE, "PLAN_RECORDS": file.resolve(), "PLAN_ROOT": root}
    # tests that loop over a set plan in the same order every time
    environment = {**os.environ, "PYTHONHASHSEED": "0", **{name: str(value) for name, value in names.items()}}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "plan_recorder", f"--basetemp={root}", "tests/config"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"tests/config fails:\n{done.stdout[-3000:]}")


def read(directory: Path) -> dict[str, Record]:
    """Return the records of a directory by name; the name of a test excludes its directory, because files move."""
    found: dict[str, Record] = {}
    for file in sorted(directory.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            for pattern, meaning in PASSING.items():
                line = re.sub(pattern, meaning, line)
            made = json.loads(line)
            found[re.sub(r"^tests/[\w/]*?(?=\w+\.py::)", "", made["name"])] = made
    return found


def compare(
    earlier: dict[str, Record], later: dict[str, Record], renamed: dict[str, str], texts: Path | None = None
) -> int:
    """Print the differences of two records, and return the number of configurations with a difference that counts."""
    differences: Counter[str] = Counter()
    different, rewritten = set(), Counter()
    for name in sorted(earlier.keys() | later.keys()):
        if name not in earlier or name not in later:
            where = "before" if name in earlier else "after"
            print(f"only {where}: {name}")
            different |= {name} if name in earlier else set()
            continue
        one, other = _renamed(earlier[name], renamed), later[name]
        found = list(paths_of_difference(_compared(one), _compared(other)))
        for line in found[:SHOWN]:
            differences[line] += 1
        if found:
            different.add(name)
        elif "messages" in one:
            pairs = zip(one["messages"], other["messages"], strict=True)
            rewritten.update((a["text"], b["text"]) for a, b in pairs if a["text"] != b["text"])
    for line, times in differences.most_common(SHOWN):
        print(f"{times:6} x {line}")
    for name in sorted(different)[:SHOWN]:
        print(f"different: {name}")
    if texts:
        with texts.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("old", "new", "times"), *((*pair, n) for pair, n in rewritten.most_common())])
    print(
        f"{len(earlier)} configurations before, {len(later)} after, {len(different)} differ,"
        f" {len(rewritten)} texts of messages were rewritten"
    )
    return len(different)


def _compared(made: Record) -> Record:
    """Return the part of a record that must be equal: without the texts of messages and inputs."""
    kept = {key: value for key, value in made.items() if key in ("exit", "plan", "fields", "error")}
    return kept | {"messages": [[one["severity"], one["key"]] for one in made.get("messages", ())]}


def _renamed(value: object, names: dict[str, str]) -> Record:
    """Return a record with the new names of fields."""

    def visit(part: object) -> object:
        if isinstance(part, dict):
            return {names.get(key, key): visit(item) for key, item in part.items()}
        return [visit(item) for item in part] if isinstance(part, list) else part

    return visit(value) if names else value  # type: ignore[return-value]


def _table(file: Path | None) -> dict[str, str]:
    rows: Iterable[dict[str, str]] = ()
    if file:
        rows = csv.DictReader(file.read_text(encoding="utf-8").splitlines())
    return {row["old"]: row["new"] for row in rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `record` or `compare`."""
    parser = argparse.ArgumentParser(description="Record and compare what the planner makes of many configurations.")
    commands = parser.add_subparsers(dest="command", required=True)
    recorded = commands.add_parser("record", help="plan everything and write the records into a directory")
    recorded.add_argument("directory", type=Path)
    recorded.add_argument("--roll", type=Path, help="a repository of ROLL, whose YAML files are planned, too")
    recorded.add_argument("--without-tests", action="store_true", help="leave out what tests/config plans")
    compared = commands.add_parser("compare", help="compare two directories of records")
    compared.add_argument("earlier", type=Path)
    compared.add_argument("later", type=Path)
    compared.add_argument("--renamed", type=Path, help="CSV table old,new of names of fields")
    compared.add_argument("--texts", type=Path, help="where to write the texts that were rewritten")
    parsed = parser.parse_args(arguments)
    if parsed.command == "record":
        record(parsed.directory, parsed.roll, with_tests=not parsed.without_tests)
        return 0
    found = compare(read(parsed.earlier), read(parsed.later), _table(parsed.renamed), parsed.texts)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
