"""`Registry` of an extension point. A configuration selects a part by its registered name or by a dotted path.

Names come from the core's package of the extension point, from entry points (`entry_points`) of the rooms of
`roll_opd/extras` and of installed packages, and from imported modules. The planner reads the arguments of a part from
the part's signature, and its other properties from the facts of the registration. If names, facts and defaults are
literals, the planner reads them from the source, without importing torch.
"""

import ast
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from roll_opd.base.entry_points import entries, load
from roll_opd.base.failures import did_you_mean
from roll_opd.base.frozen import thaw
from roll_opd.base.user_modules import users_module

Part = TypeVar("Part", bound=Callable[..., Any])
Facts = TypeVar("Facts")

_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)
_NO_ARGUMENTS = ast.parse("def f(): ...").body[0].args  # type: ignore[attr-defined]
_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Declared:
    """A part whose name is known without an import: its module, its facts, and the defaults of its keyword arguments.

    If the facts are None, the module has to be imported to learn the facts and the defaults.
    """

    module: str
    facts: Mapping[str, Any] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NoFacts:
    """No facts: the planner reads only the name and the arguments of such a part."""


@dataclass(frozen=True)
class Registry(Generic[Facts]):
    """Registry of one extension point. If a name is wrong, the methods raise the exception class `error`."""

    kind: str  # "reward", for messages
    made_of: str  # "function or class", for messages
    example: str  # a dotted path, for messages
    error: type[Exception]
    package: str  # package of the core whose modules register names
    facts_type: Callable[..., Facts]  # dataclass; its defaults are the facts of unregistered parts
    decorator: str | None = None  # decorator to find in the sources; None: one part per module
    elsewhere: tuple[str, ...] = ()  # valid names that are not resolved here
    group: str = ""  # group of entry points, `roll_opd.<group>`
    # name of an entry point -> part of the core that has this name while no entry point has it
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    _registered: dict[str, tuple[Callable[..., Any], Facts]] = field(default_factory=dict)

    def register(self, name: str, **facts: Any) -> Callable[[Part], Part]:
        """Register a function or class under `name`, with `facts`; raise `error` if the name is taken."""

        def decorate(part: Part) -> Part:
            known, _ = self._registered.get(name, (part, None))
            path = f"{known.__module__}.{known.__qualname__}"
            declared = self.declared(name)
            if declared and declared.module != part.__module__:
                path = declared.module
            # same part: its module was imported twice
            elif path == f"{part.__module__}.{part.__qualname__}":
                self._registered[name] = (part, self.facts_type(**facts))
                return part
            raise self.error(f"a {self.kind} named {name!r} is already registered: {path}")

        return decorate

    @property
    def builtin(self) -> tuple[str, ...]:
        """Names of the core and of entry points, sorted."""
        return tuple(sorted({*self._of_core, *self._entries, *self.fallbacks}))

    @property
    def known(self) -> str:
        """All known names, joined into one text for error messages."""
        return ", ".join(sorted({*self.elsewhere, *self.builtin, *self._registered}))

    def find(self, name: str) -> Callable[..., Any]:
        """Return the function or class with this name; raise `error` if it cannot be found."""
        name = self._available(name)
        if name in self._entries:
            try:
                part = load(self._entries[name])
            except ImportError as error:
                raise self.error(f"{self.kind} {name}: {error}") from error
            self._registered.setdefault(name, (part, self.facts_type()))
        elif name in self._of_core:
            importlib.import_module(self._of_core[name].module)
        if name in self._registered:
            return self._registered[name][0]
        module_name, _, attribute = name.rpartition(".")
        if not module_name:
            hint = did_you_mean(name, self.known.split(", "))
            hint = f"{hint} Known are" if hint else "known are"
            raise self.error(
                f"unknown {self.kind} {name!r}; {hint} {self.known}, or a dotted path such as {self.example}"
            )
        try:
            module = users_module(module_name)
        except ImportError as error:
            raise self.error(f"{self.kind} {name}: {error}") from error
        found = vars(module).get(attribute)
        if not callable(found):
            file = getattr(module, "__file__", None)
            where = f"{module_name} ({file})" if file else f"Python's module {module_name}"
            raise self.error(f"{self.kind} {name}: {where} has no {self.made_of} named {attribute}; correct the name")
        return found

    def facts(self, name: str) -> Facts:
        """Return the facts of a part; raise `error` if the part cannot be found.

        A part may be registered under several names with different facts. If `name` is a dotted path, the facts of the
        first registered name are returned.
        """
        declared = self.declared(name)
        if declared and declared.facts is not None:
            return self.facts_type(**declared.facts)
        part, name = self.find(name), self._available(name)
        if name in self._registered:
            return self._registered[name][1]
        return next((facts for known, facts in self._registered.values() if known is part), self.facts_type())

    def defaults(self, name: str) -> dict[str, Any]:
        """Return the defaults of the arguments of a part.

        The first argument is left out, because the caller passes it.
        """
        declared = self.declared(name)
        if declared and declared.facts is not None:
            return dict(declared.defaults)
        return defaults(self.find(name), given_by_us=1)

    def located(self, name: str) -> str:
        """Return a name with which other processes can import a part.

        For a part of the core and of an entry point, this is its name. For any other part, this is its dotted path.

        Raises:
            error: for an unknown name, and for a part that is defined in `__main__`.
        """
        if name in (*self.elsewhere, *self.builtin):
            return name
        if name not in self._registered:
            if "." not in name:
                self.find(name)  # raises
            return name
        part = self._registered[name][0]
        path = f"{part.__module__}.{part.__qualname__}"
        if path.startswith("__main__."):
            raise self.error(f"{self.kind} {name}: the workers cannot import {path}; put it into a module")
        return path

    def declared(self, name: str) -> Declared | None:
        """Return what is known of a part of the core or of an entry point without importing its module, else None."""
        if name in self._entries:
            return of_entry(self._entries[name], self.decorator)
        return self._of_core.get(self._available(name))

    def _available(self, name: str) -> str:
        """Return `name`, or the name of the part of the core that stands in for a missing entry point."""
        return name if name in self._entries else self.fallbacks.get(name, name)

    def replacement(self, name: str) -> str | None:
        """Return the module of an installed part that is used instead of the core's `fallbacks`, or None."""
        return self._entries[name].module if name in self.fallbacks and name in self._entries else None

    @property
    def _of_core(self) -> Mapping[str, Declared]:
        return declarations(self.package, self.decorator)

    @property
    def _entries(self) -> Mapping[str, EntryPoint]:
        found = entries(self.group) if self.group else {}
        for name in found.keys() & self._of_core.keys():
            raise self.error(
                f"{found[name].value} cannot be named {name!r}, a {self.kind} of {self.package}; rename it"
            )
        return found


