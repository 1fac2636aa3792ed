"""Files that ranks are writing, maybe beside their work, as the driver sees it."""

from collections.abc import Sequence
from pathlib import Path

from roll_opd.cluster.group import ActorGroup


class Writing:
    """What a `save` of some groups of ranks has not ended yet."""

    def __init__(self, groups: Sequence[ActorGroup]) -> None:
        self.groups = tuple(groups)

    async def files(self, *, wait: bool) -> list[Path] | None:
        """Return all files, once they are written; None where that would be to `wait` for. Raises what a rank did."""
        found: set[Path] = set()
        for group in self.groups:
            for files in await group.call("written", wait=wait):
                if files is None:
                    return None
                found |= set(files)
        return sorted(found)
