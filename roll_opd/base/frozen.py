"""An immutable dict for the free-form parts of a plan (engine arguments, environments)."""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn


class FrozenDict(dict[str, Any]):
    """Immutable dict that can be pickled. Its values are frozen too, recursively."""

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        super().__init__({key: freeze(value) for key, value in dict(values).items()})

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a plan is immutable: change the configuration and plan again")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return FrozenDict, (dict(self),)


def freeze(value: Any) -> Any:
    """Return `value` with every dict converted to a `FrozenDict` and every list to a tuple."""
    if isinstance(value, dict):
        return FrozenDict(value)
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


def thaw(value: Any) -> Any:
    """Return `value` with plain dicts and lists, because some libraries require these types."""
    if isinstance(value, dict):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [thaw(item) for item in value]
    return value