def declarations(package: str, decorator: str | None) -> Mapping[str, Declared]:
    """Return a dict from the name of each part in `package` to its declaration.

    A part is a function or class with the decorator `decorator`. If `decorator` is None, each module is one part.

    Raises:
        ValueError: if a name, a fact or a default is not a literal.
    """
    directories = importlib.import_module(package).__path__
    return _declarations(package, decorator, tuple((name, os.stat(name).st_mtime_ns) for name in directories))


@cache
def _declarations(
    package: str, decorator: str | None, directories: tuple[tuple[str, int], ...]
) -> Mapping[str, Declared]:
    """Do what `declarations` does, with a cache.

    `directories` contains modification times. They are a part of the cache key, so a changed directory is read again.
    """
    paths = [path for path, _ in directories]
    sources = {Path(d, f"{module.name}.py") for d in paths for module in pkgutil.iter_modules([d]) if not module.ispkg}
    modules = {source.stem: f"{package}.{source.stem}" for source in sources}
    if decorator is None:
        return {name: Declared(module) for name, module in modules.items()}
    return dict(found for source in sources for found in _read(source, modules[source.stem], decorator))


def of_entry(entry: EntryPoint, decorator: str | None) -> Declared:
    """Return what is known of the part of an entry point without importing its module."""
    source = _source(entry.module) if decorator else None
    try:
        read = dict(_read(source, entry.module, decorator)) if source and decorator else {}
    except ValueError:  # not literals
        read = {}
    return read.get(entry.name, Declared(entry.module))


@cache
def _source(module: str) -> Path | None:
    """Return the source file of a module, without importing the module (its package is imported)."""
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


