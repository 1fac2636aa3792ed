"""On-disk cache of a server's answers, so that a resumed run does not pay for the same sequence twice.

The directory of a run has one SQLite file for each teacher. The key of an answer is the hash of its request. The file
also has the fingerprint of the model that gave the answers. When the answers exceed `MAX_BYTES`, the older half of them
is removed.
"""

import hashlib
import io
import json
import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

MAX_BYTES = 2**30
FINGERPRINT = b"fingerprint"  # key of the model's fingerprint; it is never removed


class AnswerCache:
    """A table that maps requests to arrays. If the file cannot be read or written, every request counts as unknown."""

    def __init__(self, path: Path) -> None:
        """Open or create the file."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._table = sqlite3.connect(path, isolation_level=None)
        with suppress(sqlite3.Error):
            self._table.execute("PRAGMA synchronous = OFF")  # answers that a crash loses are requested again
            self._table.execute("CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, value BLOB)")

    def read(self, key: bytes) -> dict[str, np.ndarray] | None:
        """Return the arrays stored for a request, or None if the request is unknown."""
        try:
            row = self._table.execute("SELECT value FROM answers WHERE key = ?", (key,)).fetchone()
            return dict(np.load(io.BytesIO(row[0]), allow_pickle=False)) if row else None
        except (sqlite3.Error, ValueError, OSError):
            return None

    def write(self, answers: Mapping[bytes, Mapping[str, np.ndarray]]) -> None:
        """Store the arrays of requests. If the cache is then too large, remove the older half of its entries."""
        rows = []
        for key, arrays in answers.items():
            file = io.BytesIO()
            np.savez(file, **arrays)  # type: ignore[arg-type]
            rows.append((key, file.getvalue()))
        with suppress(sqlite3.Error):
            self._table.execute("BEGIN")
            self._table.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", rows)
            size = self._table.execute("SELECT TOTAL(LENGTH(value)) FROM answers").fetchone()[0]
            if size > MAX_BYTES:
                half = "SELECT rowid FROM answers ORDER BY rowid LIMIT (SELECT COUNT(*) / 2 FROM answers)"
                self._table.execute(f"DELETE FROM answers WHERE rowid IN ({half}) AND key != ?", (FINGERPRINT,))
            self._table.execute("COMMIT")

    def close(self) -> None:
        """Close the file. Further calls do nothing."""
        self._table.close()


def request_key(tokens: np.ndarray, settings: Mapping[str, Any]) -> bytes:
    """Return the hash of a request. The model is not part of the key, as a file has the answers of only one model.

    Args:
        tokens: token ids of the sequence.
        settings: further settings of the request, as JSON values or arrays.
    """
    found = hashlib.blake2b(digest_size=16)
    plain = {name: value for name, value in settings.items() if not isinstance(value, np.ndarray)}
    found.update(json.dumps(plain, sort_keys=True).encode())
    for array in (tokens, *(value for value in settings.values() if isinstance(value, np.ndarray))):
        found.update(np.ascontiguousarray(array, np.int64).tobytes())
    return found.digest()
