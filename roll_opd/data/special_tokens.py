"""Token ids of texts: a text that begins a sequence has the beginning-of-sequence token (BOS) once, and no text gets
another special token, such as an end of sequence behind a prompt.

Whether a tokenizer has a BOS for a text is what it does itself: its post-processor, or its own code, puts one there.
"""

from collections.abc import Sequence
from typing import Any

_PROBE = "a"  # any text


def token_ids(tokenizer: Any, texts: Sequence[str], begins: Sequence[bool]) -> list[list[int]]:
    """Return the token ids of each text, in order; those that are where a sequence `begins` start with the BOS.

    A BOS that a text brings itself, behind blanks at most, is the only one.
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
    """Return the id of the BOS that `tokenizer` puts before a text; None where it puts none."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return None
    plain, whole = (tokenizer(_PROBE, add_special_tokens=special)["input_ids"] for special in (False, True))
    places = range(len(whole) - len(plain) + 1)
    start = next((place for place in places if whole[place : place + len(plain)] == plain), 0)
    return bos if bos in whole[:start] else None
