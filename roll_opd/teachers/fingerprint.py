"""Fingerprints of models behind servers: log-probs of a fixed text, which show whether a server changed its model.

The scorings of one model differ by rounding, because other requests in a batch change the order of sums. The fixed text
is therefore scored several times, whole and cut, and the spread of these scorings determines the tolerance.

Legend: T tokens of the text, R scorings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
