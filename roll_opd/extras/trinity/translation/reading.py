"""The class `Translation`, which records the translation of a Trinity-RFT configuration.

`sort` applies the table of keys to the configuration.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from roll_opd.base.failures import did_you_mean
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.extras.trinity.translation.keys import UNREAD, Rule
from roll_opd.tracking.secrets import is_secret

DISTILL = "on_policy_distill"


@dataclass(frozen=True)
class Machine:
    """The devices of a machine: how many there are per node, and whether they are GPUs."""

    devices: int
    has_gpus: bool


@dataclass
class Translation:
    """The state of a translation: the values that were read, the translated keys, and the ignored keys."""

    diag: Diagnostics
    machine: Machine
    found: dict[str, Any] = field(default_factory=dict)  # combined keys: Trinity-RFT key -> value
    values: dict[str, Any] = field(default_factory=dict)  # translated configuration
    origins: dict[str, str] = field(default_factory=dict)  # translated key -> Trinity-RFT key and its line
    texts: dict[str, str] = field(default_factory=dict)  # translated key -> its value as written
    mapped: list[tuple[str, str, Any]] = field(default_factory=list)  # (Trinity-RFT keys, our key, value)
    unread: dict[str, str] = field(default_factory=dict)  # ignored Trinity-RFT key -> reason
    auxiliaries: dict[str, str] = field(default_factory=dict)  # Trinity-RFT section of an auxiliary model -> ours
    devices: int = 1  # training devices

    @property
    def is_pure(self) -> bool:
        """Whether the algorithm is pure distillation."""
        return self.get("algorithm.algorithm_type") == DISTILL

    @property
    def train(self) -> str:
        return "student_train" if self.is_pure else "actor_train"

    @property
    def infer(self) -> str:
        return "student_infer" if self.is_pure else "actor_infer"

    @property
    def frozen(self) -> list[str]:
        """The Megatron roles of the translated configuration, without the student."""
        return [role for role in ("teacher", "reference", "critic") if role in self.values]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a Trinity-RFT key."""
        return self.found.get(key, default)

    def first(self, *keys: str, default: Any = None) -> tuple[Any, str]:
        """Return (value, key) of the first Trinity-RFT key that is set; (default, "") if none is set."""
        return next(((self.found[key], key) for key in keys if key in self.found), (default, ""))

    def copy(self, ours: str, *keys: str) -> None:
        """Set a key of this package to the value of the first Trinity-RFT key that is set, if there is one."""
        value, key = self.first(*keys)
        if value is not None:
            self.put(ours, value, key)

    def put(self, ours: str, value: Any, *by: str) -> None:
        """Set a key of this package.

        Args:
            ours: the key. {train} and {infer} in it stand for the student's roles.
            value: the value of the key.
            by: the Trinity-RFT keys from which the value is translated. If there are none, the value is a default of
                Trinity-RFT.
        """
        ours = ours.format(train=self.train, infer=self.infer)
        *sections, last = ours.split(".")
        place = self.values
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
        written = [key for key in by if key]
        self.mapped.append((" + ".join(written), ours, value))
        for key in written[:1]:
            if key in self.diag.texts:
                self.texts[ours] = self.diag.texts[key]
            self.origins[ours] = f"{key}{self.diag.where(key).replace(' (', ', ').rstrip(')')}"

    def drop(self, key: str, why: str) -> None:
        """Record that a Trinity-RFT key is ignored. `why` is the reason."""
        self.unread[key] = why

    def drop_remaining(self, why: Mapping[str, str]) -> None:
        """Record that all remaining Trinity-RFT keys are ignored.

        `why` maps the beginning of a key to the reason.
        """
        used = {key for keys, *_ in self.mapped for key in keys.split(" + ")} | self.unread.keys()
        for key in self.found:
            if key in used or any(other.startswith(f"{key}.") for other in used):
                continue
            self.drop(key, next((text for beginning, text in why.items() if key.startswith(beginning)), ""))

    def number(self, key: str, default: int, least: int = 1) -> int:
        """Return the value of a Trinity-RFT key as an integer of at least `least`.

        If the value is not such an integer, report a problem and return `default`.
        """
        value = self.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        self.diag.error(key, f"should be an integer of at least {least}, got {self.diag.as_written(key, value)}")
        return default

    def below(self, key: str) -> dict[str, Any]:
        """Return the section under a Trinity-RFT key.

        If the value is not a section, report a problem and return an empty section.
        """
        value = self.get(key, {})
        if isinstance(value, dict):
            return value
        self.diag.error(key, f"expected a section with keys, got {self.diag.as_written(key, value)}")
        return {}

    def entries(self, key: str) -> list[Mapping[str, Any]]:
        """Return the list of sections under a Trinity-RFT key.

        If the value is not a list of sections, report a problem and return an empty list.
        """
        value = self.get(key) or []
        if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
            return value
        self.diag.error(key, f"expected a list of sections with keys, got {self.diag.as_written(key, value)}")
        return []

    def lines(self) -> Iterable[str]:
        """Yield the lines of the translation report."""
        for theirs, ours, value in self.mapped:
            shown = "***" if is_secret(ours) or (isinstance(value, dict) and any(map(is_secret, value))) else value
            yield f"  {theirs or '(default)'} -> {ours}: {_yaml(shown)}"
        if self.unread:
            yield "ignored:"
        reasons: dict[str, list[str]] = {}
        for key, why in self.unread.items():
            reasons.setdefault(why, []).append(key)
        for why, keys in sorted(reasons.items()):
            yield f"  {', '.join(sorted(keys))}{f': {why}' if why else ''}"


