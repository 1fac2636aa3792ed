"""Installed packages that programs may import besides the standard library."""

import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from roll_opd.rewards.interface import RewardError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def files_of_packages(names: Sequence[str]) -> tuple[Path, ...]:
    """Return the files and directories in site-packages that the packages `names` (as pip knows them) consist of, with
    those that they require. Raises `RewardError` for one that is not installed here.
    """
    found: dict[str, Path] = {}
    seen: set[str] = set()
    waiting = [(name, True) for name in names]
    while waiting:
        name, is_asked_for = waiting.pop()
        if name.lower() in seen:
            continue
        seen.add(name.lower())
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if is_asked_for:
                raise RewardError(
                    f"code_sandbox: packages: {name} is not installed here; install it, or leave it out"
                ) from None
            continue  # an extra, or for another system
        for file in package.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__", "/") and not top.endswith((".dist-info", ".pth")):
                found[top] = Path(str(package.locate_file(top)))
        for requirement in package.requires or ():
            match = _NAME.match(requirement)
            if match and "extra ==" not in requirement:
                waiting.append((match[0], False))
    return tuple(found[top] for top in sorted(found))
