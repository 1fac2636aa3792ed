"""Find and import the user's modules, in the driver and in its workers.

Modules are searched for in Python's path, then in the current directory, then in the directory of the configuration
file. The two directories are appended to the path. A file next to a configuration therefore never hides an installed
package.
"""

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from roll_opd.base.failures import place_of
from roll_opd.base.installed import MODULE_PATH
from roll_opd.base.interpreter import REMEDY
from roll_opd.base.paths import PathError, find_path, places

VARIABLE = MODULE_PATH  # the directories, for worker processes
FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")  # path/to/file.py:name

_appended: set[str] = set()  # directories on sys.path because of this module


def search_modules_in(*directories: Path) -> None:
    """Set the directories in which the user's modules are searched for, in this process and its workers."""
    _leave(_appended)
    _search([str(directory.resolve()) for directory in directories])


def module_variables() -> dict[str, str]:
    """Return the environment variables that give a worker process the same module path."""
    return {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}


def users_module(name: str) -> ModuleType:
    """Import a module that a configuration names.

    If the import fails, raise an ImportError that states the reason and the place.
    """
    _extend_path(_directories())
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an import can raise anything, even SystemExit
        what = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        place = place_of(error)
        where = f" ({place})" if place and not place.startswith(__file__) else ""
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            advice = "put it next to the configuration or on PYTHONPATH, or correct the name"
        elif isinstance(error, ModuleNotFoundError) and error.name == "torch":
            advice = REMEDY
        else:
            advice = "correct the module, or install its imports"
        raise ImportError(f"the module {name} cannot be imported: {what}{where}; {advice}") from error


def dotted_path(text: str) -> str:
    """Convert `path/to/file.py:name` to `file.name`, and add the file's directory to Python's path.

    Other texts are returned unchanged. The file is searched for in the same directories as a data file.

    Raises:
        PathError: if the file is missing, if its name is not a module name, or if another module has the same name.
    """
    found = FILE.fullmatch(text)
    if found is None:
        return text
    file = find_path(found["file"])
    if file is None or not file.is_file():
        raise PathError(f"{text}: file {found['file']} not found in {places()}; correct the path")
    if not file.stem.isidentifier():
        raise PathError(f"{text}: {file.stem} is not a module name; rename {file.name}, with _ for other characters")
    _search([*_directories(), str(file.parent)])
    if (other := origin(file.stem)) != str(file):
        raise PathError(f"{text}: another module has the name {file.stem}: {other}; rename {file.name}")
    return f"{file.stem}.{found['name']}"


def origin(name: str) -> str | None:
    """Return the file of a top-level module.

    If the module has no file, return "built-in". If there is no such module, return None.
    """
    _extend_path(_directories())
    if module := sys.modules.get(name):
        file = getattr(module, "__file__", None)
        return str(Path(file).resolve()) if file else "built-in"
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    return str(Path(spec.origin).resolve()) if spec.has_location and spec.origin else "built-in"


def _directories() -> list[str]:
    return list(filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)))


def _search(directories: Iterable[str]) -> None:
    found = list(dict.fromkeys(directories))
    os.environ[VARIABLE] = os.pathsep.join(found)
    _extend_path(found)
    importlib.invalidate_caches()


def _extend_path(directories: Iterable[str]) -> None:
    for directory in directories:
        if directory not in sys.path:
            sys.path.append(directory)
            _appended.add(directory)


def _leave(directories: Iterable[str]) -> None:
    sys.path[:] = [entry for entry in sys.path if entry not in directories]
    _appended.clear()
