"""Read YAML files for Hydra: check a file's text before Hydra reads it, and parse each file once."""

import os
import pickle
import re
from collections.abc import Hashable
from pathlib import Path, PurePath
from typing import Any, cast

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf
from omegaconf._utils import OmegaConfDumper, get_yaml_loader
from yaml._yaml import CParser
from yaml.reader import Reader

from roll_opd.base.failures import ConfigError, os_sentence
from roll_opd.base.paths import PathError, regular_file

LOADER: Any = yaml.CSafeLoader  # libyaml's, which is ten times as fast as that of Python
EMPTY = ("", "~", "null")  # Hydra reads a file with only one of these values as a file without keys
INT64 = 2**63
_PARSED: dict[Hashable, bytes] = {}  # pickled, as unpickling is five times as fast as a deep copy


class OmegaConfLoader(CParser, get_yaml_loader()):  # type: ignore[misc]
    """OmegaConf's loader, which refuses keys that are written twice, with libyaml's parser."""

    def __init__(self, stream: Any) -> None:
        LOADER.__init__(self, stream)


class _Dumper(yaml.CSafeDumper):
    """Libyaml's dumper, whose texts OmegaConf reads as the same texts. It writes no aliases."""

    ignore_aliases: Any = staticmethod(lambda _: True)


def _as_read_by_omegaconf(dumper: Any, text: str) -> yaml.ScalarNode:
    """Quote what OmegaConf would read as a number or boolean; escape what it would read as an interpolation."""
    escaped = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return OmegaConfDumper.str_representer(dumper, escaped)


_Dumper.add_representer(str, _as_read_by_omegaconf)


def yaml_text(values: Any) -> str:
    """Return plain values as YAML text, which Hydra reads as the same values."""
    return yaml.dump(values, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


class CheckedFiles(FileConfigSource):
    """A Hydra `ConfigSource` that calls `check_file` before it reads a file."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a file's configuration. Raises ConfigError if `check_file` rejects the file."""
        path = Path(os.path.realpath(os.path.join(self.path, self._normalize_file_name(config_path))))
        if not path.exists():
            return super().load_config(config_path)
        check_file(path)
        state = path.stat()
        # Hydra reads a file three times to compose a configuration
        key = (path, state.st_mtime_ns, state.st_size, self.provider, config_path)
        if key not in _PARSED:
            try:
                _PARSED[key] = pickle.dumps(self._read(path))
            except yaml.YAMLError as error:  # a key that is written twice
                raise ConfigError([yaml_message(error, path)]) from None
        return cast(ConfigResult, pickle.loads(_PARSED[key]))

    def _read(self, path: Path) -> ConfigResult:
        text = path.read_text(encoding="utf-8")
        parsed = yaml.load(text, Loader=OmegaConfLoader)
        config = OmegaConf.create({} if parsed is None else parsed)
        place = f"{self.scheme()}://{self.path}"
        return ConfigResult(provider=self.provider, path=place, config=config, header=self._get_header_dict(text[:512]))


def use_checked_files() -> None:
    """Register `CheckedFiles` as the source from which Hydra reads files."""
    from hydra._internal.sources_registry import SourcesRegistry

    Plugins.instance()  # registers Hydra's own sources first; Hydra refuses to register them after ours
    Singleton.instance(SourcesRegistry).types["file"] = CheckedFiles


def check_file(path: Path) -> None:
    """Check that `path` is a YAML file of keys with values. Raises ConfigError with the line number otherwise."""
    try:
        raw = regular_file(path).read_bytes()
        text = raw.decode("utf-8")
        root = yaml.compose(text, Loader=LOADER)
    except OSError as error:
        raise ConfigError([os_sentence(error)]) from None
    except PathError as error:
        raise ConfigError([str(error)]) from None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError([f"{path}, line {line}: not UTF-8 text ({error.reason}); save the file as UTF-8"]) from None
    except yaml.YAMLError as error:
        if found := Reader.NON_PRINTABLE.search(text):
            line, what = text.count("\n", 0, found.start()) + 1, f"the character U+{ord(found[0]):04X}"
            raise ConfigError([f"{path}, line {line}: {what} is not allowed in YAML; remove it"]) from None
        raise ConfigError([yaml_message(error, path)]) from None
    if root is not None and not isinstance(root, yaml.MappingNode) and root.value not in EMPTY:
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        where = f"{path}, line {root.start_mark.line + 1}"
        raise ConfigError([f"{where}: {kind}, where keys with values should be; write key: value"])


def yaml_message(error: yaml.YAMLError, path: Path) -> str:
    """Return the message of a YAML error as a sentence with the line number."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = f", line {mark.line + 1}" if mark else ""
    what = getattr(error, "problem", None) or getattr(error, "context", None) or " ".join(str(error).split())
    return f"{path}{where}: not valid YAML: {what}"


def value_problem(value: Any) -> str | None:
    """Return why a key or value cannot be used in a run; None if it can be used."""
    if isinstance(value, str) and (found := re.search("[\0\ud800-\udfff]", value)):
        kind = "a NUL character" if found[0] == "\0" else "half a character (a lone surrogate)"
        return f"{value!r} has {kind} in it; remove this character"
    if isinstance(value, PurePath):
        return "is a Python object (!!python/object); write a text"
    if isinstance(value, bytes):
        return "is binary data (!!binary); write a text"
    if isinstance(value, int) and not -INT64 <= value < INT64:
        return f"is a whole number of {value.bit_length()} bits; write a number of at most 63 bits"
    return None
