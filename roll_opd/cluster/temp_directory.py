"""A directory for the temporary files of a run's processes, which goes with the run, however that ends.

vLLM leaves sockets and rendezvous files in TMPDIR, and a killed process leaves whatever it had there.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roll_opd.cluster.process_reaper import Reaper

LONGEST = 60  # characters: a path of a socket has at most 107, and vLLM adds 37
FALLBACK = "/tmp"
RAY_VARIABLE = "RAY_TMPDIR"  # where Ray keeps its session directories: their paths are nearly as long as they may be


@contextmanager
def run_temp_directory(reaper: Reaper) -> Iterator[None]:
    """Have the processes that start inside the block use a directory of their own, which `reaper` removes."""
    outer = os.environ.get("TMPDIR") or FALLBACK
    directory = tempfile.mkdtemp(prefix="roll_opd-", dir=outer if Path(outer).is_dir() else None)
    if len(directory) > LONGEST and os.access(FALLBACK, os.W_OK):
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix="roll_opd-", dir=FALLBACK)
    reaper.remove_at_the_end(Path(directory))
    before = {name: os.environ.get(name) for name in ("TMPDIR", RAY_VARIABLE)}
    os.environ |= {"TMPDIR": directory, RAY_VARIABLE: os.environ.get(RAY_VARIABLE) or outer}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}
