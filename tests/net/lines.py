"""Lines of the package that tests execute, by function, and comparison with a later revision.

    python tests/net/lines.py record FILE.json [arguments of pytest]
    python tests/net/lines.py combine DIR FILE.json
    python tests/net/lines.py compare EARLIER.json LATER.json

`record` measures all processes that pytest starts, including Ray's and the forks of the preloaded server, until they
last save. It misses the last seconds of a killed process, and processes that start Python without site packages (`-S`)
or with another environment (the code sandbox). It needs the package `coverage`, and puts a file into the interpreter's
site packages while it runs. `combine` makes the JSON of a directory of data files.

`compare` matches functions by name, in any file. Functions with the same name are matched by the names of their files,
else by their order. It returns 1 if a smaller share of the lines of a function in both is executed.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import roll_opd

PACKAGE = Path(roll_opd.__file__).resolve().parent
HOOK = Path(__file__).with_name("measured")
LEAST = 0.005  # of a share, to count as smaller
Functions = dict[str, dict[str, tuple[int, int]]]  # file -> function -> executed lines, all lines


def record(file: Path, arguments: Sequence[str]) -> int:
    """Run pytest and write the lines that it executed; return its exit code."""
    started = Path(sysconfig.get_path("purelib"), "measured_lines.pth")
    with tempfile.TemporaryDirectory(prefix="lines-") as scratch:
        settings = Path(scratch, "settings")
        settings.write_text(json.dumps({"package": str(PACKAGE), "data": f"{scratch}/data"}))
        started.write_text(f"import sys; sys.path.append({str(HOOK)!r}); import measured_lines\n")
        try:
            environment = {**os.environ, "MEASURED_LINES": str(settings)}
            command = [sys.executable, "-m", "pytest", *arguments]
            code = subprocess.run(command, cwd=PACKAGE.parent, env=environment).returncode
        finally:
            started.unlink()
        combine(Path(scratch), file)
    return code


def combine(directory: Path, file: Path) -> None:
    """Write the lines of a directory's data files, `data.*`, as JSON."""
    import coverage

    measure = coverage.Coverage(data_file=str(directory / "all"), source=[str(PACKAGE)], config_file=False)
    measure.combine([str(path) for path in directory.glob("data.*")], keep=True)
    measure.get_data().touch_files(map(str, PACKAGE.rglob("*.py")))  # those that nothing has imported count
    measure.json_report(outfile=str(directory / "report.json"))
    functions: Functions = {}
    lines: dict[str, list[int]] = {}
    for name, found in json.loads((directory / "report.json").read_text())["files"].items():
        path = str(Path(name).resolve().relative_to(PACKAGE))
        lines[path] = found["executed_lines"]
        functions[path] = {
            function or "<module>": (part["summary"]["covered_lines"], part["summary"]["num_statements"])
            for function, part in found["functions"].items()
        }
    file.write_text(json.dumps({"functions": functions, "lines": lines}, indent=1) + "\n", encoding="utf-8")


def read(file: Path) -> Functions:
    """Return the functions in a file of `record`."""
    return json.loads(file.read_text(encoding="utf-8"))["functions"]


def matched(earlier: Functions, later: Functions) -> Iterator[tuple[str, str, str]]:
    """Yield (function, file before, file after) for each function of both."""
    places: dict[str, list[str]] = defaultdict(list)
    for file, functions in sorted(later.items()):
        for function in functions:
            places[function].append(file)
    for file, functions in sorted(earlier.items()):
        for function in functions:
            if function == "<module>":
                continue
            left = places[function]
            same = [place for place in left if place == file] or [p for p in left if Path(p).name == Path(file).name]
            if same or left:
                place = (same or left)[0]
                left.remove(place)
                yield function, file, place


def fewer(earlier: Functions, later: Functions) -> list[str]:
    """Return a line for each function with a smaller share of executed lines."""
    found = []
    for function, before, after in matched(earlier, later):
        (executed, count), (executed_now, count_now) = earlier[before][function], later[after][function]
        if count and count_now and executed_now / count_now < executed / count - LEAST:
            found.append(f"{before} -> {after} {function}: {executed} of {count} -> {executed_now} of {count_now}")
    return found


def share(functions: Functions) -> float:
    """Return the executed share of all lines."""
    counts = [count for of_file in functions.values() for count in of_file.values()]
    return sum(executed for executed, _ in counts) / max(sum(count for _, count in counts), 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `record`, `combine` or `compare`."""
    parser = argparse.ArgumentParser(description="Which lines of the package tests execute, by function.")
    commands = parser.add_subparsers(dest="command", required=True)
    recorded = commands.add_parser("record", help="run pytest and measure all its processes")
    recorded.add_argument("file", type=Path)
    combined = commands.add_parser("combine", help="make the JSON of a directory of data files")
    combined.add_argument("directory", type=Path)
    combined.add_argument("file", type=Path)
    compared = commands.add_parser("compare", help="name the functions that are executed less")
    compared.add_argument("earlier", type=Path)
    compared.add_argument("later", type=Path)
    parsed, rest = parser.parse_known_args(arguments)
    if parsed.command == "record":
        return record(parsed.file, rest)
    if parsed.command == "combine":
        combine(parsed.directory, parsed.file)
        return 0
    earlier, later = read(parsed.earlier), read(parsed.later)
    found = fewer(earlier, later)
    print("\n".join([*found, f"{share(earlier):.1%} of the lines before, {share(later):.1%} after"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
