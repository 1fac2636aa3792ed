"""Conversion between tokens and bytes, for the kinds of tokenizers that models use."""

import json
import os
import random
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizer_forms import random_form
from tokenizer_forms import random_text as text_of_form
from tokenizer_kinds import EVERY_BYTE, KINDS, content
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from roll_opd.models.model_files import ModelFilesError
from roll_opd.models.token_bytes import MISSING, ByteEncoder, token_bytes
from roll_opd.samples.byte_alignment import NO_CHUNK, Alignment

PIECES = [
    *"abcXYZ0123456789 \n\t.,:;!?\"'\\{}[]<>|/_-+=*#@~`^$%&()",
    *(
        "  ",
        "\r\n",
        "the",
        " the",
        "1000",
        "é",
        "e\u0301",
        "ß",
        "東京",
        "привет",
        "🙂",
        "👩‍👩‍👧",
        "\u200d",
        "\u00a0",
        "ﬁ",
        "①",
    ),
    *("<think>", "</think>", "<|end|>", "<s>", "▁", "<0x41>", "<unk>", "Ġ", "Ċ", "\x00", "\ufffd"),
]


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(PIECES, k=rng.randint(0, 30)))


def without_token(encoder: ByteEncoder) -> set[int]:
    """Return the bytes for which a tokenizer has no token."""
    return {byte for byte in range(256) if encoder.encode(bytes([byte]))[0] == [MISSING]}


def check(encoder: ByteEncoder, data: bytes, unknown: set[int]) -> tuple[list[int], np.ndarray]:
    """Check that tokens have the bytes at their place, and return them.

    Only single bytes without a token may be missing.
    """
    tokens, ends = encoder.encode(data)
    assert len(tokens) == len(ends) and (not data or ends[-1] == len(data))
    start = 0
    for token, end in zip(tokens, ends.tolist(), strict=True):
        if token == MISSING:
            assert end == start + 1 and data[start] in unknown
        else:
            assert encoder.table.by_id[token] == data[start:end]
            assert token not in encoder.table.special
        start = end
    return tokens, ends


def compare(encoders: Mapping[str, ByteEncoder], texts: int) -> None:
    """Check the alignment of random texts between each tokenizer and the next."""
    rng, kinds = random.Random(7), tuple(encoders)
    unknown = {kind: without_token(encoder) for kind, encoder in encoders.items()}
    for number in range(texts):
        data = random_text(rng).encode()
        if number % 4 == 0:  # cut inside a character, or with bytes that are no text
            data = data[: rng.randint(0, len(data))] + bytes(rng.choices(range(256), k=rng.randint(0, 3)))
        cuts = {kind: check(encoder, data, unknown[kind]) for kind, encoder in encoders.items()}
        for one, other in zip(kinds, [*kinds[1:], kinds[0]], strict=True):
            (student_tokens, ends), (tokens, teacher_ends) = cuts[one], cuts[other]
            if MISSING in student_tokens:
                continue
            missing = np.array(tokens, np.int64) == MISSING
            found = Alignment(ends, teacher_ends, missing, np.ones(len(ends), bool))
            assert int(found.sizes[:, 0].sum()) + found.uncovered == len(ends)
            logprobs = np.full(np.count_nonzero(~missing), -1.0, np.float32)
            on_student = found.on_student_tokens(logprobs)
            assert on_student[found.chunks != NO_CHUNK].sum() == pytest.approx(-found.sizes[:, 1].sum(), abs=1e-3)
            if not missing.any():
                assert found.uncovered == 0


def test_tokens_of_any_bytes_have_these_bytes() -> None:
    encoders = {kind: ByteEncoder(content(kind)) for kind in KINDS}
    assert not any(without_token(encoders[kind]) for kind in EVERY_BYTE)
    compare(encoders, 60)


@pytest.mark.nightly
def test_tokens_of_ten_thousand_strings_have_their_bytes() -> None:
    compare({kind: ByteEncoder(content(kind)) for kind in KINDS}, 10_000)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.skipif("TOKENIZERS" not in os.environ, reason="needs TOKENIZERS, a directory of directories of tokenizers")
