"""A figure about the project stands on one page, and a test or a program measures it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "tests/README.md", *sorted(ROOT.glob("docs/**/*.md")))
CODE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$|^ {4}[^\n]*$", re.DOTALL | re.MULTILINE)
NOUNS = (
    "classes|commits|configurations|directories|examples|files|floors|formulas|functions|keys|levels|lines|modules"
    "|packages|pages|patterns|plans|rooms|tests|types|YAMLs"
)
FIGURE = re.compile(
    rf"(?<![\w.,:`/-])(\d[\d,]*\d)(?: of(?: the| these| its| ROLL's)?)?(?: [\w'-]+){{0,2}}?(?: of them)? (?:{NOUNS})\b"
)


def bound(path: str, name: str) -> Callable[[], int]:
    """Return a function that reads the constant `name` of a test file, with which the test compares a count."""
    return lambda: int(re.findall(rf"^{name} = (\d+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)[0])


# page -> {figure: its value in a test; None: a rule, or a count that a program repeats}
KNOWN: dict[str, dict[str, Callable[[], int] | None]] = {
    "CONTRIBUTING.md": {"200 lines": None},  # a rule for files
    "docs/architecture.md": {"126 files": bound("tests/net/test_traced_step.py", "MOST_FILES")},
    "docs/rewards/ifeval.md": {"25 functions": None},  # of Tulu 3
    "docs/minimal.md": {"150 lines": bound("tests/test_minimal_opd.py", "MOST_LINES")},
    "docs/coming-from-roll.md": {"107 run configurations": None, "77 of the files": None},  # tests/net/plans.py
}


def test_a_figure_about_the_project_stands_once_and_is_measured() -> None:
    found: dict[str, set[str]] = {}
    for page in PAGES:
        name = str(page if isinstance(page, str) else page.relative_to(ROOT))
        text = " ".join(CODE.sub("", (ROOT / name).read_text(encoding="utf-8")).split())
        if figures := {match[0] for match in FIGURE.finditer(text)}:
            found[name] = figures
    assert found == {page: set(figures) for page, figures in KNOWN.items()}
    for figures in KNOWN.values():
        for text, value in figures.items():
            if value:
                assert value() == int(text.partition(" ")[0]), text


def test_the_runs_with_outages_are_those_of_the_page() -> None:
    runs = json.loads((ROOT / "benchmarks/results/outages.json").read_text(encoding="utf-8"))
    assert {(run["exit"], run["steps"], run["trained"], run["failed"], run["filtered"]) for run in runs} == {
        (0, 5, 40, 0, 0)
    }
    assert not any(run["audit"] for run in runs)
    absence = [run.get("seconds unreachable", run["seconds away"]) for run in runs]
    waits = [sum(run["outage"].values()) - away for run, away in zip(runs, absence, strict=True) if run["outage"]]
    page = " ".join((ROOT / "benchmarks/notes.md").read_text(encoding="utf-8").split())
    resumed = sum("exits" in run for run in runs)
    for figure in (f"{len(runs)} runs", f"{resumed} of them", f"most {max(waits):.0f} s after the service"):
        assert figure in page, figure


def test_the_starts_with_and_without_the_fork_server_are_those_of_the_page() -> None:
    runs = json.loads((ROOT / "benchmarks/results/fork_server.json").read_text(encoding="utf-8"))["runs"]
    page = " ".join((ROOT / "docs/fork-server.md").read_text(encoding="utf-8").split())
    for side, words in (("with", "with the server"), ("without", "without it")):
        first, second = (f"{run['seconds']:.0f}" for run in runs if run["fork server"] == side)
        assert re.search(rf"{first} and {second} s (after the start )?{words}", page)
