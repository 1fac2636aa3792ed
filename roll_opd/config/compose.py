"""Compose a Hydra configuration from YAML files, `defaults` lists, interpolations and command-line overrides.

The result is a plain dict. For error messages, there is also a map from each key to its file and line. The directory
`configs/` is always on Hydra's search path, so every configuration may use the groups in it.
"""

import json
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.conf import HydraConf
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from roll_opd.base.failures import ConfigError, file_kind, os_sentence
from roll_opd.base.paths import REPOSITORY, PathError, expanded
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.override_syntax import SEARCH_PATH, SearchPath, hydra_arguments, is_group, search_path
from roll_opd.config.yaml_files import LOADER, check_file, use_checked_files, value_problem, yaml_message

PACKAGE = Path(__file__).resolve().parents[1]
COMMAND_LINE = "command line"
KINDS = "write key=value, +key=value or ~key"
# beginnings of lines about internals, in error messages of Hydra and OmegaConf
NOISE = ("full_key:", "object_type=", "reference_type=", "Config search path", "provider=")
# list(...) and range(...) mean something else in Hydra's own language
REFERS = re.compile(r"\$\{(\w+)[.}\[]")
HYDRAS = re.compile(r"hydra(?:[./]|$)")  # keys and groups of Hydra's own configuration
UNSET = re.compile(r"Environment variable '([^']+)' not found")
# an override with a plain value: unquoted, and no list, object or function call
PLAIN_VALUE = re.compile(r"\+{0,2}[\w.@/:-]+=(?![\s\"'\[{,]|\w+\()[^,\x00-\x1f]+(?<!\s)")
DEVICES = re.compile(r"(\+{0,2}(?:[\w-]+\.)*device_mapping)=((?:list|range)\(.*)")


@dataclass(frozen=True)
class LoadedConfig:
    """A composed configuration.

    Attributes:
        name, directory: name of the file without .yaml, and its directory.
        values: the configuration as plain data.
        origins: a map from each dotted key to its place, for example "file.yaml:12".
        variables: the top-level keys to which another value refers by `${name}`.
        texts: a map from the dotted path of each value in an override to the value as written.
        translation: for a configuration of Trinity-RFT, a report of how its keys were translated.
    """

    name: str
    directory: Path
    values: dict[str, Any]
    origins: dict[str, str]
    variables: frozenset[str] = frozenset()
    translation: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)


def load_config(config_path: str, config_name: str, overrides: list[str]) -> LoadedConfig:
    """Compose the configuration file `config_name` in the directory `config_path`. Raises ConfigError.

    Args:
        config_path: a directory, which is looked up in `config_places`.
        config_name: name of the file, with or without .yaml.
        overrides: each is `key=value`, `+key=value`, `++key=value`, `~key` or `group=option`.
    """
    directory, name = find_config(config_path, config_name)
    file = directory / f"{name}.yaml"
    parsed = parse_overrides(overrides)
    check_file(file)
    use_checked_files()
    places: SearchPath | None = None
    try:
        with warnings.catch_warnings(), initialize_config_dir(str(directory), version_base="1.3", job_name="roll_opd"):
            # without `_self_` in its defaults list, a file overrides the defaults, as users expect
            warnings.filterwarnings("ignore", message=".*Defaults list is missing `_self_`")
            warnings.filterwarnings("ignore", message=".*is not available")  # missing search paths are reported below
            places = search_path(parsed, file)
            arguments = hydra_arguments(parsed, file, places, _chosen_groups(name, parsed, places))
            loader = _Loader.in_place_of_hydras()
            config = compose(name, arguments)
            origins = _origins(loader.defaults, places)
    except yaml.YAMLError as error:
        raise ConfigError([yaml_message(error, file)]) from None
    except RecursionError:
        circle = "a defaults list includes its own file, directly or through others, or sections are nested too deeply"
        raise ConfigError([f"{file}: {circle}; remove that entry"]) from None
    except (HydraException, OmegaConfBaseException, OSError, UnicodeDecodeError, ValueError) as error:
        absent = places.missing if places else []
        hint = f"; missing directories in hydra.searchpath: {_listed(absent)}" if absent else ""
        raise ConfigError([f"{file}: {one_line(error)}{hint}"]) from None
    for override in parsed:
        origins.update(dict.fromkeys(keys_below(override.key_or_group, override.value()), COMMAND_LINE))
    if not config:
        raise ConfigError([f"{file} is empty; write at least the roles of a run, or copy an example"])
    diag = Diagnostics(origins)
    values = resolve(config, diag)
    if diag.problems:
        raise ConfigError(diag.problems)
    variables = frozenset(REFERS.findall(str(OmegaConf.to_container(config))))
    return LoadedConfig(name, directory, values, origins, variables, texts=override_texts(parsed))


