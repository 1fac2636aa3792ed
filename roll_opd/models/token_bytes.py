"""Map the tokens of a tokenizer to bytes, and bytes to tokens, without transformers.

A table of bytes by token id gives the exact text of any token sequence, even if a token contains only a part of a
character.

The encoder cuts bytes into tokens as the tokenizer does in the middle of a text. It therefore adds no
beginning-of-sequence token. It adds a space before the first word only after a special token, if the tokenizer does so
in a whole conversation. It does not normalise, because normalisation would change bytes.

Two formats are supported. The first is BPE over bytes, with GPT-2's table of characters. The second is the format of
SentencePiece: BPE or Unigram over characters, with a mark such as `▁` for a space and with tokens `<0xNN>` for single
bytes.

Legend: n bytes of a text, U tokens of the text, V token ids.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from roll_opd.models.model_files import ModelFilesError

SPACE = "▁"  # SentencePiece's character for a space
MISSING = -1  # instead of a token id, for bytes without a token
# steps that drop or add spaces between words; UnicodeScripts drops the first space of a text
_LOSSY = {
    *("UnicodeScripts", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"),
    *("WordPiece", "BPEDecoder", "CTC"),
}
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of every token id of a tokenizer."""

    by_id: tuple[bytes, ...]  # V; b"" for an id without a token
    added: dict[str, int]  # text -> id of an added token, such as a template's token
    special: frozenset[int]  # added tokens; text that spells such a token becomes ordinary tokens

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of bytes of each token id, int64 [V]."""
        return np.array([len(token) for token in self.by_id], np.int64)

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        """Return the concatenated bytes of tokens. Raises IndexError for an id outside the vocabulary."""
        return b"".join([self.by_id[token] for token in tokens])


def check_format(content: dict[str, Any]) -> None:
    """Raise ModelFilesError if a tokenizer.json has a format in which the bytes of a token are not known."""
    model = content["model"]
    steps = {name: list(_steps(content.get(name))) for name in ("normalizer", "pre_tokenizer", "decoder")}
    known = steps["decoder"] + [step for step in steps["pre_tokenizer"] if step.get("behavior") != "Removed"]
    lossy = [step["type"] for step in steps["decoder"] + steps["pre_tokenizer"] if step not in known]
    lossy += [step["type"] for step in known if step["type"] in _LOSSY]
    lossy += [name for name in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(name)]
    if model.get("type") not in ("BPE", "Unigram"):
        lossy = [str(model.get("type"))]
    elif not lossy and _is_byte_level(content) and _marks(content):
        lossy = ["ByteLevel and another mark of spaces"]
    if lossy:
        raise ModelFilesError(
            f"a tokenizer with {lossy[0]} does not preserve all bytes of a text, so its tokens cannot be aligned with"
            " another tokenizer's; use a teacher with a BPE or Unigram tokenizer that preserves them"
        )


def token_bytes(content: dict[str, Any], size: int = 0) -> TokenBytes:
    """Return the byte table of a tokenizer.json, padded to at least `size` ids.

    Raises ModelFilesError if the format does not determine the bytes of a token. For example, WordPiece loses spaces.
    """
    model, added = content["model"], content.get("added_tokens") or []
    vocabulary = model.get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: [token, score] in the order of ids
        vocabulary = {str(item[0]): number for number, item in enumerate(vocabulary)}
    read = _reader(content)
    by_id = [b""] * max([size, *(number + 1 for number in vocabulary.values()), *(one["id"] + 1 for one in added)])
    for token, number in vocabulary.items():
        by_id[number] = read(token)
    for one, text in zip(added, _normalized(content), strict=True):
        by_id[one["id"]] = one["content"].encode() if text == one["content"] else read(text)
    return TokenBytes(
        tuple(by_id),
        {one["content"]: one["id"] for one in added},
        frozenset(one["id"] for one in added if one.get("special")),
    )


def _reader(content: dict[str, Any]) -> Callable[[str], bytes]:
    """Return a function that maps a token of the vocabulary to its bytes."""
    check_format(content)
    if _is_byte_level(content):
        characters = _byte_characters()

        def from_characters(token: str) -> bytes:
            try:
                return bytes([characters[one] for one in token])
            except KeyError:  # not text, for example a special token in the vocabulary
                return token.encode()

        return from_characters
    fallback = bool(content["model"].get("byte_fallback"))
    marks = _marks(content)

    def read(token: str) -> bytes:
        if fallback and (found := _BYTE.fullmatch(token)):
            return bytes([int(found.group(1), 16)])
        for mark, text in marks.items():
            token = token.replace(mark, text)
        return token.encode()

    return read


def _is_byte_level(content: dict[str, Any]) -> bool:
    return any(step["type"] == "ByteLevel" for step in _text_steps(content))


def _marks(content: dict[str, Any]) -> dict[str, str]:
    """Return the characters that stand for other text in the tokens of a vocabulary, such as `▁` for a space."""
    marks = {}
    for step in _text_steps(content):
        if step["type"] == "Metaspace":
            marks[step.get("replacement", SPACE)] = " "
        elif step["type"] == "Replace" and _is_space(step):
            marks[step["content"]] = " "
        elif step["type"] == "Replace" and content.get("decoder") and "String" in step["pattern"]:
            marks[step["pattern"]["String"]] = step["content"]
    return marks


def _text_steps(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the steps of the decoder, or without a decoder the steps that convert text to tokens."""
    parts = ("decoder",) if content.get("decoder") else ("normalizer", "pre_tokenizer")
    return [step for name in parts for step in _steps(content.get(name))]