@cache
def _read(source: Path, module: str, decorator: str) -> tuple[tuple[str, Declared], ...]:
    found: list[tuple[str, Declared]] = []
    text = source.read_text(encoding="utf-8")
    tree = ast.parse(text if f"@{decorator}(" in text else "")
    for part in [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]:
        for call in part.decorator_list:
            if not isinstance(call, ast.Call) or ast.unparse(call.func) != decorator:
                continue
            arguments = part.args if isinstance(part, ast.FunctionDef) else _NO_ARGUMENTS
            given = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            try:
                facts = {str(fact.arg): ast.literal_eval(fact.value) for fact in call.keywords}
                defaults = {argument.arg: ast.literal_eval(default) for argument, default in given if default}
                found.append((ast.literal_eval(call.args[0]), Declared(module, facts, defaults)))
            except ValueError as error:
                what = "write its name, facts and defaults as literals, because they are read before torch is imported"
                raise ValueError(f"{source}:{part.lineno}: {part.name}: {what} ({error})") from error
    return tuple(found)


def arguments(part: Callable[..., Any], given_by_us: int) -> dict[str, inspect.Parameter]:
    """Return the arguments of `part` that a configuration can set.

    Args:
        given_by_us: number of leading arguments that the caller passes. They are left out.

    Raises:
        ValueError: if the part has no signature, such as a function written in C.
    """
    parameters = list(inspect.signature(part).parameters.values())[given_by_us:]
    return {parameter.name: parameter for parameter in parameters if parameter.kind in _KEYWORD}


def annotations(part: Callable[..., Any]) -> dict[str, Any]:
    """Return a dict from each argument of `part` to its type; empty if the annotations cannot be evaluated."""
    try:
        return get_type_hints(part.__init__ if inspect.isclass(part) else part)
    except (NameError, TypeError):
        return {}


def defaults(part: Callable[..., Any], given_by_us: int) -> dict[str, Any]:
    """Return the defaults of the `arguments` of `part`. Arguments without a default are left out."""
    found = arguments(part, given_by_us)
    return {name: parameter.default for name, parameter in found.items() if parameter.default is not parameter.empty}


def argument_problems(
    part: Callable[..., Any], given: Mapping[str, Any], given_by_us: int
) -> Iterator[tuple[str, str]]:
    """Yield (argument, problem) for each unknown, missing or wrongly typed argument of `part`.

    Types are read from annotations and checked strictly. For example, "1" is not a number. Arguments without an
    annotation are not checked.
    """
    taken = arguments(part, given_by_us)
    parameters = inspect.signature(part).parameters.values()
    places = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if places < given_by_us and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        yield "its call", f"passes {given_by_us} arguments before the configured ones, but it accepts only {places}"
    catches_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    hints = annotations(part)
    for name, value in given.items():
        if name in taken:
            problem = type_problem(hints.get(name, Any), thaw(value))
            if problem:
                yield name, problem
        elif not catches_all:
            hint = did_you_mean(name, taken, f"known are {', '.join(taken) or 'none'}")
            yield name, f"unknown argument; {hint}"
    for name, parameter in taken.items():
        if parameter.default is parameter.empty and name not in given:
            yield name, "is missing"


def as_mapping(value: Any) -> str | None:
    """Return a message if `value` is the text of a JSON object, as on a command line, else None."""
    try:
        is_mapping = isinstance(value, str) and isinstance(json.loads(value), dict)
    except ValueError:
        return None
    return f"is a mapping written as text; write it without the quotes: {value}" if is_mapping else None


def type_problem(annotation: Any, value: Any) -> str | None:
    """Return a message if `value` does not have the type `annotation`, else None."""
    try:
        TypeAdapter(annotation, config=_STRICT).validate_python(value)
    except ValidationError as error:
        if isinstance(value, list) and type_problem(annotation, tuple(value)) is None:
            return None  # YAML has no tuples
        if (message := as_mapping(value)) and type_problem(annotation, json.loads(value)) is None:
            return message
        texts = [str(item["msg"]).removeprefix("Input should be ") for item in error.errors(include_url=False)]
        return f"should be {' or '.join(dict.fromkeys(texts))}, got {value!r}"
    except (PydanticUserError, NameError):
        return None  # an annotation that only a type checker understands
    return None