def test_tokens_of_ten_thousand_strings_have_their_bytes_in_tokenizers_of_published_models() -> None:
    """Also the time of encoding and alignment, per student token of a long answer."""
    found = sorted(Path(os.environ["TOKENIZERS"]).glob("*/tokenizer.json"))
    encoders = {path.parent.name: ByteEncoder(json.loads(path.read_text())) for path in found}
    assert len(encoders) >= 2
    for name, encoder in encoders.items():
        print(f"{name}: no token for the bytes {bytes(sorted(without_token(encoder))).hex(' ')}")
    text = " ".join(random_text(random.Random(n)) for n in range(300)).encode()
    for (one, student), (other, teacher) in pairwise(encoders.items()):
        _, ends = student.encode(text)
        taken = []
        for _ in range(5):
            began = time.perf_counter()
            tokens, teacher_ends = teacher.encode(text)
            Alignment(ends, teacher_ends, np.array(tokens) == MISSING, np.ones(len(ends), bool))
            taken.append((time.perf_counter() - began) / len(ends))
        print(f"{one} -> {other}: {min(taken) * 1e6:.1f} us per token")
        assert min(taken) < 20e-6
    compare(encoders, 10_000)


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_cut_as_the_tokenizer_itself_cuts_it_inside_a_text(kind: str) -> None:
    """After a newline, which is a token of its own in every kind, the library's own tokens follow."""
    whole = Tokenizer.from_str(json.dumps(content(kind)))
    encoder = ByteEncoder(content(kind))
    text = "The answer is 936, so we carry the one."
    ours, _ = encoder.encode(("\n" + text).encode())
    theirs = whole.encode("\n" + text, add_special_tokens=False).ids
    assert ours[-8:] == theirs[-8:]


def compare_with_the_library(seeds: range) -> None:
    """Compare the bytes of tokens and the tokens of bytes with the library's reading of whole texts.

    Texts that the library changes, by a normalisation or with an unknown token, are left out of a comparison.
    """
    compared = {"bytes": 0, "<s>": 0, "<t>": 0, "3\n": 0}
    for seed in seeds:
        draw = random.Random(seed)
        whole = random_form(draw)
        encoder, unknown = ByteEncoder(json.loads(whole.to_str())), whole.token_to_id("<unk>")
        without = without_token(encoder)
        for text in (text_of_form(draw, 7) for _ in range(6)):
            ids, data = whole.encode(text, add_special_tokens=False).ids, text.encode()
            spelled, decoded = encoder.table.bytes_of(ids), whole.decode(ids, skip_special_tokens=False)
            if unknown not in ids and "\ufffd" not in decoded:
                assert spelled.decode().lstrip(" ") == decoded.lstrip(" "), (seed, text)
                compared["bytes"] += 1
            tokens, ends = check(encoder, data, without)
            for before in ("<s>", "<t>", "3\n"):
                found = whole.encode(before + text, add_special_tokens=False)
                after = next((n for n, (start, _) in enumerate(found.offsets) if start >= len(before)), len(found))
                if before != "3\n":
                    number = whole.token_to_id(before)
                    after, (tokens, ends) = 1, encoder.encode_after(number, data)
                    if found.ids[:1] != [number]:
                        continue
                    assert ends[-1] == len(data) and (np.diff(ends) >= 0).all()
                else:
                    tokens, _ = encoder.encode(data)
                expected = found.ids[after:]
                is_same_text = encoder.table.bytes_of(expected) in (data, b" " + data)
                if is_same_text and not {unknown, whole.token_to_id("<s>")} & set(expected):
                    assert tokens == expected, (seed, before, text)
                    compared[before] += 1
    assert min(compared.values()) > 2 * len(seeds), compared


def test_bytes_and_tokens_are_those_of_the_library_for_every_form() -> None:
    compare_with_the_library(range(60))


@pytest.mark.nightly
def test_bytes_and_tokens_are_those_of_the_library_for_a_thousand_forms() -> None:
    compare_with_the_library(range(100, 1100))


def test_a_form_that_does_not_preserve_all_bytes_is_refused() -> None:
    """The library loses the space of "a a", or writes text for a mark that is no text."""
    vocabulary = {"a": 0, "b": 1, "a</w>": 2, "##a": 3}
    lossy = [
        Tokenizer(models.WordPiece(vocabulary, unk_token="b")),
        Tokenizer(models.BPE(vocabulary, [], end_of_word_suffix="</w>")),
        Tokenizer(models.BPE(vocabulary, [], continuing_subword_prefix="##")),
    ]
    for step in (
        pre_tokenizers.Whitespace(),
        pre_tokenizers.WhitespaceSplit(),
        pre_tokenizers.Split(" ", "removed"),
        pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.CharDelimiterSplit(" ")]),
    ):
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = step
        lossy.append(tokenizer)
    for decoder in (decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC()):
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.decoder = decoder
        lossy.append(tokenizer)
    for tokenizer in lossy:
        with pytest.raises(ModelFilesError, match="does not preserve all bytes"):
            token_bytes(json.loads(tokenizer.to_str()))