def _normalized(content: dict[str, Any]) -> list[str]:
    """Return the text of each added token as the tokenizer finds it in a text: normalised if its flag is set."""
    added = content.get("added_tokens") or []
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    normalizer = Tokenizer.from_str(json.dumps({**content, "model": empty, "added_tokens": []})).normalizer
    return [
        normalizer.normalize_str(one["content"]) if normalizer and one.get("normalized") else one["content"]
        for one in added
    ]


def _byte_characters() -> dict[str, int]:
    """Return GPT-2's map from characters to bytes: printable Latin-1 to itself, U+0100 and above to the other bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(rest)}


def _steps(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer or decoder.

    A part of type `Sequence` is split into its steps; any other part is a single step.
    """
    if part is None:
        return
    for name in ("normalizers", "pretokenizers", "decoders"):
        if part.get("type") == "Sequence" and name in part:
            for step in part[name]:
                yield from _steps(step)
            return
    yield part


def _is_space(step: dict[str, Any]) -> bool:
    """Return whether a normalisation step only replaces each space by a mark, such as `▁`."""
    return (
        step["type"] == "Replace" and step["pattern"] in ({"String": " "}, {"Regex": " "}) and len(step["content"]) == 1
    )


class ByteEncoder:
    """Cuts bytes into tokens as the tokenizer does in the middle of a text."""

    def __init__(self, content: dict[str, Any], size: int = 0) -> None:
        """`content` is a tokenizer.json. Raises ModelFilesError like `token_bytes`."""
        self.table = token_bytes(content, size)
        self._text = Tokenizer.from_str(json.dumps(_inside_text(content)))
        self._text.encode_special_tokens = True
        self._markup = Tokenizer.from_str(json.dumps(_inside_text(content)))
        whole = {**content, "post_processor": None, "truncation": None, "padding": None}
        self._conversation = Tokenizer.from_str(json.dumps(whole))
        self._added: dict[int | None, str] = {number: text for text, number in self.table.added.items()}
        self._single = {token[0]: number for number, token in enumerate(self.table.by_id) if len(token) == 1}
        self._specials = self.table.special

    def encode(self, data: bytes) -> tuple[list[int], np.ndarray]:
        """Return (tokens, ends): the tokens of `data`, and the offset in `data` at which each token ends.

        A byte for which the vocabulary has no token becomes `MISSING`. Text that spells a special token is encoded as
        ordinary tokens. Bytes that are not valid UTF-8 are encoded as tokens of single bytes. The ends are int64 [U].
        """
        try:
            return self._encode_text(data.decode(), data)
        except UnicodeDecodeError:
            pass
        tokens: list[int] = []
        ends = [np.zeros(0, np.int64)]
        place = 0
        while place < len(data):
            text, wrong = _valid_prefix(data[place:])
            if text:
                found, lengths = self._encode_text(text, text.encode())
                tokens += found
                ends.append(lengths + place)
                place += len(text.encode())
            for byte in data[place : place + wrong]:
                place += 1
                tokens.append(self._single.get(byte, MISSING))
                ends.append(np.array([place]))
        return tokens, np.concatenate(ends)

    def encode_after(self, before: int | None, data: bytes) -> tuple[list[int], np.ndarray]:
        """Return (tokens, ends) as `encode` does, for bytes that follow the token `before` in a conversation.

        Some tokenizers add a space to a text after a special token, such as `▁` after [/INST]. The first token then has
        this space as its first byte, or is only this space and ends at offset 0.
        """
        name, text = self._added.get(before), _valid_prefix(data)[0]
        tokens = self._conversation.encode(f"{name}{text}", add_special_tokens=False).ids if name else []
        if tokens[:1] != [before]:
            return self.encode(data)
        spelled = self.table.bytes_of(tokens[1:])
        spaced = bool(text) and _leading(spelled) == _leading(data) + 1
        if spelled != b" " * spaced + data or self._specials.intersection(tokens[1:]):
            tokens, ends = self.encode(b" " * spaced + data)  # a normalisation, or text that spells a special token
            return tokens, np.maximum(ends - spaced, 0)
        return tokens[1:], np.maximum(np.cumsum(self.table.lengths[tokens[1:]]) - spaced, 0)

    def encode_markup(self, text: str) -> list[int]:
        """Return the tokens of template text, including special tokens."""
        return list(self._markup.encode(text, add_special_tokens=False).ids)

    def _encode_text(self, text: str, data: bytes) -> tuple[list[int], np.ndarray]:
        encoded = self._text.encode(text, add_special_tokens=False)
        tokens = encoded.ids
        if self.table.bytes_of(tokens) == data:
            return tokens, np.cumsum(self.table.lengths[tokens])
        return self._by_offsets(text, data, tokens, encoded.offsets)

    def _by_offsets(
        self, text: str, data: bytes, tokens: Sequence[int], offsets: Sequence[tuple[int, int]]
    ) -> tuple[list[int], np.ndarray]:
        """Return (tokens, ends) of a text, as `encode` does.

        If the bytes of a token differ from the bytes of the text at this place, the token is replaced by tokens of
        single bytes.
        """
        byte_of = np.cumsum([0, *(len(one.encode()) for one in text)])
        found: list[int] = []
        ends: list[int] = []
        place = 0
        for token, (_, end) in zip(tokens, offsets, strict=True):
            known = self.table.by_id[token]
            if known and data.startswith(known, place):
                place += len(known)
                found.append(token)
                ends.append(place)
                continue
            last = max(place, int(byte_of[end]))
            found += [self._single.get(byte, MISSING) for byte in data[place:last]]
            ends += range(place + 1, last + 1)
            place = last
        rest = data[place:]  # the tokenizer dropped the last bytes
        found += [self._single.get(byte, MISSING) for byte in rest]
        ends += range(place + 1, len(data) + 1)
        return found, np.array(ends, np.int64)