def _yaml(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return " ".join(str(value).split()) if not isinstance(value, str) else repr(value) if "\n" in value else value


def sort(read: Translation, values: Mapping[str, Any], keys: Mapping[str, Rule], prefix: str) -> None:
    """Apply the rules in `keys` to the values of a section. `prefix` is the dotted path of the section.

    Values that are translated together with others are only stored, in `read.found`.
    """
    sections = {key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)}

    def visit(value: Any, key: str) -> None:
        path = f"{prefix}{key}"
        if key in keys:
            if value is not None:
                _follow(read, keys[key], path, value)
        elif key in sections:
            if isinstance(value, Mapping):
                for name, item in value.items():
                    visit(item, f"{key}.{name}")
            elif value is not None:
                read.diag.error(path, f"expected a section with keys, got {read.diag.as_written(path, value)}")
        elif path.startswith(UNREAD):
            read.drop(
                path if path in UNREAD else ".".join(path.split(".")[:2]), "a key of veRL, which is not used here"
            )
        else:
            read.diag.error(path, _unknown(key, {*keys, *sections}))

    for name, value in values.items():
        visit(value, str(name))


def _unknown(key: str, known: Iterable[str]) -> str:
    """Return the message about an unknown key. It suggests a known key if one is similar."""
    section, _, last = key.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section}
    if hint := did_you_mean(last, siblings):
        return f"unknown key; {hint}"
    elsewhere = [name for name in known if name.rpartition(".")[2] == last]
    if elsewhere:
        return f"unknown key here; it belongs to {' or '.join(sorted(elsewhere)[:3])}"
    return "is not a key of Trinity-RFT up to 0.6, so its effect is unknown; remove the key to run without its effect"


def _follow(read: Translation, rule: Rule, path: str, value: Any) -> None:
    if rule.part:
        read.found[path] = value
    elif rule.ours:
        read.found[path] = value
        read.put(rule.ours, value, path)
    elif rule.harmless is None:
        read.drop(path, rule.why)
    elif value in rule.harmless:
        read.found[path] = value
        read.drop(path, "")
    else:
        read.diag.error(path, f"{read.diag.text_of(path, value) or _yaml(value)} is not available: {rule.why}")
