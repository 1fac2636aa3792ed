"""Tokenizers of the kinds that models use, trained on a few lines, as contents of tokenizer.json."""

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = [
    "The sum of 347 and 589 is 936.\nTherefore the answer is \\boxed{936}.",
    "<think>\nFirst we carry the one.\n</think>\n\nDone!",
    "def add(a, b):\r\n    return a + b  # twice\r\n",
    "naïve café, Straße, 東京都, приве́т, 👩‍👩‍👧‍👦 and 🙂🙃",
    "aaa bbb  ccc   ddd\t\teee 10000 2024-11-27 3.14159",
] * 3
SPECIAL = ["<s>", "</s>", "<|start|>", "<|end|>"]
EVERY_BYTE = ("byte_level", "digits", "bytes_only", "prefix_space", "llama", "mistral", "gemma", "unigram_bytes")
KINDS = (*EVERY_BYTE, "unigram")


@cache
def content(kind: str) -> dict[str, Any]:
    """Return the tokenizer.json of a kind."""
    return json.loads(_tokenizer(kind).to_str())


def _tokenizer(kind: str) -> Tokenizer:
    tokenizer = _byte_level(kind) if kind in EVERY_BYTE[:4] else _sentence_piece(kind)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return tokenizer


def _byte_level(kind: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix_space", use_regex=kind != "digits")
    tokenizer.pre_tokenizer = level
    if kind == "digits":
        tokenizer.normalizer = normalizers.NFC()
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    tokenizer.decoder = decoders.ByteLevel()
    size = {"byte_level": 420, "digits": 400, "bytes_only": 256, "prefix_space": 380}[kind]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def _sentence_piece(kind: str) -> Tokenizer:
    has_bytes = kind in EVERY_BYTE
    spelled = [f"<0x{byte:02X}>" for byte in range(256)] if has_bytes else []
    is_unigram = kind.startswith("unigram")
    tokenizer = Tokenizer(models.Unigram() if is_unigram else models.BPE(unk_token="<unk>", byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    if kind == "llama":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
    elif kind == "gemma":
        tokenizer.normalizer = space
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if kind == "mistral" else "always")
        tokenizer.normalizer = normalizers.NFKC() if is_unigram else None
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    settings: dict[str, Any] = {"vocab_size": 260 if has_bytes else 150, "show_progress": False}
    if is_unigram:
        trainer: Any = trainers.UnigramTrainer(unk_token="<unk>", special_tokens=["<unk>"], **settings)
    else:
        trainer = trainers.BpeTrainer(special_tokens=["<unk>"], **settings)
    tokenizer.train_from_iterator(TEXT, trainer)
    return _with_byte_tokens(tokenizer, spelled)


def _with_byte_tokens(tokenizer: Tokenizer, spelled: list[str]) -> Tokenizer:
    """Return the tokenizer with tokens of single bytes at the end of its vocabulary."""
    found = json.loads(tokenizer.to_str())
    model = found["model"]
    model["byte_fallback"] = bool(spelled)
    if isinstance(model["vocab"], list):
        model["vocab"] += [[token, -20.0] for token in spelled]
    else:
        model["vocab"] |= {token: len(model["vocab"]) + number for number, token in enumerate(spelled)}
    found["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(found))
