"""Reads a built site: links without a target, and addresses that a browser would load from a network."""

from collections import defaultdict
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}  # what a browser fetches
ONLY_NAMED = {"canonical", "prev", "next", "alternate"}  # relations of <link> that it does not fetch


class Page(HTMLParser):
    """The ids and addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.tags: defaultdict[str, int] = defaultdict(int)  # in the article, without navigation
        self.in_article = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.in_article |= tag == "article"
        self.tags[tag] += self.in_article
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in LOADED and LOADED[tag] in values and values.get("rel") not in ONLY_NAMED:
            self.loads.append(values[LOADED[tag]])

    def handle_endtag(self, tag: str) -> None:
        self.in_article &= tag != "article"


def pages_of(site: Path) -> dict[Path, Page]:
    """Return the pages of a built site by path."""
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}


def broken(site: Path) -> Iterator[str]:
    """Yield a message for each address of a built site that leads nowhere or is loaded from a network."""
    pages = pages_of(site)
    for path, page in pages.items():
        where = path.relative_to(site)
        for address in (*page.links, *page.loads):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if address in page.loads and parts.scheme != "data":
                    yield f"{where} loads {address}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                yield f"{where}: {address} does not exist"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                yield f"{where}: {address} has no such place"
