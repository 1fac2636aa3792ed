"""Tokenize texts with one beginning-of-sequence token (BOS) per sequence and no other added special token.

An end of sequence, for example, is never added after a prompt. A BOS is added if the tokenizer itself adds one, by its
post-processor or its code.
"""

from collections.abc import Sequence
from typing import Any

_PROBE = "a"  # any text


def token_ids(tokenizer: Any, texts: Sequence[str], begins: Sequence[bool]) -> list[list[int]]:
    """Return the token ids of each text, with the BOS for texts that begin a sequence (`begins`).

    A text that already starts with the BOS, after optional blanks, gets no second one.
    """
    if not texts:
        return []
    found: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    bos = added_bos(tokenizer) if any(begins) else None
    if bos is None:
        return found
    written = tokenizer.convert_ids_to_tokens(bos)
    return [
        [bos, *ids] if first and ids[:1] != [bos] and not text.lstrip().startswith(written) else ids
        for text, first, ids in zip(texts, begins, found, strict=True)
    ]


def added_bos(tokenizer: Any) -> int | None:
    """Return the id of the BOS that `tokenizer` adds before a text; None if it adds none."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return None
    plain, whole = (tokenizer(_PROBE, add_special_tokens=special)["input_ids"] for special in (False, True))
    places = range(len(whole) - len(plain) + 1)
    start = next((place for place in places if whole[place : place + len(plain)] == plain), 0)
    return bos if bos in whole[:start] else None
