"""Diagnostics of planning.

A problem prevents a plan. A blocker prevents a run, but not a plan. A warning does not prevent a plan or a run.

All checks report to one `Diagnostics`, so that a user sees all problems of a configuration together.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from roll_opd.base.failures import os_sentence, shortened
from roll_opd.base.paths import PathError


@dataclass(frozen=True)
class Diagnostics:
    """The problems, blockers and warnings that the checks report, and the place of each key in the configuration.

    A place is "file.yaml:12" or "command line".

    `Diagnostics` belong to a section of the configuration (see `below`). The argument `key` of a method is a key of
    this section, or "" for the section itself. For `Diagnostics` of the whole configuration, `key` is a dotted path.
    """

    origins: Mapping[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    blockers: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)  # ROLL's keys that are accepted but have no effect
    dropped: set[str] = field(default_factory=set)  # top-level keys that are not in the schema: probably variables
    renamed: dict[str, str] = field(default_factory=dict)  # path of a key -> its path as written in the file
    replaced: set[str] = field(default_factory=set)  # keys of the file that were overridden under another name
    path: str = ""

    def below(self, path: str) -> "Diagnostics":
        """Return diagnostics for the keys of the section at `path`. They share their lists with this object."""
        return replace(self, path=self.at(path))

    def at(self, key: str) -> str:
        """Return the dotted path of `key`."""
        return f"{self.path}.{key}" if self.path and key else self.path or key

    def error(self, key: str, text: str) -> None:
        """Add a problem about `key`, unless the same problem was added before."""
        self._add(self.problems, key, text)

    def unsupported(self, key: str, text: str) -> None:
        """Add a blocker about `key`, unless it was added before. Planning continues, but a run is refused."""
        self._add(self.blockers, key, text)

    @contextmanager
    def catching(self, key: str, kind: type[Exception] = PathError) -> Iterator[None]:
        """Context manager: report an OSError, a PathError or an error of type `kind` as a problem of `key`."""
        try:
            yield
        except OSError as error:
            self.error(key, os_sentence(error))
        except (PathError, kind) as error:
            self.error(key, str(error))

    def warn(self, key: str, text: str) -> None:
        """Add a warning about `key` with the key's place, unless it was added before."""
        self.add_warning(f"{self.at(key)}: {text}{self.where(key)}")

    def note(self, key: str, text: str) -> None:
        """Add a warning about `key` without the key's place, unless it was added before."""
        self.add_warning(f"{self.at(key)}: {text}")

    def add_warning(self, text: str) -> None:
        """Add a warning, unless the same warning was added before."""
        if shortened(text) not in self.warnings:
            self.warnings.append(shortened(text))

    def rename(self, key: str, written: str) -> None:
        """Record that the configuration has `key` under another name, `written`."""
        self.renamed[self.at(key)] = self.at(written)

    def unused(self, *keys: str) -> None:
        """Record keys that are accepted and have no effect."""
        self.ignored.update(map(self.at, keys))

    def warn_unused(self) -> None:
        """Insert two warnings before all others: the list of keys without effect, and the list of unknown keys."""
        if self.dropped:
            names = ", ".join(sorted(self.dropped))
            self.warnings.insert(
                0,
                "these keys are unknown and resemble no known key; they count as variables of the file and have no"
                f" effect (as in ROLL): {names}",
            )
        if self.ignored:
            self.warnings.insert(0, f"these keys are accepted but have no effect here: {_by_section(self.ignored)}")

    def is_one_of(self, key: str, value: str, known: Collection[str]) -> bool:
        """Return whether `value` is one of the `known` names; if it is not, add a problem."""
        if value not in known:
            names = [repr(name) for name in known]
            expected = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
            self.error(key, f"should be {expected}, got {json.dumps(value)}")
        return value in known

    def where(self, key: str) -> str:
        """Return the place of `key` as " (file.yaml:12)".

        If the place of the key is unknown, return the place of the nearest section around it, or "" if that is also
        unknown.
        """
        key = self.at(key)
        while key:
            if place := self.origins.get(self.renamed.get(key, key)):
                return f" ({place})"
            key = key.rpartition(".")[0]
        return ""

    def is_override(self, key: str) -> bool:
        """Return whether `key` was written on the command line."""
        return self.origins.get(self.at(key)) == "command line"

    def _add(self, sentences: list[str], key: str, text: str) -> None:
        sentence = f"{self.at(key)}: {text}{self.where(key)}"
        if sentence not in sentences:
            sentences.append(sentence)


def as_yaml(value: object) -> str:
    """Return a value as YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _by_section(keys: Collection[str]) -> str:
    """Return a short list of keys as text: top-level keys first, then the keys of each section.

    Sections with the same name in several roles are listed once.
    """
    sections: dict[str, set[str]] = {}
    for key in keys:
        *path, last = key.split(".")
        named = [part for part in path if part.endswith(("_args", "_config"))]
        sections.setdefault(named[-1] if named else _place(path), set()).add(last)
    return "; ".join(_listed(section, sorted(names)) for section, names in sorted(sections.items()))


def _place(path: list[str]) -> str:
    if path and (path[0] in ("teacher", "reference", "critic") or path[0].endswith(("_train", "_infer"))):
        return "of roles: "
    return "of rewards: " if path and path[0] == "rewards" else ".".join(path)


def _listed(section: str, names: list[str]) -> str:
    if not section or section.endswith(": "):
        return section + ", ".join(names)
    return f"{section}.{names[0]}" if len(names) == 1 else f"{section}.{{{', '.join(names)}}}"
