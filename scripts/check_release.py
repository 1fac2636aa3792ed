"""Check that the version, the changelog, the citation and the tag of a release agree.

    python scripts/check_release.py [TAG]

prints each contradiction, and ends with code 1 if there is one. Imports only the standard library.
"""

import re
import sys
from pathlib import Path

SECTION = re.compile(r"^## \[(\d+\.\d+\.\d+\S*)\] - (\d{4}-\d{2}-\d{2})$", re.MULTILINE)


def problems(root: Path, tag: str | None) -> list[str]:
    """Return the contradictions of the files in `root`, and of the tag `vVERSION` of a release if it is given."""
    [version] = re.findall(r'^__version__ = "(.+)"$', (root / "roll_opd/__init__.py").read_text(), re.MULTILINE)
    changelog, citation = (root / "CHANGELOG.md").read_text(), (root / "CITATION.cff").read_text()
    cited = re.findall(r"^version: (\S+)$", citation, re.MULTILINE)
    dated = re.findall(r"^date-released: (\S+)$", citation, re.MULTILINE)
    sections = SECTION.findall(changelog)
    unreleased = re.findall(r"^## \[Unreleased\]\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    found = []
    if cited != [version]:
        found.append(
            f"CITATION.cff has the version {', '.join(cited) or 'none'}, the package {version}; write {version}"
        )
    if len(unreleased) != 1:
        found.append("CHANGELOG.md needs one section `## [Unreleased]`")
    newest = sections[0] if sections else None
    is_released = newest is not None and newest[0] == version
    if newest and not is_released and _order(newest[0]) > _order(version):
        found.append(f"CHANGELOG.md has a section of {newest[0]}, but the package's version is {version}; raise it")
    if dated != ([newest[1]] if newest and is_released else []):
        wanted = newest[1] if newest and is_released else "no date, as this version is not released"
        found.append(f"CITATION.cff: date-released is {', '.join(dated) or 'missing'}; CHANGELOG.md asks for {wanted}")
    if tag is not None:
        if tag != f"v{version}":
            found.append(f"the tag is {tag}, but the package's version is {version}; tag v{version}, or change it")
        if not is_released:
            found.append(f"CHANGELOG.md does not begin with a section `## [{version}] - YYYY-MM-DD`; write it")
        if "".join(unreleased).strip():
            found.append(f"CHANGELOG.md: move the entries of [Unreleased] to [{version}]")
    return found


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


if __name__ == "__main__":
    contradictions = problems(Path(__file__).parents[1], sys.argv[1] if len(sys.argv) > 1 else None)
    print("\n".join(contradictions) or "the version, the changelog, the citation and the tag agree")
    sys.exit(bool(contradictions))
