"""Collect the pages that `make site` builds: `python scripts/site_pages.py build`.

Writes `zensical.toml` and `pages/` into the directory. Markdown pages keep their paths, so links between them hold.
A linked source file becomes a page with its text, a linked directory a page with its files; images and records are
copied. Needs only the standard library.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "docs/site"
OUTPUTS = {"output", "build", "dist"}
COPIED = {".svg", ".png", ".json"}  # a browser shows these
LANGUAGES = {".py": "python", ".sh": "sh", ".sbatch": "sh", ".yaml": "yaml", ".yml": "yaml", ".cff": "yaml", "": "text"}
FENCE = re.compile(
    r"^(?P<mark> *(?:```+|~~~+))(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *[`~]{3,} *$", re.DOTALL | re.MULTILINE
)
LINK = re.compile(r"(?P<text>\[[^\]]*\]\()(?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
FRONT = "---\ntitle: {title}\nsearch:\n  exclude: true\n---\n\n"  # the search finds prose


def pages() -> list[Path]:
    """Return the Markdown pages of the repository, relative to its root."""
    tops = [top for top in ROOT.iterdir() if top.is_dir() and not top.name.startswith(".") and top.name not in OUTPUTS]
    found = [*ROOT.glob("*.md"), *(page for top in tops for page in top.rglob("*.md"))]
    return sorted(page.relative_to(ROOT) for page in found if not OUTPUTS & set(page.relative_to(ROOT).parts))


def place(path: Path) -> Path:
    """Return the path in the site's pages of a file or directory of the repository; hidden names lose their dot."""
    path = Path(*(part.lstrip(".") for part in path.parts))
    if (ROOT / path).is_dir():
        return path / "README.md"
    return path if path.suffix in {".md", *COPIED} else path.with_name(path.name + ".md")


def linked(page: Path, text: str) -> tuple[str, set[Path]]:
    """Return the text of a page with links to the site's pages, and the linked paths of the repository."""
    paths = set()

    def replaced(link: re.Match[str]) -> str:
        path = Path(os.path.normpath(page.parent / link["target"]))
        paths.add(path)
        return f"{link['text']}{os.path.relpath(place(path), page.parent)}{link['anchor'] or ''})"

    parts, end = [], 0
    for fence in FENCE.finditer(text):  # links are in prose only
        parts += [LINK.sub(replaced, text[end : fence.start()]), f"{fence['mark']}{fence['language']}\n"]
        parts.append(text[fence.start("text") : fence.end()])
        end = fence.end()
    return "".join([*parts, LINK.sub(replaced, text[end:])]), paths


def source_page(path: Path) -> str:
    """Return a page with the text of a file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return "\n".join(notebook_parts(text))
    return (
        f"{FRONT.format(title=path.name)}# {path}\n\n~~~~{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n~~~~\n"
    )


def notebook_parts(text: str) -> Iterator[str]:
    """Yield the cells of a notebook as Markdown."""
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        yield source + "\n" if cell["cell_type"] == "markdown" else f"```python\n{source}\n```\n"


def directory_page(path: Path) -> str:
    """Return a page that lists the files of a directory."""
    names = sorted(file.name for file in (ROOT / path).iterdir() if file.is_file() and not file.name.startswith("."))
    return f"{FRONT.format(title=path.name)}# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)


def collect(target: Path) -> None:
    """Write the pages and the files that they link to, and the configuration, into `target`."""
    shutil.rmtree(target / "pages", ignore_errors=True)
    todo: list[Path] = pages()
    seen = set(todo)
    while todo:
        path = todo.pop()
        there = target / "pages" / place(path)
        there.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in COPIED:
            shutil.copyfile(ROOT / path, there)
            continue
        if (ROOT / path).is_dir():
            text = directory_page(path)
        else:
            text = (ROOT / path).read_text(encoding="utf-8") if path.suffix == ".md" else source_page(path)
        base = path / "README.md" if (ROOT / path).is_dir() else path
        text, paths = linked(base, text) if path.suffix == ".md" or (ROOT / path).is_dir() else (text, set())
        there.write_text(text, encoding="utf-8")
        todo += sorted(paths - seen)
        seen |= paths
    shutil.copyfile(SITE / "zensical.toml", target / "zensical.toml")
    (target / "pages/assets").mkdir()
    for name in ("iframe-worker.js", "tables.css"):
        shutil.copyfile(SITE / name, target / "pages/assets" / name)


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