def find_config(config_path: str, config_name: str) -> tuple[Path, str]:
    """Return (directory, name) of the YAML file, which is looked up in the `config_places` in order.

    Raises ConfigError if the file is in none of these places, or if a place cannot be read.
    """
    try:
        return _found(config_path, config_name)
    except OSError as error:
        raise ConfigError([f"{config_name} in {config_path}: {os_sentence(error)}"]) from None
    except PathError as error:
        raise ConfigError([f"{config_path}: {error}"]) from None


def _found(config_path: str, config_name: str) -> tuple[Path, str]:
    name = config_name.removesuffix(".yaml").removesuffix(".yml")
    places = config_places(config_path)
    for place in places:
        if (place / f"{name}.yaml").is_file():
            return place.resolve(), name
    found = [place for place in places if place.is_dir()]
    if not found:
        raise ConfigError([f"{config_path}: no such directory; looked for {_listed(places)}"])
    for file in (place / f"{name}.yaml" for place in found):
        if file.exists():
            raise ConfigError([f"{config_name}: {file} is {file_kind(file)}; give the name of a YAML file"])
    present = ", ".join(sorted({path.name for place in found for path in place.glob("*.yaml") if path.is_file()}))
    raise ConfigError([f"{config_name}: no {name}.yaml in {_listed(found)}; YAML files there: {present or 'none'}"])


def config_places(config_path: str) -> list[Path]:
    """Return the places where a configuration may be, in search order.

    The path is looked up in these directories: the current directory, `examples/` in it, the directory of the started
    script (as in ROLL), the repository's `examples/`, and the repository. If a place does not have the file,
    `find_config` continues with the next place.
    """
    given, script = expanded(config_path), Path(sys.argv[0]).resolve()
    scripts = [script.parent] if script.suffix == ".py" and not script.is_relative_to(PACKAGE) else []
    bases = (Path.cwd(), Path.cwd() / "examples", *scripts, REPOSITORY / "examples", REPOSITORY)
    return list(dict.fromkeys(base / given for base in bases))


def _listed(places: Sequence[Path | str]) -> str:
    return " or ".join(map(str, places))


def parse_overrides(overrides: list[str]) -> list[Override]:
    problems, parsed = [], []
    for text in overrides:
        devices = DEVICES.fullmatch(text)
        if devices:
            text = f"{devices[1]}={json.dumps(devices[2])}"
        try:
            override = _parsed(text)
        except (HydraException, RecursionError, ValueError) as error:  # ValueError: too many digits in a number
            how = f"quote the value: {shlex.quote(_quoted(text))}" if _quoted(text) else KINDS
            problems.append(f"override {text!r} cannot be read: {one_line(error)}; {how}")
            continue
        if override.is_sweep_override():
            advice = f"quote a text with commas: {shlex.quote(_quoted(text))}"
            problems.append(f"override {text!r} has several values, but a run needs one; {advice}")
        parsed.append(override)
    if problems:
        raise ConfigError(problems)
    return parsed


def _parsed(text: str) -> Override:
    """Parse an override with Hydra. Raises HydraException if it cannot be parsed.

    Hydra's grammar rejects some plain values, for example a value with =, @ or non-ASCII letters. Such a value is
    quoted, and parsed again. Lists, objects, function calls and quoted texts are not plain values.
    """
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        if not PLAIN_VALUE.fullmatch(text):
            raise
        return OverridesParser.create().parse_override(_quoted(text))


