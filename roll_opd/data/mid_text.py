"""Tokenise text in the middle of a sequence.

Tokenizers in SentencePiece's format write a mark of a word boundary (`▁`) before the first word of a text, and some of
them after each added token. A text that continues other text has no such mark.
"""

import json
import re
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer


@lru_cache(maxsize=16)
def mid_text(tokenizer: Any) -> "MidText | None":
    """Return the encoder of text after other text; None if `tokenizer` encodes such text as the start of a sequence."""
    found = MidText(tokenizer)
    return found if found.differs else None


class MidText:
    """Encodes text after other text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_python = backend is None
        self._inside = backend and _without_start(backend)
        # the others are found only where the normalised text has them, for example as `▁<tag>`
        added = {n: one for n, one in tokenizer.added_tokens_decoder.items() if not _is_changed(one, backend)}
        self._added = {str(token): number for number, token in added.items()}
        self._greedy = {str(token) for token in added.values() if token.rstrip}
        longest_first = sorted(added.values(), key=lambda token: len(str(token)), reverse=True)
        patterns = [(r"\s*" if token.lstrip else "") + re.escape(str(token)) for token in longest_first]
        self._token = re.compile("|".join(patterns) or "(?!)")
        self.differs = bool(self._is_python or self._inside or self._greedy)

    def ids(self, text: str, before: str) -> list[int]:
        """Return the token ids of `text` after the text `before`.

        The tokens of `before` are unchanged, so no token contains parts of both texts.
        """
        if self._is_python:
            start, whole = self._alone(before), self._alone(before + text)
            return whole[len(start) :] if whole[: len(start)] == start else self._alone(text)
        last = self._last_added(before)
        if last is not None:
            ids = self._alone(last + text)
            if ids[:1] == [self._added[last]]:
                return ids[1:]
        if self._inside is None:
            return self._alone(text)
        found = self._token.search(text)
        end = found.start() if found else len(text)  # an added token and the text after it are encoded as usual
        return [*self._inside.encode(text[:end], add_special_tokens=False).ids, *self._alone(text[end:])]

    def _alone(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _last_added(self, before: str) -> str | None:
        """Return the added token at the end of `before`, which may be followed by blanks that it includes."""
        blank = before.rstrip()
        ends = [name for name in self._added if (blank if name in self._greedy else before).endswith(name)]
        return max(ends, key=len, default=None)


def _is_changed(token: Any, backend: Tokenizer | None) -> bool:
    """Return whether the tokenizer normalises the text of an added token to another text."""
    text = str(token)
    return bool(backend and backend.normalizer and token.normalized and backend.normalizer.normalize_str(text) != text)


def _without_start(backend: Tokenizer) -> Tokenizer | None:
    """Return the tokenizer without the steps for the start of a text; None if it has no such steps."""
    content = json.loads(backend.to_str())
    changed = content | {name: _inside(content[name]) for name in ("normalizer", "pre_tokenizer")}
    if changed == content:
        return None
    for one in changed["added_tokens"]:
        if one["normalized"] and backend.normalizer:
            one["content"] = backend.normalizer.normalize_str(one["content"])
    return Tokenizer.from_str(json.dumps(changed | {"truncation": None, "padding": None}))


def _inside(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a normalizer or pre-tokenizer without its steps for the start of a text."""
    if part is None or part["type"] == "Prepend":
        return None
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            return {**part, name: [step for step in map(_inside, part[name]) if step is not None]}
    changes = {"prepend_scheme": "never", "add_prefix_space": False, "strip_left": False}
    return part | {key: value for key, value in changes.items() if key in part}
