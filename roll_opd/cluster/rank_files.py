"""Files that ranks write, possibly in the background: the driver's handle to wait for them."""

from collections.abc import Sequence
from pathlib import Path

from roll_opd.cluster.group import ActorGroup


class Writing:
    """Running `save` of some groups of ranks."""

    def __init__(self, groups: Sequence[ActorGroup]) -> None:
        self.groups = tuple(groups)

    async def files(self, *, wait: bool) -> list[Path] | None:
        """Return all files when written; None if unfinished, unless `wait`. Raises the exception of a rank."""
        found: set[Path] = set()
        for group in self.groups:
            for files in await group.call("written", wait=wait):
                if files is None:
                    return None
                found |= set(files)
        return sorted(found)
