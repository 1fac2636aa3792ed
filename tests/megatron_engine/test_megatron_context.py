"""Packs split over context ranks: each token is on one rank, and each scored token is predicted on one rank."""

import numpy as np
import pytest
import torch

from roll_opd.megatron.packing import ContextRank, PackedBatch, pack, zigzag
from roll_opd.samples.sample import Sample

MULTIPLE = 8


def samples(seed: int) -> list[Sample]:
    """Return samples, some with a shared prompt, of each kind of length, with a column that numbers the tokens."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 99, size) for size in (1, 5, 40)]
    lengths = [0, 1, *rng.integers(2, 60, 8).tolist()]
    rows = [np.concatenate([prompts[n % 3], rng.integers(0, 99, length)]) for n, length in enumerate(lengths)]
    return [
        Sample(row, len(row) - length, {"next": row[len(row) - length :] + 1000})
        for row, length in zip(rows, lengths, strict=True)
    ]


def naive_zigzag(lengths: list[int], ranks: int) -> list[int]:
    """Token by token: each rank has one chunk of every sequence and the mirrored chunk, in order."""
    pieces: list[list[int]] = [[] for _ in range(ranks)]
    first = 0
    for length in lengths:
        chunks = np.array_split(np.arange(first, first + length), 2 * ranks)
        for rank in range(ranks):
            pieces[rank] += [*chunks[rank], *chunks[2 * ranks - 1 - rank]]
        first += length
    order = [token for piece in pieces for token in piece]
    return [order.index(token) for token in range(first)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_have_a_chunk_and_its_mirror_image(ranks: int) -> None:
    lengths = [2 * ranks * n for n in (1, 5, 0, 2)]
    assert zigzag(lengths, ranks).tolist() == naive_zigzag(lengths, ranks)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_scored_token_is_predicted_once_after_its_own_past(ranks: int, share: bool) -> None:
    for seed in range(5):
        rows = samples(seed)
        cuts = [
            pack(rows, torch.device("cpu"), MULTIPLE, share_prefixes=share, context=ContextRank(rank, ranks))
            for rank in range(ranks)
        ]
        tokens = torch.cat([cut.tokens_n for cut in cuts])
        positions = torch.cat([cut.positions_n for cut in cuts])
        assert len({len(cut.tokens_n) for cut in cuts}) == 1 and len(cuts[0].tokens_n) % MULTIPLE == 0
        for number, row in enumerate(rows):  # each sequence is found whole, at its own positions
            places = cells(cuts[0], number)[: len(row.tokens)]
            assert tokens[places].tolist() == row.tokens.tolist()
            assert positions[places].tolist() == list(range(len(row.tokens)))
        scored = [
            (t, p)
            for row in rows
            for t, p in zip(row.tokens[row.prompt_length :], row.tokens[row.prompt_length - 1 :], strict=False)
        ]
        found: dict[int, tuple[int, int]] = {}
        for rank, cut in enumerate(cuts):
            mine = torch.arange(len(scored)) if cut.owners is None else cut.owners.mine_M.nonzero()[:, 0]
            assert cut.owners is None or cut.owners.context.rank == rank
            before = cut.tokens_n[cut.before_m].tolist()
            found |= dict(zip(mine.tolist(), zip(cut.targets_m.tolist(), before, strict=True), strict=True))
            assert cut.lengths == tuple(len(row.tokens) - row.prompt_length for row in rows)
            assert cut.columns["next"].tolist() == [token + 1000 for token, _ in scored]
        assert [found[number] for number in range(len(scored))] == scored


def cells(batch: PackedBatch, number: int) -> torch.Tensor:
    """Places of a sequence's tokens, padding included."""
    bounds, places = batch.sequences.bounds, batch.sequences.places_X
    written = torch.arange(bounds[-1]) if places is None else places
    return written[bounds[number] : bounds[number + 1]]


def test_a_batch_of_nothing_has_the_columns_of_others() -> None:
    for context in (ContextRank(), ContextRank(1, 2)):
        batch = pack([], torch.device("cpu"), MULTIPLE, context=context, like=samples(0)[0])
        assert len(batch.tokens_n) == MULTIPLE and batch.lengths == () and len(batch.targets_m) == 0
        assert batch.columns["next"].shape == (0,)
