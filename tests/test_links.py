"""The links of the Markdown pages have targets, and the paths and modules that the pages name exist."""

import fnmatch
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.each import each

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path.relative_to(ROOT)
    for path in (*ROOT.glob("*.md"), *(page for top in ROOT.glob("[!.]*/") for page in top.rglob("*.md")))
    if not {"output", "build", "dist", ".venv"} & set(path.relative_to(ROOT).parts)
)

FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
ADDRESS = re.compile(r"[a-z]+:")  # https:, mailto:
TOPS = "benchmarks|configs|docker|docs|examples|requirements|roll_opd|scripts|tests"
FILE = re.compile(rf"(?:{TOPS})/[\w./*-]*")
KEYS = {"test_cases", "test_case_function", "test_list", "test_imports", "test_setup_code"}  # of rows, and no tests
MODULE = re.compile(r"roll_opd(?:\.\w+)+")


@cache
def prose(page: Path) -> str:
    return FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page: `What it's for` is `what-its-for`."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in HEADING.findall(prose(page)):
        text = LINK.sub(lambda link: link[0].partition("](")[0][1:], heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def dead_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(CODE.sub("", prose(page))):
        if ADDRESS.match(target):
            continue
        name, _, anchor = target.partition("#")
        there = (ROOT / page.parent / name).resolve() if name else ROOT / page
        if not there.is_relative_to(ROOT):
            yield f"{target} leads out of the repository"
        elif not there.exists():
            yield f"{target} does not exist"
        elif anchor and anchor not in anchors(there.relative_to(ROOT)):
            yield f"{target}: no such heading"


def exists(name: str) -> bool:
    """Whether a path, a pattern or a dotted name of the package in a page names something."""
    if FILE.fullmatch(name):
        return any(ROOT.glob(name.rstrip("/")))
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        if path.is_dir():
            path = path / "__init__.py"
        path = path.with_suffix(".py")
        if path.is_file():
            return all(re.search(rf"\b{part}\b", path.read_text(encoding="utf-8")) for part in parts[length:])
    return False


@cache
def names_of_tests() -> set[str]:
    """Names of all test functions and test files."""
    files = list((ROOT / "tests").rglob("test_*.py"))
    functions = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
    return {path.stem for path in files} | {name for path in files for name in functions.findall(path.read_text())}


def test_the_pages_are_found() -> None:
    assert Path("README.md") in PAGES and Path("docs/rewards/README.md") in PAGES


def test_anchors_are_those_of_the_headings(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# What it's for\n\n```\n# code\n```\n## `key_s` of [a page](x.md)\n## Twice\n## Twice\n")
    assert anchors(page) == {"what-its-for", "key_s-of-a-page", "twice", "twice-1"}


def test_files_modules_and_functions_exist_and_typos_do_not() -> None:
    assert exists("roll_opd/commands/main.py") and exists("examples/start_*") and exists("roll_opd.commands.main.main")
    assert (
        exists("roll_opd.commands.main")
        and not exists("roll_opd.commands.main.maim")
        and not exists("roll_opd/clip.py")
    )
    assert not exists("roll_opd.clip")


@each("page", PAGES)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert list(dead_links(page)) == []


@each("page", PAGES)
def test_paths_and_modules_on_a_page_exist(page: Path) -> None:
    named = {name for name in CODE.findall(prose(page)) if FILE.fullmatch(name) or MODULE.fullmatch(name)}
    assert [name for name in sorted(named) if not exists(name)] == []


@each("page", PAGES)
def test_named_tests(page: Path) -> None:
    named = {name for name in CODE.findall(prose(page)) if re.fullmatch(r"test_\w+\*?", name)} - KEYS
    missing = [name for name in sorted(named) if not fnmatch.filter(names_of_tests(), name)]
    assert missing == [], "no test or file of tests has this name"


def test_the_index_has_every_page() -> None:
    index = Path("docs/README.md")
    linked = {(index.parent / target.partition("#")[0]).as_posix() for target in LINK.findall(prose(index))}
    assert [str(page) for page in PAGES if page.parts[0] == "docs" and page != index and str(page) not in linked] == []
