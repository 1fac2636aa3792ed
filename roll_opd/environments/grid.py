"""Grid games: symbol and action tables of the configuration, and their explanation in the instruction."""

from collections.abc import Collection, Mapping
from typing import Any

from roll_opd.environments.interface import EnvironmentFailure

TEXT = "text"  # the only render mode


def numbered(name: str, table: Mapping[Any, str], known: Collection[int]) -> dict[int, str]:
    """Return a table with integer keys, which may be strings; raises `EnvironmentFailure` for unknown numbers."""
    try:
        found = {int(key): str(value) for key, value in table.items()}
    except (TypeError, ValueError):
        found = {}
    if not found or not found.keys() <= set(known):
        numbers = ", ".join(map(str, sorted(known)))
        raise EnvironmentFailure(f"{name} is {dict(table)!r}; map numbers to texts; valid numbers are {numbers}")
    return found


def complete(name: str, table: Mapping[Any, str] | None, default: Mapping[int, str]) -> dict[int, str]:
    """Return the configured table of symbols, completed by the defaults."""
    return {**default, **numbered(name, table, default)} if table is not None else dict(default)


def explained(instruction: str, symbols: Mapping[str, str], actions: Mapping[int, str]) -> str:
    """Return an instruction followed by the meanings of the symbols and the action names."""
    meanings = ", ".join(f"{symbol}: {meaning}" for symbol, meaning in symbols.items())
    if not instruction:
        return ""  # an empty instruction disables the explanation
    return f"{instruction}\nSymbols: {meanings}\nActions: {', '.join(actions.values())}"


def only_text(render_mode: str) -> None:
    """Raise `EnvironmentFailure` unless the render mode is text."""
    if render_mode != TEXT:
        raise EnvironmentFailure(f"render_mode is {render_mode!r}; set {TEXT}: images are not supported")
