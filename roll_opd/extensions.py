"""Extension points: a configuration names a part by a registered name or by a dotted path, everywhere the same way."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Registered = TypeVar("Registered", bound=Callable[..., Any])


@dataclass(frozen=True)
class Registry:
    """The names of one extension point. What is wrong with a name is raised as `error`."""

    kind: str  # "reward", for messages
    made_of: str  # "function or class", what a dotted path leads to
    example: str  # a dotted path, for messages
    error: type[Exception]
    ours: Mapping[str, str]  # name -> the module of this package that registers it
    elsewhere: tuple[str, ...] = ()  # names that mean something and are not looked up here
    _registered: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """Make a function or class known as `name`; an error where another one has the name."""

        def decorate(part: Registered) -> Registered:
            known = self._registered.setdefault(name, part)
            # the same one again: its module has been imported a second time
            if known is not part and (known.__module__, known.__qualname__) != (part.__module__, part.__qualname__):
                path = f"{known.__module__}.{known.__qualname__}"
                raise self.error(f"a {self.kind} named {name!r} is already registered: {path}")
            self._registered[name] = part
            return part

        return decorate

    @property
    def known(self) -> str:
        """Every name, for messages."""
        return ", ".join(sorted({*self.elsewhere, *self.ours, *self._registered}))

    def path(self, name: str) -> str:
        """The dotted path of what a user's `name` means; imports nothing."""
        if name in self._registered:
            part = self._registered[name]
            return f"{part.__module__}.{part.__qualname__}"
        if "." not in name:
            raise self._unknown(name)
        return name

    def find(self, name: str) -> Callable[..., Any]:
        """The function or class that `name` means; only its own module is imported."""
        if name in self.ours:
            importlib.import_module(self.ours[name])
        if name in self._registered:
            return self._registered[name]
        module_name, _, attribute = name.rpartition(".")
        if not module_name:
            raise self._unknown(name)
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise self.error(
                f"{self.kind} {name}: the module {module_name} cannot be imported: {error}; put it on PYTHONPATH or"
                " correct the name"
            ) from error
        found = vars(module).get(attribute)
        if not callable(found):
            raise self.error(
                f"{self.kind} {name}: {module_name} has no {self.made_of} named {attribute}; correct the name"
            )
        return found

    def _unknown(self, name: str) -> Exception:
        known = f"known are {self.known}, or a dotted path such as {self.example}"
        return self.error(f"unknown {self.kind} {name!r}; {known}")
