"""Tokenizers of random forms: normalizers, pre-tokenizers, decoders and added tokens as published models combine them.

All forms have one vocabulary: the characters of byte-level BPE, tokens of single bytes, and words with each mark of a
space.
"""

import random
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models
from tokenizers import decoders as D
from tokenizers import normalizers as N
from tokenizers import pre_tokenizers as P

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "\n", "th", "the", "▁the", "Ġthe", "_the", "▁a", "Ġa", "_a", "12", "ĊĊ", "é", "東"]
TOKENS = list(dict.fromkeys(["<unk>", *BYTES, *sorted(P.ByteLevel.alphabet()), *WORDS]))
VOCABULARY = {token: number for number, token in enumerate(TOKENS)}
MERGES = [
    *(("t", "h"), ("th", "e"), ("▁", "the"), ("Ġ", "the"), ("_", "the")),
    *(("▁", "a"), ("Ġ", "a"), ("_", "a"), ("1", "2"), ("Ċ", "Ċ"), ("▁", "▁")),
]
SCORES = [(token, -20.0 if token in BYTES else -1.0 - 2 * (len(token) < 2)) for token in TOKENS]
PIECES = ["the", " the", "a", " a", "  ", "\n", "\n\n", "12", "3", ".", "é", "東", "🙂", "▁", "_", "A", "ﬁ", "e\u0301"]
PIECES += ["\u00a0", "\t", "<s>", "<t>", "[x]"]


def random_form(draw: random.Random) -> Tokenizer:
    """Return a tokenizer that writes its tokens back as the text that they were made from, except for spaces."""
    kind, mark = draw.choice(["bytes", "normalized bytes", "metaspace", "prepend", "replace"]), draw.choice("▁▁_")
    first: list[Any] = [N.NFC(), N.NFKC(), N.Strip(True, False), N.Strip(False, True), N.Nmt(), _TWO_SPACES]
    split: list[Any] = [P.Digits(True), P.Punctuation(), P.Split(Regex(r"\d"), "isolated"), P.Split("\n", "isolated")]
    normal, split = draw.sample(first, draw.choice([0, 0, 1, 2])), draw.sample(split, draw.choice([0, 0, 1, 2]))
    decode: list[Any] = [D.ByteLevel()]
    if kind == "bytes":
        split = [*split, P.ByteLevel(add_prefix_space=not split and draw.random() < 0.5, use_regex=draw.random() < 0.5)]
    elif kind == "normalized bytes":
        normal, split = [*normal, N.ByteLevel()], []
    else:
        marked = [D.Replace(mark, " "), D.ByteFallback(), D.Fuse(), D.Strip(" ", 1, 0)]
        decode = draw.choice([marked, marked[:3], [D.ByteFallback(), D.Metaspace(replacement=mark)]])
        if kind == "metaspace":
            scheme = draw.choice(["first", "always", "never"])
            split = [P.Metaspace(replacement=mark, prepend_scheme=scheme, split=draw.random() < 0.5), *split]
        else:
            space = draw.choice([N.Replace(" ", mark), N.Replace(Regex(" "), mark)])
            normal = [*normal, *([N.Prepend(mark)] if kind == "prepend" else []), space]
    tokenizer = Tokenizer(_model(draw, is_bytes=kind.endswith("bytes")))
    tokenizer.normalizer, tokenizer.pre_tokenizer = N.Sequence(normal), P.Sequence(split)
    tokenizer.decoder = D.Sequence(decode)

    def flags(**fixed: bool) -> Any:
        return {name: draw.random() < 0.25 for name in ("lstrip", "rstrip", "normalized")} | fixed

    specials = [AddedToken("<s>", special=True, **flags(normalized=False)), AddedToken("<unk>", special=True)]
    tokenizer.add_special_tokens(specials)
    tokenizer.add_tokens([AddedToken(text, **flags(rstrip=False)) for text in ("<t>", "[x]")])
    return tokenizer


_TWO_SPACES = N.Replace(Regex(" {2,}"), " ")


def _model(draw: random.Random, is_bytes: bool) -> Any:
    if is_bytes:
        return models.BPE(vocab=VOCABULARY, merges=MERGES)
    if draw.random() < 0.4:
        return models.Unigram(SCORES, 0, draw.random() < 0.5)
    return models.BPE(
        vocab=VOCABULARY, merges=MERGES, unk_token="<unk>", byte_fallback=draw.random() < 0.7, fuse_unk=True
    )


def random_text(draw: random.Random, most: int) -> str:
    return "".join(draw.choices(PIECES, k=draw.randint(1, most)))
