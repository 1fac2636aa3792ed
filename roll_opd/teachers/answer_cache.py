"""On-disk cache of a server's answers, so that a resumed run does not pay for the same sequence twice.

The directory of a run has one SQLite file for each teacher. The key of an answer is the hash of its request. The file
also has the fingerprint of the model that gave the answers. When the answers exceed `MAX_BYTES`, the older half of them
is removed.

A fingerprint shows whether a server changed its model: it is the log-probs of a fixed text. The scorings of one model
differ by rounding, because other requests in a batch change the order of sums. The fixed text is therefore scored
several times, whole and cut, and the spread of these scorings determines the tolerance.

Legend: T tokens of the text, R scorings.
"""

import hashlib
import io
import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TEXT = (
    "The sum of 347 and 589 is 936, not 926: 7 + 9 = 16, carry 1. Water boils at 100 °C at sea level; on a mountain of"
    " 3,000 m it boils at 90 °C.\n\ndef area(r):\n    return 3.14159 * r ** 2  # of a circle\n\nNaïve Grüße aus 東京,"
    ' привет! <b>"quoted"</b> {"key": [1, 2.5, null]} She sells sea shells, and the quick brown fox jumps over the lazy'
    " dog. Therefore x = (a + b) / 2, so that the answer is 42.\nQ: Which river flows through Vienna? A: The Danube."
)
# Least tolerance, in nats per token. Scorings of one model in f32 differ by 1e-5 or less.
LEAST = 2e-3
FACTOR = 5.0  # tolerance in units of the spread: other hardware rounds differently than another batch does


@dataclass(frozen=True)
class Fingerprint:
    """A model's log-probs of the tokens of `TEXT`."""

    tokens: np.ndarray  # int64 [T]
    logprobs: np.ndarray  # f32 [T-1]
    spread: float  # largest mean difference of a scoring from the median of all scorings, nats per token

    @classmethod
    def of(cls, tokens: np.ndarray, scorings: Sequence[np.ndarray]) -> "Fingerprint":
        """Return the fingerprint from R scorings of the text, or of its first tokens. At least one scores all tokens.

        Args:
            tokens: int64 [T].
            scorings: log-probs of all tokens except the first, f32 [at most T-1] each.
        """
        rows = np.full((len(scorings), len(tokens) - 1), np.nan)
        for row, logprobs in zip(rows, scorings, strict=True):
            row[: len(logprobs)] = logprobs
        median = np.nanmedian(rows, 0)
        return cls(tokens, median.astype(np.float32), float(np.nanmean(np.abs(rows - median), 1).max()))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "Fingerprint":
        """Return the fingerprint that `arrays` stored."""
        return cls(arrays["tokens"], arrays["logprobs"], float(arrays["spread"]))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the fields as arrays."""
        return {"tokens": self.tokens, "logprobs": self.logprobs, "spread": np.array(self.spread)}

    def difference(self, other: "Fingerprint") -> tuple[float, float]:
        """Return (difference, tolerance) in nats per token. Above the tolerance, the models are not the same.

        If a tokenizer splits the text into other tokens, the difference is infinite.
        """
        tolerance = max(LEAST, FACTOR * max(self.spread, other.spread))
        count = min(len(self.tokens), len(other.tokens))  # a run with longer sequences scores more of the text
        if not np.array_equal(self.tokens[:count], other.tokens[:count]):
            return float("inf"), tolerance
        gaps = np.abs(self.logprobs[: count - 1] - other.logprobs[: count - 1])
        return float(gaps.mean(dtype=np.float64)), tolerance


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


def request_key(tokens: np.ndarray, ids: np.ndarray | None, prompt_length: int, topk: int) -> bytes:
    """Return the hash of a request. The model is not part of the key, as a file has the answers of only one model.

    Args:
        tokens: token ids of the sequence.
        ids: token ids whose log-probs are requested.
    """
    found = hashlib.blake2b(json.dumps({"prompt_length": prompt_length, "topk": topk}).encode(), digest_size=16)
    for array in (tokens,) if ids is None else (tokens, ids):
        found.update(np.ascontiguousarray(array, np.int64).tobytes())
    return found.digest()
