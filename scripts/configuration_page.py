"""Write docs/configuration.md from the declarations of the keys in roll_opd/config/schema/ (`make docs`)."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from itertools import takewhile
from pathlib import Path
from textwrap import fill
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from roll_opd.base.entry_points import load_all
from roll_opd.config import schema
from roll_opd.config.schema import PIPELINES, Section, Top

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
HEAD = """# Configuration: every key

Written by `make docs` from [roll_opd/config/schema/](../roll_opd/config/schema/__init__.py); a test compares them.

A configuration is a YAML file, read by Hydra: it may be composed from other files, and `key=value` on the command line
overrides a key. A misspelt key, or a word or section of TRL, verl, NeMo-RL or axolotl, is an error that names the right
key. [Coming from ROLL](coming-from-roll.md) lists ROLL's keys that have no effect. Options
under `strategy_config` are passed unchanged to the engine (Megatron-core's `TransformerConfig`, vLLM's engine
arguments), after a check against the installed version. `make setup` reads both and caches the result in
`~/.cache/roll_opd/`; after another installation the first plan does this, in up to 30 s. *Origin* is ROLL, Trinity-RFT
or this package (ours).

Roles are sections with the keys of [a role](#a-role): in pure distillation `student_train`, `student_infer` and
`teacher` ([one](#a-teacher), or a mapping of names to teachers); else `actor_train`, `actor_infer`, and if needed
`teacher`, `reference` and `critic`. `rewards` maps domains to [rewards](#a-reward), `auxiliary_models` names to the
models that a workflow calls: roles, or [addresses](#an-auxiliary-model-that-runs-elsewhere).
"""
load_all("pipelines")
SANITY = (2**31 - 1, 10**6)  # bounds that only catch slips; the page does not show them
TITLES = {
    schema.Top: "A run that rolls out",
    schema.Worker: "A role",
    schema.TeacherWorker: "A teacher",
    schema.Reward: "A reward",
    schema.Term: "A term of a reward",
    schema.TokenFilter: "A filter of tokens",
    schema.RemoteModelKeys: "An auxiliary model that runs elsewhere",
    schema.SupervisedWorker: "The role of a supervised pipeline",
    schema.EpochArgs: "training_args of a supervised pipeline",
    schema.HeldOut: "validation of a supervised pipeline",
    schema.Sft: "The SFT pipeline",
    schema.Dpo: "The DPO pipeline",
    schema.OfflineDistill: "The pipeline offline_distill",
    schema.FileTeacher: "teacher of the pipeline offline_distill",
}

BASES = {  # section -> base class whose keys are in another table
    schema.TeacherWorker: schema.Worker,
    **{keys: Top for keys in PIPELINES.values() if issubclass(keys, Top) and keys is not Top},
}


def sections() -> list[type[Section]]:
    """Return the sections in the order of the page: a section comes before the sections inside it."""
    found: list[type[Section]] = []

    def visit(section: type[Section]) -> None:
        if section in found:
            return
        found.append(section)
        for annotation in schema.keys_of(section).values():
            for inner in _inside(annotation):
                visit(inner)

    for top in (
        schema.Top,
        schema.Worker,
        schema.TeacherWorker,
        schema.Reward,
        schema.RemoteModelKeys,
        *PIPELINES.values(),
        schema.SupervisedWorker,
    ):
        visit(top)
    return found


def _inside(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _inside(part)


def type_text(annotation: Any) -> str:
    """Return a type in words: `number from 0 to 1`, `text`, `mean` or `std`, …"""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(parts[0]) + _range(parts[1:])
    if origin in (Union, UnionType):
        return " or ".join(type_text(part) for part in parts if part is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin is tuple:
        return f"list of {type_text(parts[0])}"
    if origin is dict:
        return "mapping" if parts[1] is Any else f"mapping to {type_text(parts[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"[section](#{anchor(title(annotation))})"
    names = {float: "number", int: "whole number", str: "text", bool: "true or false", Any: "anything"}
    return names[annotation]


def _range(metadata: tuple[Any, ...]) -> str:
    words = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
    bounds: dict[str, Any] = {}
    for item in metadata:
        for bound in getattr(item, "metadata", ()):
            bounds |= {name: getattr(bound, name) for name in words if hasattr(bound, name)}
    shown = {name: bound for name, bound in bounds.items() if bound not in SANITY}
    return "".join(f" {word} {shown[name]:.10g}" for name, word in words.items() if name in shown)


def title(section: type[Section]) -> str:
    """Return the heading of a section, which is the name in its docstring."""
    return TITLES.get(section) or re.split(r"[:.]", inspect.cleandoc(section.__doc__ or ""))[0].replace("`", "")


def anchor(heading: str) -> str:
    """Return the anchor that a heading has on a page."""
    kept = "".join(letter for letter in heading.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


def _default(item: Field[Any]) -> str:
    value = item.default_factory() if item.default_factory is not MISSING else item.default
    if value is MISSING:
        return "must be written"
    if value is None or isinstance(value, Section) or value in ({}, ()):
        return ""
    if isinstance(value, tuple):
        return ", ".join(f"`{part}`" for part in value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def rows(section: type[Section]) -> dict[str, str]:
    """Return key -> row of the section's table."""
    found: dict[str, str] = {}
    for item in fields(section):
        if item.name not in schema.keys_of(section) or item.name in schema.keys_of(BASES.get(section, Section)):
            continue
        annotation = schema.keys_of(section)[item.name]
        meaning, origin = item.metadata["meaning"], item.metadata["origin"]
        cells = (f"`{item.name}`", type_text(annotation), _default(item), meaning, origin)
        found[item.name] = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    return found


def table(section: type[Section]) -> str:
    """Return a section of the page: its heading, its description, and the table of its keys.

    A row of an earlier table is not repeated: one row has the names of such keys and a link to that table.
    """
    own, shared = rows(section), []
    for earlier in takewhile(lambda one: one is not section, sections()):
        keys = [name for name, row in rows(earlier).items() if own.get(name) == row]
        own = {name: row for name, row in own.items() if name not in keys}
        if keys:
            names = ", ".join(f"`{name}`" for name in keys)
            shared.append(f"| {names} | as in [{title(earlier)}](#{anchor(title(earlier))}) |")
    text = " ".join(inspect.cleandoc(section.__doc__ or "").split())
    parts = [f"## {title(section)}"]
    if text != f"`{title(section)}`.":
        parts.append(fill(text, 120, break_long_words=False, break_on_hyphens=False))
    head = ("| key | type | default | meaning | origin |", "|---|---|---|---|---|")
    return "\n\n".join([*parts, "\n".join((*head, *shared, *own.values()))])


def page() -> str:
    """Return the whole page."""
    return "\n\n".join([HEAD.rstrip(), *map(table, sections())]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
