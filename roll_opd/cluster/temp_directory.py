"""Separate TMPDIR for the processes of a run, removed when the run ends or is killed.

vLLM leaves sockets and rendezvous files in TMPDIR, and killed processes leave theirs.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from roll_opd.cluster.process_reaper import Reaper

MAX_LENGTH = 60  # characters: socket paths are limited to 107, and vLLM adds 37
FALLBACK = "/tmp"
RAY_VARIABLE = "RAY_TMPDIR"  # parent of Ray's session directories, whose paths are near the limit


@contextmanager
def run_temp_directory(reaper: Reaper) -> Iterator[None]:
    """Set TMPDIR to a new directory for processes started inside the block; `reaper` removes it."""
    outer = os.environ.get("TMPDIR") or FALLBACK
    if not os.access(outer, os.W_OK | os.X_OK):
        outer = tempfile.gettempdir()
    directory = tempfile.mkdtemp(prefix="roll_opd-", dir=outer)
    if len(directory) > MAX_LENGTH and os.access(FALLBACK, os.W_OK):
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix="roll_opd-", dir=FALLBACK)
    reaper.remove_at_the_end(Path(directory))
    before = {name: os.environ.get(name) for name in ("TMPDIR", RAY_VARIABLE)}
    known, tempfile.tempdir = tempfile.tempdir, None  # Python caches TMPDIR at the first use
    os.environ |= {"TMPDIR": directory, RAY_VARIABLE: os.environ.get(RAY_VARIABLE) or outer}
    try:
        yield
    finally:
        tempfile.tempdir = known
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}
