"""List the sections of English pages that have changed since they were translated.

    python scripts/translations.py                          # exit code 1 if a translation must be revised
    python scripts/translations.py --accept docs/zh/X.md    # the translation is revised: record the English page

A translated page ends with a comment that names its English page and has a digest of each section of that page.
"""

import argparse
import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = re.compile(r"\n<!-- Translation of (\S+), whose sections were:\n(.*?)-->\n\Z", re.DOTALL)
FENCE = re.compile(r"^ *(```+|~~~+)")
HEADING = re.compile(r"^(#{1,6}) +(.+)$")


def translated() -> list[Path]:
    """Return the translated pages."""
    return [ROOT / "README_zh.md", *sorted((ROOT / "docs/zh").glob("*.md"))]


def original(page: Path) -> Path:
    """Return the English page of a translated page."""
    return ROOT / ("README.md" if page.parent == ROOT else f"docs/{page.name}")


def sections(text: str) -> dict[str, str]:
    """Return the text of each section, with its heading, by heading. The record of a translation is left out."""
    found: dict[str, str] = {}
    fence, heading = "", ""
    for line in RECORD.sub("", text).splitlines():
        marker = FENCE.match(line)
        if marker:
            fence = "" if fence == marker[1] else fence or marker[1]
        elif not fence and (match := HEADING.match(line)):
            heading = f"{match[1]} {match[2]}"
        found[heading] = f"{found.get(heading, '')}{line}\n"
    return found


def digests(text: str) -> dict[str, str]:
    """Return a digest of each section by heading. Line breaks within paragraphs do not count."""
    return {
        heading: hashlib.sha256(" ".join(body.split()).encode()).hexdigest()[:12]
        for heading, body in sections(text).items()
    }


def changed(page: Path) -> list[str]:
    """Return the headings of English sections that were added, changed or removed since the translation."""
    record = RECORD.search(page.read_text(encoding="utf-8"))
    lines = record[2].splitlines() if record else []
    recorded = {heading: digest for digest, _, heading in (line.partition(" ") for line in lines)}
    now = digests(original(page).read_text(encoding="utf-8"))
    return [heading for heading in {**now, **recorded} if now.get(heading) != recorded.get(heading)]


def accept(page: Path) -> None:
    """Record the sections of the English page in a translated page."""
    english = original(page)
    lines = (f"{digest} {heading}\n" for heading, digest in digests(english.read_text(encoding="utf-8")).items())
    body = RECORD.sub("", page.read_text(encoding="utf-8")).rstrip("\n")
    name = english.relative_to(ROOT)
    page.write_text(
        f"{body}\n\n<!-- Translation of {name}, whose sections were:\n{''.join(lines)}-->\n", encoding="utf-8"
    )


def main() -> int:
    """Print the changed sections of each page, or accept pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accept", nargs="+", type=Path, metavar="PAGE", default=[], help="revised translations")
    pages = parser.parse_args().accept
    for page in pages:
        accept(page.resolve())
    stale = {page: headings for page in translated() if (headings := changed(page))}
    for page, headings in stale.items():
        print(f"{page.relative_to(ROOT)}: {original(page).relative_to(ROOT)} has changed in")
        print("".join(f"    {heading}\n" for heading in headings), end="")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
