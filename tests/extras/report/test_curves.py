"""Curves against their definition, for many lengths; and the ends of tokens in a text."""

from collections.abc import Sequence

import numpy as np

from roll_opd.extras.report.curves import averaged, downsample, ends, spread, trend
from roll_opd.extras.report.samples import fair_limit
from roll_opd.pipelines.sample_texts import token_ends
from roll_opd.tracking.run_directory import to_json
from tests.each import each


@each("length", [0, 1, 2, 4, 5, 9, 10, 11, 99, 100, 101, 1001, 7777])
@each("most", [4, 10, 100])
def test_a_downsampled_curve(length: int, most: int) -> None:
    values = np.random.default_rng(length).normal(size=length)
    curve = [(3 * place, float(value)) for place, value in enumerate(values)]
    short = downsample(curve, most)
    assert len(short) <= max(most, 0) and set(short) <= set(curve) and short == sorted(short)
    if length <= most:
        assert short == curve
    else:
        assert short[0] == curve[0] and short[-1] == curve[-1]
        for choose in (min, max):
            assert choose(curve, key=lambda point: point[1]) in short


def test_means_over_runs() -> None:
    curve = [(step, float(step)) for step in range(1000)]
    line = trend(curve, 10)
    assert line == [(49.5 + 100 * run, 49.5 + 100 * run) for run in range(10)]
    assert trend(curve[:50]) == []
    rows = [{"step": step, "x": float(step)} for step in range(1, 8)]
    assert averaged(rows, ["x"], 3) == [
        {"step": 1, "to": 2, "x": 1.5},
        {"step": 3, "to": 4, "x": 3.5},
        {"step": 5, "to": 7, "x": 6.0},
    ]
    assert averaged([], ["x"], 3) == []
    assert ends([1.0]) == (1.0, 1.0) and ends([float(value) for value in range(20)]) == (0.5, 18.5)


def test_spread_has_both_ends() -> None:
    assert spread(range(1, 101), 4) == [1, 34, 67, 100] and spread([5, 6], 8) == [5, 6] and spread([], 3) == []


@each("lengths", [[], [5], [100, 1], [10] * 20, [1, 2, 3, 400], list(range(60))])
def test_the_fair_limit_is_the_largest_that_fits(lengths: list[int]) -> None:
    def total(limit: int) -> int:
        return sum(min(length, limit) for length in lengths)

    limit = fair_limit(lengths, 100)
    assert total(limit) <= 100 and (total(limit) == sum(lengths) or total(limit + 1) > 100)


def by_bytes(tokens: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(tokens).decode("utf-8", errors="replace")


def by_words(tokens: Sequence[int]) -> str:
    """A tokenizer that leaves out the space before the first word, as SentencePiece does."""
    return " ".join(["ab", "c", "défg", ""][token] for token in tokens)


@each("text", ["", "plain", "é", "日本語 and 👩‍👧 ok", "\n\n a"])
def test_token_ends_of_bytes(text: str) -> None:
    tokens = list(text.encode())
    ends = token_ends(by_bytes, tokens, text)
    expected = [len(bytes(tokens[: place + 1]).decode(errors="ignore")) for place in range(len(tokens))]
    assert ends == expected


@each("seed", range(20))
def test_token_ends_of_any_bytes_rise_to_the_end_of_the_text(seed: int) -> None:
    """Bytes that are no text, too: never falling, and in the end all of it."""
    tokens = np.random.default_rng(seed).integers(0, 256, size=200).tolist()
    text = by_bytes(tokens)
    ends = token_ends(by_bytes, tokens, text)
    assert len(ends) == 200 and ends == sorted(ends) and ends[0] >= 0 and ends[-1] == len(text)


def test_token_ends_of_words() -> None:
    tokens = [0, 1, 2, 2, 0]
    text = by_words(tokens)
    ends = token_ends(by_words, tokens, text)
    assert [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)] == [
        "ab",
        " c",
        " défg",
        " défg",
        " ab",
    ]


def test_recorded_log_probs_are_short_and_lose_nothing() -> None:
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32) * np.float32(1e-3)
    written = to_json({"x": values})
    assert np.array_equal(np.array(eval(written)["x"], dtype=np.float32), values)
    assert len(written) < 0.65 * len(to_json({"x": values.astype(np.float64)}))
    assert to_json(np.array([np.nan, np.inf, 1.5], dtype=np.float32)) == "[null, null, 1.5]"
