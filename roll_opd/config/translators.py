"""Translators: parts of other packages that read configurations of other systems.

A package names a `Translator` as an entry point of the group `roll_opd.translators`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from roll_opd.base.entry_points import entries, load
from roll_opd.base.failures import ConfigError
from roll_opd.config.compose import LoadedConfig


@dataclass(frozen=True)
class Translator:
    """Reads the configurations of one system."""

    # whether a YAML file is of this system; called for every configuration, also for files that cannot be read
    recognises: Callable[[Path], bool]
    # returns the values of a file under the keys of this package; the overrides have these keys, too
    load: Callable[[Path, list[str]], LoadedConfig]


def translator_of(file: Path) -> Translator | None:
    """Return the translator that recognises a file, or None.

    Raises:
        ConfigError: if a translator cannot be imported, or if two translators recognise the file.
    """
    found: dict[str, Translator] = {}
    for name, entry in entries("translators").items():
        try:
            translator: Translator = load(entry)
        except ImportError as error:
            raise ConfigError([str(error)]) from error
        if translator.recognises(file):
            found[name] = translator
    if len(found) > 1:
        raise ConfigError(
            [f"{file}: the translators {' and '.join(found)} recognise it; uninstall one of their packages"]
        )
    return next(iter(found.values()), None)
