"""Response lengths of the synthetic samples: all equal, all short, or with a long tail."""

import numpy as np

TOKENS, LONGEST = 1024, 16_384  # length of a response in `fixed`, longest response in `tail`
SHORT = 32  # length of a response in `short`, where the cost of a sample outweighs the cost of its tokens
LENGTHS = ("fixed", "tail", "short")


def lengths_of(kind: str, count: int, seed: int) -> np.ndarray:
    """Return response lengths, int64: all equal, or with a long tail (a mean of about 2,400)."""
    if kind != "tail":
        return np.full(count, TOKENS if kind == "fixed" else SHORT)
    return np.clip(np.random.default_rng(seed).lognormal(np.log(1500), 1.0, count), 16, LONGEST).astype(np.int64)
