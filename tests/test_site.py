"""The navigation of the site, the newcomer's path, and the built site."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from site_pages import linked

from tests.site_links import broken, pages_of

ROOT = Path(__file__).parent.parent
NAV = tomllib.loads((ROOT / "docs/site/zensical.toml").read_text())["project"]["nav"]
PATH = ["quickstart.md", "your-task.md", "report.md", "use-the-result.md", "bigger-machine.md"]


def test_every_page_is_in_the_navigation_once() -> None:
    given = [page for section in NAV for pages in section.values() for page in pages]
    entries = [page for each in given for page in ([each] if isinstance(each, str) else each.values())]
    assert [name for section in NAV for name in section] == [
        "Start", "Run", "Train", "Look", "Switch", "Build", "Evidence",
    ]  # fmt: skip
    assert all(isinstance(page, str) and (ROOT / page).is_file() for page in entries)
    files = [page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(page for page in entries if page.startswith("docs/")) == sorted(files)
    assert len(set(entries)) == len(entries)


def test_the_path_of_a_newcomer_is_short_and_linked() -> None:
    texts = [(ROOT / "docs" / page).read_text(encoding="utf-8") for page in PATH]
    assert all(text.count("\n") < 120 for text in texts)
    ends = [re.findall(r"\]\(([\w-]+\.md)", text.rpartition("Next:")[2]) for text in texts]
    assert all(after in end for end, after in zip(ends, PATH[1:], strict=False))
    for index in ("README.md", "docs/README.md"):
        prefix = "docs/" if index == "README.md" else ""
        text = (ROOT / index).read_text(encoding="utf-8")
        places = [text.find(f"]({prefix}{page})") for page in PATH]
        assert -1 not in places and places == sorted(places), index


def test_links_to_sources_lead_to_pages_and_code_is_unchanged() -> None:
    text = "[a](../roll_opd/api.py#x) ![b](x.png) [c](cli.md#d)\n```sh untested\n[a](../Makefile)\n```\n[e](../docker)"
    there = (
        "[a](../roll_opd/api.py.md#x) ![b](x.png) [c](cli.md#d)\n```sh\n[a](../Makefile)\n```\n[e](../docker/README.md)"
    )
    assert linked(Path("docs/page.md"), text)[0] == there


@pytest.mark.slow
@pytest.mark.nightly
def test_the_site_is_built_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    """Without a network too, once the tool is installed."""
    if subprocess.run(["make", "-s", "build/site_env/installed"], cwd=ROOT, timeout=300).returncode:
        pytest.skip("the tool of the site cannot be installed here")
    subprocess.run(["make", "-s", "site"], cwd=ROOT, check=True, timeout=300)
    site = ROOT / "build/site"
    assert list(broken(site)) == []
    assert (site / "search.js").is_file() and "reverse KL" in (site / "search.json").read_text()
    pages = pages_of(site)
    for path in (ROOT / "docs").glob("*.md"):  # lists, tables and blocks are recognised as on a forge
        text = re.sub(r"^```.*?^```", "```", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        page = pages[site / "docs" / ("index.html" if path.name == "README.md" else f"{path.stem}.html")]
        assert page.tags["table"] == len(re.findall(r"^\|[-| ]*-[-| ]*\|$", text, re.MULTILINE)), path
        assert page.tags["li"] == len(re.findall(r"^(?:[-*]|\d+\.) ", text, re.MULTILINE)), path
    shutil.copytree(site, tmp_path / "site")
    damaged = tmp_path / "site/docs/cli.html"
    more = '<a href="none.html#x"></a><script src="https://x.y"></script><body'
    damaged.write_text(damaged.read_text().replace("<body", more, 1))
    assert len(list(broken(tmp_path / "site"))) == 2
