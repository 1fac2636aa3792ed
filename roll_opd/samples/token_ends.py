"""Where each token ends in the text of a sequence, so that a reader of the record needs no tokenizer."""

from collections.abc import Callable, Sequence

PIECES_OF_A_CHARACTER = 4  # bytes of the longest one in UTF-8: so many tokens at most make it


def token_ends(decode: Callable[[Sequence[int]], str], tokens: Sequence[int], text: str) -> list[int]:
    """Return for each token how many characters of `text`, which is `decode(tokens)`, there are after it.

    A token that begins a character and leaves its end to the next ones ends where it begins. Decoding goes forward in
    short windows, as tokens mean different text at the beginning of a sequence and inside it; whatever a tokenizer
    makes of them, the ends never fall and the last one is the length of the text.
    """
    ends: list[int] = []
    window = settled = done = 0  # tokens from `window` give the context, those before `settled` are `done` characters
    for place in range(1, len(tokens) + 1):
        before, now = decode(tokens[window:settled]), decode(tokens[window:place])
        if len(now) > len(before) and (not now.endswith("\ufffd") or place - settled >= PIECES_OF_A_CHARACTER):
            done = min(len(text), done + len(now) - len(before))
            window, settled = settled, place
        ends.append(done)
    return [*ends[:-1], len(text)] if ends else []
