"""Games on a grid of symbols: tables that a configuration may write, and the text that explains them."""

from collections.abc import Collection, Mapping
from typing import Any

from roll_opd.environments.interface import EnvironmentFailure

TEXT = "text"  # the only render mode


def numbered(name: str, table: Mapping[Any, str], known: Collection[int]) -> dict[int, str]:
    """Return a table by number, whose keys may be written as texts; `EnvironmentFailure` where a number is unknown."""
    try:
        found = {int(key): str(value) for key, value in table.items()}
    except (TypeError, ValueError):
        found = {}
    if not found or not found.keys() <= set(known):
        numbers = ", ".join(map(str, sorted(known)))
        raise EnvironmentFailure(f"{name} is {dict(table)!r}; write texts by number, with numbers of {numbers}")
    return found


def complete(name: str, table: Mapping[Any, str] | None, default: Mapping[int, str]) -> dict[int, str]:
    """Return a table of symbols, in which what the configuration leaves out is as usual."""
    return {**default, **numbered(name, table, default)} if table is not None else dict(default)


def explained(instruction: str, symbols: Mapping[str, str], actions: Mapping[int, str]) -> str:
    """Return an instruction with the meaning of the symbols and the names of the actions."""
    meanings = ", ".join(f"{symbol}: {meaning}" for symbol, meaning in symbols.items())
    if not instruction:
        return ""  # nothing is to be said
    return f"{instruction}\nSymbols: {meanings}\nActions: {', '.join(actions.values())}"


def only_text(render_mode: str) -> None:
    """Raise `EnvironmentFailure` for pictures."""
    if render_mode != TEXT:
        raise EnvironmentFailure(f"render_mode is {render_mode!r}; write {TEXT}: pictures are not supported")
