"""Runs of weight versions, against a list with the version of every token."""

import itertools
import random

import numpy as np
import pytest

from roll_opd.samples.versions import Versions, concatenated, of_mask, tokens_by_version, truncated


def every(runs: Versions) -> list[int | None]:
    return [version for version, tokens in runs for _ in range(tokens)]


def some(rng: random.Random) -> Versions:
    return tuple((rng.choice([None, 3, 4]), rng.randint(0, 3)) for _ in range(rng.randint(0, 4)))


@pytest.mark.parametrize("seed", range(20))
def test_runs_hold_the_version_of_every_token(seed: int) -> None:
    rng = random.Random(seed)
    parts = [some(rng) for _ in range(4)]
    tokens = [version for part in parts for version in every(part)]
    whole = concatenated(parts)
    assert every(whole) == tokens
    assert all(one != other for (one, _), (other, _) in itertools.pairwise(whole))  # no run is cut in two
    assert all(length for _, length in whole)
    for length in range(len(tokens) + 2):
        assert every(truncated(whole, length)) == tokens[:length]
    mask = np.array([version is not None for version in tokens], bool)
    assert every(of_mask(mask, 7)) == [7 if acted else None for acted in mask]
    sampled = [version for version in tokens if version is not None]
    assert tokens_by_version(parts) == {version: sampled.count(version) for version in set(sampled)}
