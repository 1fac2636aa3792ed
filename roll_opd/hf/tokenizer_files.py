"""Compares two tokenizers by the content of their files, and reads how many ids they use.

A teacher scores the student's token ids, so both must turn the same text into the same ids, special tokens
and chat template included. Names and paths say nothing about that; the files do.
"""

import hashlib
import operator
from pathlib import Path
from typing import Any

from roll_opd.failures import os_sentence
from roll_opd.hf.model_info import ModelFilesError, read_json

# steps of tokenizer.json besides its model; each changes which ids a text becomes
PIPELINE = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
# keys of tokenizer_config.json that change ids, in the order of their weight
SPECIAL = ("eos_token", "bos_token", "pad_token", "unk_token", "add_bos_token", "add_eos_token", "add_prefix_space")
OTHER_FORMATS = ("vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "tiktoken.model")


MALFORMED = (KeyError, TypeError, AttributeError, ValueError, IndexError, RecursionError)


def has_tokenizer(path: Path) -> bool:
    """Say whether a model directory has tokenizer files."""
    return any((path / name).is_file() for name in ("tokenizer.json", *OTHER_FORMATS))


def largest_token_id(path: Path) -> int | None:
    """Return the largest id in tokenizer.json, or None if the model has no such file.

    Raises ModelFilesError if the file cannot be read or is not in the form of the `tokenizers` library.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    content = read_json(file)
    try:
        added = [token["id"] for token in content.get("added_tokens") or []]
        return max(map(operator.index, [*_vocabulary(content).values(), *added]), default=None)
    except MALFORMED:
        raise ModelFilesError(f"{file} is not in the form of the tokenizers library") from None


def tokenizer_difference(student: Path, teacher: Path) -> str | None:
    """Return the first difference of two tokenizers in words, or None.

    Raises ModelFilesError if some of the files cannot be read.
    """
    if student == teacher:
        return None
    try:
        return (
            _tokenizer_json_difference(student, teacher)
            or _settings_difference(_settings(student), _settings(teacher))
            or _template_difference(_chat_template(student), _chat_template(teacher))
        )
    except OSError as error:
        raise ModelFilesError(os_sentence(error)) from None
    except MALFORMED:
        raise ModelFilesError(f"a tokenizer file of {student} or {teacher} is not in a known form") from None


def _tokenizer_json_difference(student: Path, teacher: Path) -> str | None:
    files = [path / "tokenizer.json" for path in (student, teacher)]
    present = [file.is_file() for file in files]
    if not all(present):
        if any(present):
            return "only one of them has a tokenizer.json"
        return _file_difference(student, teacher)
    if files[0].read_bytes() == files[1].read_bytes():
        return None
    mine, theirs = read_json(files[0]), read_json(files[1])
    return (
        _added_difference(mine, theirs)
        or _vocabulary_difference(_vocabulary(mine), _vocabulary(theirs))
        or _merges_difference(_merges(mine), _merges(theirs))
        or next((f"{name} differs" for name in PIPELINE if mine.get(name) != theirs.get(name)), None)
    )


def _file_difference(student: Path, teacher: Path) -> str | None:
    for name in OTHER_FORMATS:
        digests = [_digest(path / name) for path in (student, teacher)]
        if digests[0] != digests[1]:
            return f"{name} differs"
    return None


def _digest(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def _added_difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    left, right = ({token["id"]: token for token in side.get("added_tokens") or []} for side in (mine, theirs))
    for number in sorted({*left, *right}):
        ours, other = left.get(number), right.get(number)
        if ours is None or other is None:
            token = ours or other or {}
            owner = "student" if ours else "teacher"
            return f"special token {token.get('content')!r} (id {number}) exists only in the {owner}"
        if ours["content"] != other["content"]:
            texts = f"{ours['content']!r} in the student, {other['content']!r} in the teacher"
            return f"special token {number} is {texts}"
        if ours != other:
            return f"special token {ours['content']!r} (id {number}) has different settings"
    return None


def _vocabulary(content: dict[str, Any]) -> dict[str, int]:
    """Return token -> id; unigram models list [token, score] in the order of ids."""
    vocabulary = content.get("model", {}).get("vocab") or {}
    if isinstance(vocabulary, list):
        return {str(item[0]): index for index, item in enumerate(vocabulary)}
    return vocabulary


def _vocabulary_difference(mine: dict[str, int], theirs: dict[str, int]) -> str | None:
    if mine == theirs:
        return None
    changed = [token for token in mine if mine[token] != theirs.get(token)]
    changed += [token for token in theirs if token not in mine]
    first = changed[0]
    return (
        f"{len(changed)} vocabulary entries differ, the first is {first!r}: id"
        f" {mine.get(first, 'none')} in the"
        f" student, {theirs.get(first, 'none')} in the teacher"
    )


def _merges(content: dict[str, Any]) -> list[str]:
    """Return BPE merges as "a b"; newer files write pairs, older ones one string."""
    merges = content.get("model", {}).get("merges") or []
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _merges_difference(mine: list[str], theirs: list[str]) -> str | None:
    if mine == theirs:
        return None
    for index, (left, right) in enumerate(zip(mine, theirs, strict=False)):
        if left != right:
            return f"merge {index} is {left!r} in the student, {right!r} in the teacher"
    return f"the student has {len(mine)} merges, the teacher {len(theirs)}"


def _settings(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json"
    content = read_json(file) if file.is_file() else {}
    found = {}
    for name in SPECIAL:
        value = content.get(name)
        # false is what a missing switch means, and a token is written as a text or as {"content": text}
        found[name] = value.get("content") if isinstance(value, dict) else (value or None)
    return found


def _settings_difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    for name in SPECIAL:
        if mine[name] != theirs[name]:
            return f"{name} is {mine[name]!r} in the student, {theirs[name]!r} in the teacher"
    return None


def _chat_template(path: Path) -> Any:
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (path / name).is_file() and (template := read_json(path / name).get("chat_template")):
            return template
    return None


def _template_difference(mine: Any, theirs: Any) -> str | None:
    if mine == theirs:
        return None
    if mine is None or theirs is None:
        return f"only the {'teacher' if mine is None else 'student'} has a chat template"
    if not (isinstance(mine, str) and isinstance(theirs, str)):
        return "the chat templates differ"
    left, right = mine.splitlines(), theirs.splitlines()
    shared = min(len(left), len(right))
    line = next((index for index in range(shared) if left[index] != right[index]), shared)
    return f"the chat templates differ from line {line + 1} on"