def _quoted(text: str) -> str:
    """Return an override with quotes around its value; "" if it has no value."""
    key, equals, value = text.partition("=")
    return f"{key}={QuotedString(value, Quote.double).with_quotes()}" if equals and value else ""


def _chosen_groups(name: str, overrides: list[Override], places: SearchPath) -> frozenset[str]:
    """Return the groups in the defaults lists; an empty set if no override selects a group.

    The defaults lists take time to compute, so they are computed only if an override selects a group.
    """
    if not any(is_group(override, places) for override in overrides):
        return frozenset()
    arguments = [places.argument] if places.argument else []
    found = GlobalHydra.instance().config_loader().compute_defaults_list(name, arguments, RunMode.RUN)
    return frozenset(found.overrides.known_choices)


class _Files(CachingConfigRepository):
    """Hydra's cache of files, without the copy of its sources, which takes an eighth of the time to compose."""

    def __init__(self, delegate: IConfigRepository) -> None:
        self.delegate, self.cache = delegate, {}


class _Loader(ConfigLoaderImpl):
    """Hydra's loader, which does not compose Hydra's own configuration.

    Hydra's own configuration is not used here, and takes most of the time to compose. It is composed only if an
    override selects one of its files (`hydra/launcher=basic`) or sets one of its keys, or if the defaults list selects
    one of its files.

    `defaults` is the defaults list of the composed configuration.
    """

    defaults: tuple[ResultDefault, ...] = ()

    @classmethod
    def in_place_of_hydras(cls) -> "_Loader":
        hydra: Any = GlobalHydra.instance().hydra
        hydra.config_loader = cls(hydra.config_loader.config_search_path)
        return cast(_Loader, hydra.config_loader)

    def _load_configuration_impl(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        parsed = OverridesParser.create().parse_overrides(overrides)
        files = _Files(self.repository)  # this loader serves only one configuration
        self._process_config_searchpath(config_name, parsed, files)
        others = [override for override in parsed if override.get_key_element() != SEARCH_PATH]
        primary = files.load_config(config_name) if config_name else None
        if any(HYDRAS.match(override.key_or_group) for override in others) or _chooses_files_of_hydras(primary):
            arguments = config_name, overrides, run_mode, from_shell, validate_sweep_overrides
            return super()._load_configuration_impl(*arguments)
        found = create_defaults_list(files, config_name, others, prepend_hydra=False, skip_missing=False)
        config = self._compose_config_from_defaults_list(found.defaults, files)
        if written := config.get("hydra"):
            _check_section_of_hydra(written)
        OmegaConf.set_struct(config, True)
        self._apply_overrides_to_config(found.config_overrides, config)
        return config

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        self.defaults = tuple(defaults)
        return super()._compose_config_from_defaults_list(defaults, repo)


def _check_section_of_hydra(written: Any) -> None:
    """Raise OmegaConfBaseException if the section `hydra:` has an unknown key or a value of a wrong type."""
    if (text := str(written)) not in _CHECKED:
        OmegaConf.create({"hydra": OmegaConf.structured(HydraConf)}).merge_with({"hydra": written})
        _CHECKED.add(text)


_CHECKED: set[str] = set()  # sections found valid; building Hydra's schema takes a fifth of the planning time


def _chooses_files_of_hydras(primary: ConfigResult | None) -> bool:
    """Return whether a file's defaults list has an entry for a group `hydra/...`, with or without `override`."""
    entries = (primary.defaults_list or ()) if primary is not None else ()
    named = (getattr(entry, "group", None) or getattr(entry, "path", None) for entry in entries)
    return any(name is not None and HYDRAS.match(name.lstrip("/")) for name in named)


def _origins(defaults: Sequence[ResultDefault], places: SearchPath) -> dict[str, str]:
    """Return a map from each dotted key to its place as "file:line".

    If several files of the defaults list have a key, the last file sets its value. The place is then in this file.
    """
    origins: dict[str, str] = {}
    for default in defaults:
        if default.config_path is None or default.config_path.startswith("hydra/"):
            continue
        for root in places.directories:
            file = root / f"{default.config_path}.yaml"
            if file.is_file():
                shown = file.name if default.primary else f"{default.config_path}.yaml"
                origins.update(key_lines(file, shown, default.package or ""))
                break
    return origins


def key_lines(file: Path, shown: str, package: str) -> dict[str, str]:
    lines: dict[str, str] = {}

    def visit(node: yaml.Node, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key_node, value_node in node.value:
                key = f"{prefix}.{key_node.value}" if prefix else str(key_node.value)
                lines[key] = f"{shown}:{key_node.start_mark.line + 1}"
                visit(value_node, key)

    root = yaml.compose(file.read_text(encoding="utf-8"), Loader=LOADER)
    if root is not None:
        visit(root, package)
    return lines


def override_texts(overrides: Sequence[Override]) -> dict[str, str]:
    """Return the numbers and booleans of overrides as written, also those in lists, by their dotted paths."""
    texts: dict[str, str] = {}
    for override in overrides:
        if isinstance(override.value(), str | None):
            continue
        with suppress(yaml.YAMLError):
            node = yaml.compose(str(override.input_line).partition("=")[2], Loader=LOADER)
            texts |= texts_below(node, override.get_key_element().lstrip("+~"))
    return texts


def texts_below(node: yaml.Node | None, path: str) -> dict[str, str]:
    """Return the values below a node that are not quoted, as written, by their dotted paths."""
    if isinstance(node, yaml.ScalarNode):
        return {} if node.style else {path: node.value}
    found: dict[str, str] = {}
    for number, item in enumerate(node.value if node else ()):
        name, value = (item[0].value, item[1]) if isinstance(node, yaml.MappingNode) else (number, item)
        found |= texts_below(value, f"{path}.{name}" if path else str(name))
    return found


def keys_below(key: str, value: Any) -> Iterator[str]:
    """Yield a dotted key and, if its value is a mapping, all dotted keys below it."""
    yield key
    for name, item in value.items() if isinstance(value, dict) else ():
        yield from keys_below(f"{key}.{name}", item)


def resolve(node: DictConfig | ListConfig, diag: Diagnostics) -> Any:
    """Return a configuration as plain dicts and lists, with its interpolations replaced by their values.

    An interpolation that cannot be resolved is reported to `diag` as a problem.
    """
    keys = list(node.keys()) if isinstance(node, DictConfig) else range(len(node))
    resolved = {}
    for key in keys:
        try:
            value = node[cast(Any, key)]
        except MissingMandatoryValue:
            diag.error(str(key), "has no value yet (???); set a value here or on the command line")
            continue
        except (OmegaConfBaseException, RecursionError) as error:
            diag.error(str(key), _unresolved(one_line(error)))
            continue
        for text in (key, value):
            if wrong := value_problem(text):
                diag.error(str(key), wrong)
        if isinstance(value, DictConfig | ListConfig):
            value = resolve(value, diag.below(str(key)))
        resolved[key] = value
    return resolved if isinstance(node, DictConfig) else [resolved.get(index) for index in keys]


def _unresolved(text: str) -> str:
    unset = UNSET.search(text)
    if unset:
        return (
            f"the environment variable {unset[1]} is not set; set it (export {unset[1]}=...), or write the value here"
        )
    return f"{text}; add the missing key, or change the reference to this key"


def one_line(error: Exception) -> str:
    """Return an error message of Hydra or OmegaConf as one line.

    Hydra's dump of the object and of the search path is left out.
    """
    if isinstance(error, OSError) and error.strerror:
        return os_sentence(error)
    if type(error) is ValueError:  # raised by Python, e.g. for a number with thousands of digits or an invalid date
        return f"a value cannot be parsed ({error}); correct it"
    if not str(error) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(NOISE)]
    return " ".join(kept) or type(error).__name__
