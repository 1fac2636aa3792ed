"""The diagnostics of planning: problems, blockers and warnings.

A problem means that there is no plan. A blocker means that there is a plan, but it cannot be run. A warning prevents
neither. All checks report to the same `Diagnostics`, so a user sees all problems of a configuration together.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from roll_opd.base.failures import os_sentence, shortened
from roll_opd.base.hub import Download
from roll_opd.base.paths import PathError


@dataclass(frozen=True)
class Diagnostics:
    """The problems, blockers and warnings that checks have reported, and the place of each key in the configuration.

    A place is "file.yaml:12" or "command line".

    A `Diagnostics` object is for one section of the configuration, or for the whole configuration. `below` returns the
    object for a section. The argument `key` of its methods is a key of this section, or "" for the section itself. For
    the whole configuration, `key` is a dotted path.
    """

    origins: Mapping[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    blockers: list[str] = field(default_factory=list)
    blockers_here: list[str] = field(default_factory=list)  # blockers of this machine; another one may run the plan
    warnings: list[str] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)  # ROLL's keys that are accepted but have no effect
    downloads: list[Download] = field(default_factory=list)  # models whose weights a run downloads
    dropped: set[str] = field(default_factory=set)  # top-level keys that are not in the schema: probably variables
    texts: Mapping[str, str] = field(default_factory=dict)  # dotted path -> the value as written, if that is known
    path: str = ""

    def below(self, path: str) -> "Diagnostics":
        """Return the diagnostics of the section at `path`. Both objects share the same lists of reports."""
        return replace(self, path=self.at(path))

    def at(self, key: str) -> str:
        """Return the dotted path of `key`."""
        return f"{self.path}.{key}" if self.path and key else self.path or key

    def error(self, key: str, text: str) -> None:
        """Add a problem about `key`, unless it has already been added."""
        self._add(self.problems, key, text)

    def unsupported(self, key: str, text: str) -> None:
        """Add a blocker about `key`, unless it has already been added. Planning continues, but a run is refused."""
        self._add(self.blockers, key, text)

    def unsupported_here(self, key: str, text: str) -> None:
        """Add a blocker about `key` that depends on this machine, unless it has already been added."""
        self._add(self.blockers_here, key, text)

    @contextmanager
    def catching(self, key: str, kind: type[Exception] = PathError) -> Iterator[None]:
        """Context manager: an OSError, a PathError or an error of type `kind` becomes a problem of `key`."""
        try:
            yield
        except OSError as error:
            self.error(key, os_sentence(error))
        except (PathError, kind) as error:
            self.error(key, str(error))

    def warn(self, key: str, text: str) -> None:
        """Add a warning about `key`, with the key's place, unless it has already been added."""
        self.add_warning(f"{self.at(key)}: {text}{self.where(key)}")

    def note(self, key: str, text: str) -> None:
        """Add a warning about `key`, without the key's place, unless it has already been added."""
        self.add_warning(f"{self.at(key)}: {text}")

    def add_warning(self, text: str) -> None:
        """Add a warning, unless it has already been added."""
        if shortened(text) not in self.warnings:
            self.warnings.append(shortened(text))

    def unused(self, *keys: str) -> None:
        """Record that keys are accepted but have no effect."""
        self.ignored.update(map(self.at, keys))

    def warn_unused(self) -> None:
        """Insert the warnings about keys without effect and about unknown keys, before all other warnings."""
        if self.dropped:
            names = ", ".join(sorted(self.dropped))
            text = (
                "these keys resemble no known key, so they count as variables of the file without effect (as in ROLL)"
            )
            self.warnings.insert(0, f"{text}: {names}")
        if self.ignored:
            self.warnings.insert(0, f"these keys are accepted but have no effect here: {_by_section(self.ignored)}")

    def is_one_of(self, key: str, value: str, known: Collection[str]) -> bool:
        """Return whether `value` is one of the names in `known`. If it is not, add a problem."""
        if value not in known:
            names = [repr(name) for name in known]
            expected = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
            self.error(key, f"should be {expected}, got {json.dumps(value)}")
        return value in known

    def where(self, key: str) -> str:
        """Return the place of `key` as " (file.yaml:12)".

        If the place of the key is not known, return the place of the first key inside it, or of the nearest section
        that contains the key. If there is none, return "".
        """
        key = self.at(key)
        if key not in self.origins and (inside := next((one for one in self.origins if one.startswith(f"{key}.")), "")):
            key = inside
        while key:
            if place := self.origins.get(key):
                return f" ({place})"
            key = key.rpartition(".")[0]
        return ""

    def as_written(self, key: str, value: object) -> str:
        """Return a value for a message: a number or boolean as written, if its text is known, and else as JSON."""
        return self.text_of(key, value) or json.dumps(value, default=str)[:120]

    def text_of(self, key: str, value: object) -> str | None:
        """Return a number or boolean as written, or None if its text is not known."""
        text = self.texts.get(self.at(key), "")
        if isinstance(value, bool | int | float):
            with suppress(ValueError):
                if text.lower() == str(value).lower() or float(text) == value:
                    return text
        return None

    def _add(self, sentences: list[str], key: str, text: str) -> None:
        sentence = f"{self.at(key)}: {text}{self.where(key)}"
        if sentence not in sentences:
            sentences.append(sentence)


def as_yaml(value: object) -> str:
    """Return a value as YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _by_section(keys: Collection[str]) -> str:
    """Return keys as a short text, with the keys of each section together.

    Sections that have the same name in several roles are shown once.
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