def _leading(data: bytes) -> int:
    """Return the number of spaces at the start of `data`."""
    return len(data) - len(data.lstrip(b" "))


def _valid_prefix(data: bytes) -> tuple[str, int]:
    """Return (text, invalid) for the start of `data`.

    The text is the longest prefix that is valid UTF-8. `invalid` is the number of invalid bytes after this prefix.
    """
    try:
        return data.decode(), 0
    except UnicodeDecodeError as error:
        return data[: error.start].decode(), error.end - error.start


def _inside_text(content: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json that preserves all bytes, and splits a text as if other text came before it."""
    kept = [step for step in _steps(content.get("normalizer")) if _is_space(step) or step["type"] == "ByteLevel"]
    added = content.get("added_tokens") or []
    return {
        **content,
        "added_tokens": [{**one, "content": text} for one, text in zip(added, _normalized(content), strict=True)],
        "normalizer": {"type": "Sequence", "normalizers": kept} if kept else None,
        "pre_tokenizer": _without_prefix(content.get("pre_tokenizer")),
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }


def _without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the pre-tokenizer without the option that adds a space before the first word."""
    if part is None:
        return None
    if part.get("type") == "Sequence":
        return {**part, "pretokenizers": [_without_prefix(step) for step in part["pretokenizers"]]}
    if part.get("type") == "Metaspace":
        return {**part, "prepend_scheme": "never", "add_prefix_space": False}
    return {**part, "add_prefix_space": False} if "add_prefix_space" in part else part
