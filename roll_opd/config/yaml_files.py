"""Limit the size of YAML files before Hydra reads them, and limit the time to compose them.

A file of a few bytes can expand to billions of values. This happens if aliases refer to values with aliases, or
references to values with references. Hydra would expand all these values.
"""

import os
import pickle
import re
import signal
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.plugins.config_source import ConfigResult, ConfigSource
from yaml.reader import Reader

from roll_opd.base.failures import ConfigError, os_sentence
from roll_opd.base.paths import PathError, regular_file

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's loader is ten times as fast
MAX_BYTES = 2**20  # maximum size of a file; the largest known has 20 kB
MAX_NODES = 20_000  # maximum number of values in a file, with aliases expanded
MAX_DEPTH = 60  # maximum depth of nested sections
MAX_SECONDS = 2.0  # CPU time for composing a configuration; a large one takes 0.3 s
REPEAT_SECONDS = 0.1
EMPTY = ("", "~", "null")  # Hydra reads a file with only one of these values as a file without keys
INT64 = 2**63
MAX_PARSED = 200  # maximum number of files in the cache
_PARSED: dict[Hashable, bytes] = {}  # pickled, as unpickling is five times as fast as a deep copy


class BoundedFiles(FileConfigSource):
    """A Hydra `ConfigSource` that calls `check_file` before it reads a file."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a file's configuration. Raises ConfigError if `check_file` rejects the file."""
        path = Path(os.path.realpath(os.path.join(self.path, self._normalize_file_name(config_path))))
        if not path.exists():
            return super().load_config(config_path)
        check_file(path)
        state = path.stat()
        return _parsed_once((path, state.st_mtime_ns, state.st_size), self, super().load_config, config_path)


class HydrasOwnFiles(ImportlibResourcesConfigSource):
    """A Hydra `ConfigSource` for the files of Hydra's package. Each file is parsed only once."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a file's configuration."""
        return _parsed_once(self.path, self, super().load_config, config_path)


def _parsed_once(file: Hashable, source: ConfigSource, load: Callable[[str], ConfigResult], path: str) -> ConfigResult:
    """Return a copy of a file's configuration.

    Hydra reads a file three times to compose a configuration. Here it is parsed only once.
    """
    key = (file, source.provider, path)
    if key not in _PARSED:
        if len(_PARSED) >= MAX_PARSED:
            _PARSED.clear()
        _PARSED[key] = pickle.dumps(load(path))
    return cast(ConfigResult, pickle.loads(_PARSED[key]))


def use_bounded_files() -> None:
    """Register `BoundedFiles` and `HydrasOwnFiles` as the sources from which Hydra reads files."""
    from hydra._internal.sources_registry import SourcesRegistry

    Plugins.instance()  # registers Hydra's own sources first; Hydra refuses to register them after ours
    Singleton.instance(SourcesRegistry).types |= {"file": BoundedFiles, "pkg": HydrasOwnFiles}


def check_file(path: Path) -> None:
    """Check that `path` is a YAML file within the limits. Raises ConfigError with the line number otherwise."""
    try:
        size = regular_file(path).stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(
                [
                    f"{path} has {size:,} bytes, but a configuration may have at most {MAX_BYTES:,}; is this the"
                    " right file?"
                ]
            )
        raw = path.read_bytes()
        text = raw.decode("utf-8")
    except OSError as error:
        raise ConfigError([os_sentence(error)]) from None
    except PathError as error:
        raise ConfigError([str(error)]) from None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError([f"{path}, line {line}: not UTF-8 text ({error.reason}); save the file as UTF-8"]) from None
    if found := Reader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise ConfigError(
            [f"{path}, line {line}: the character U+{ord(found[0]):04X} is not allowed in YAML; remove it"]
        )
    try:
        _check_nodes(path, text)
    except yaml.YAMLError as error:
        raise ConfigError([yaml_message(error, path)]) from None


def _check_nodes(path: Path, text: str) -> None:
    """Raise ConfigError if a file has too many values or nested sections, or an alias inside its own anchor."""
    sizes: dict[str, int] = {}  # anchor -> number of values in an alias of this anchor
    within: list[tuple[str | None, int]] = [(None, 0)]  # anchor and number of values of each open collection

    def refuse(event: yaml.Event, what: str) -> ConfigError:
        line = event.start_mark.line + 1 if event.start_mark else "?"
        return ConfigError([f"{path}, line {line}: {what}"])

    for event in yaml.parse(text, Loader=LOADER):
        is_root = within == [(None, 0)] and isinstance(event, yaml.NodeEvent)
        if is_root and not isinstance(event, yaml.MappingStartEvent) and getattr(event, "value", None) not in EMPTY:
            kind = "a list" if isinstance(event, yaml.SequenceStartEvent) else "a single value"
            raise refuse(event, f"{kind}, where keys with values should be; write key: value")
        size = 0
        if isinstance(event, yaml.CollectionStartEvent):
            within.append((event.anchor, 1))
            if len(within) > MAX_DEPTH:
                raise refuse(event, f"more than {MAX_DEPTH} nested sections; use fewer levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = within.pop()
            if anchor:
                sizes[anchor] = size
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in (anchor for anchor, _ in within):
                raise refuse(
                    event, f"the alias *{event.anchor} is inside &{event.anchor}, its own anchor; remove the alias"
                )
            size = sizes.get(event.anchor or "", 1)
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            if event.anchor:
                sizes[event.anchor] = 1
        if size:
            anchor, before = within.pop()
            within.append((anchor, before + size))
            if before + size > MAX_NODES:
                raise refuse(event, f"more than {MAX_NODES:,} values after expanding aliases; write fewer values")


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
    if isinstance(value, bytes):
        return "is binary data (!!binary); write a text"
    if isinstance(value, int) and not -INT64 <= value < INT64:
        return f"is a whole number of {value.bit_length()} bits; write a number of at most 63 bits"
    return None


class _TooMuchWork(BaseException):
    """Composing the configuration takes too long.

    This class is not an `Exception`, because OmegaConf catches each `Exception` and reports it as a reference that
    cannot be resolved.
    """


@contextmanager
def bounded_work() -> Iterator[None]:
    """Context manager: raise ConfigError if composing takes more than `MAX_SECONDS` of CPU time.

    References to values with references can expand to as many values as aliases can. Their number is not computed in
    advance, because Hydra's syntax has too many forms.

    The timer works only in the main thread. Other threads have no time limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def too_much(*_: object) -> None:
        raise _TooMuchWork

    before = signal.signal(signal.SIGPROF, too_much)
    # repeated, as the interpreter ignores an exception raised during a destructor or callback
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS, REPEAT_SECONDS)
    try:
        yield
    except _TooMuchWork:
        what = f"composing the configuration takes more than {MAX_SECONDS:g} s"
        raise ConfigError(
            [f"{what}: its ${{references}} expand to too many values; write the values themselves"]
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
