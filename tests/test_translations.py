"""Translated pages have the commands, the code, the names and the links of their English pages, as these are now."""

import re
from collections import Counter
from pathlib import Path

import pytest
from translations import accept, changed, digests, original, sections, translated

from tests.each import each

FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)  # a fence without a language is a figure
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n)+")
COMMENT = re.compile(r" *#.*$", re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]*)[^)\s]*\)")
LANGUAGES = {"README.md", "README_zh.md"}  # links from a page to its translation


def code(text: str) -> list[tuple[str, ...]]:
    """Return the code blocks, without comments."""
    fenced = [(language, rest, COMMENT.sub("", body)) for language, rest, body in FENCE.findall(text)]
    return [*fenced, *((COMMENT.sub("", block),) for block in INDENTED.findall(text))]


def targets(page: Path, text: str) -> Counter[str]:
    """Return the pages to which a text links. A link to a translation counts as a link to its English page."""
    places = [(page.parent / name).resolve() if ":" not in name and name else name for name in LINK.findall(text)]
    known = {path: original(path) for path in translated()}
    found = (str(known.get(place, place)) if isinstance(place, Path) else place for place in places)
    return Counter(name for name in found if Path(name).name not in LANGUAGES)


@each("page", translated())
def test_a_translation_is_of_the_english_page_as_it_is_now(page: Path) -> None:
    assert changed(page) == [], "revise the translation, then run scripts/translations.py --accept with its path"


@each("page", translated())
def test_a_translation_has_the_code_names_and_links_of_its_page(page: Path) -> None:
    english = original(page)
    one, other = (path.read_text(encoding="utf-8") for path in (english, page))
    assert code(one) == code(other)
    prose = (sections(FENCE.sub("", text)).items() for text in (one, other))
    for (heading, text), (translated_heading, translation) in zip(*prose, strict=True):
        assert heading.partition(" ")[0] == translated_heading.partition(" ")[0]
        assert Counter(CODE.findall(text)) == Counter(CODE.findall(translation)), heading
        assert targets(english, text) == targets(page, translation), heading
        assert text.count("\n|") == translation.count("\n|"), heading


def test_a_changed_added_and_removed_section_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("translations.ROOT", tmp_path)
    (tmp_path / "docs/zh").mkdir(parents=True)
    english, page = tmp_path / "docs/a.md", tmp_path / "docs/zh/a.md"
    before = "# A\n\nOne\ntwo.\n\n## B\n\n```sh\n# not a heading\n```\n\n## C\n\nThree.\n"
    english.write_text(before)
    page.write_text("# 甲\n")
    assert changed(page) == list(digests(before)) == ["# A", "## B", "## C"], "nothing was accepted yet"
    accept(page)
    accept(page)
    assert changed(page) == [] and page.read_text().count("<!--") == 1
    english.write_text(before.replace("One\ntwo", "One two"))
    assert changed(page) == [], "line breaks do not count"
    english.write_text(before.replace("not a heading", "other").replace("## C", "## D"))
    assert changed(page) == ["## B", "## D", "## C"]
