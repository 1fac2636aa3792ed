"""Find a model's origin, its name on the hub, in the model's files.

Values are used only if model hubs accept their form.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CACHED = re.compile(r"(models|datasets)--([\w.-]+?)--([\w.-]+)")  # a directory in the cache of huggingface_hub
NAME = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9])?"
HUB_ID = re.compile(rf"{NAME}/{NAME}")


def cached(path: str, kind: str) -> str | None:
    """Return the hub name of a path in the hub's cache, or None for any other path.

    `kind` is "models" or "datasets".
    """
    found = CACHED.search(path)
    return f"{found[2]}/{found[3]}" if found and found[1] == kind else None


def model_name(path: str) -> str:
    """Return the hub name of a model in the hub's cache, else the name of its directory."""
    return cached(path, "models") or Path(path).resolve().name


def base_model(model: Path) -> str | None:
    """Return the hub name of a model, read from its cache path, config.json or card; None if unknown."""
    return cached(str(model), "models") or next(filter(HUB_ID.fullmatch, _named(model)), None)


def _named(model: Path) -> Iterator[str]:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    bases = _card(model).get("base_model")
    for name in (config.get("_name_or_path"), *(bases if isinstance(bases, list) else [bases])):
        if isinstance(name, str) and not Path(name).exists():
            yield name


def _card(model: Path) -> dict[str, Any]:
    """Return the YAML front matter of a model's README.md; empty if it cannot be read."""
    try:
        text = (model / "README.md").read_text(encoding="utf-8")
        head = yaml.safe_load(text.split("---\n")[1]) if text.startswith("---\n") else None
    except (OSError, UnicodeError, IndexError, yaml.YAMLError, ValueError):
        return {}
    return head if isinstance(head, dict) else {}
