"""Files of installed packages that sandboxed programs may import."""

import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from roll_opd.rewards.interface import RewardError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def files_of_packages(names: Sequence[str]) -> tuple[Path, ...]:
    """Return the site-packages files and directories of packages (pip names) and their requirements. Raises
    `RewardError` for a missing package.
    """
    found: dict[str, Path] = {}
    seen: set[str] = set()
    waiting = [(name, True) for name in names]
    while waiting:
        name, is_requested = waiting.pop()
        if name.lower() in seen:
            continue
        seen.add(name.lower())
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if is_requested:
                raise RewardError(
                    f"code_sandbox: packages: {name} is not installed here; install it, or remove it"
                ) from None
            continue  # an extra, or a requirement of another system
        for file in package.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__", "/") and not top.endswith((".dist-info", ".pth")):
                found[top] = Path(str(package.locate_file(top)))
        for requirement in package.requires or ():
            match = _NAME.match(requirement)
            if match and "extra ==" not in requirement:
                waiting.append((match[0], False))
    return tuple(found[top] for top in sorted(found))
