"""Compare the tokenizers of two models: ids, texts, merges, settings and templates."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll_opd.base.failures import os_sentence
from roll_opd.models.model_files import ModelFilesError, read_json
from roll_opd.models.tokenizer_files import (
    MALFORMED,
    VOCABULARIES,
    chat_template_of,
    declarations,
    read_tokenizer,
    special_tokens,
)

# steps of tokenizer.json that affect tokenization, in addition to its model
PIPELINE = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
# special tokens, and switches of tokenizer_config.json that affect ids, most important first
TOKENS = ("eos_token", "bos_token", "pad_token", "unk_token")
SWITCHES = ("add_bos_token", "add_eos_token", "add_prefix_space", "split_special_tokens")
# switches of an added token
FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")


@dataclass(frozen=True)
class TokenizerComparison:
    """Differences between the tokenizers of a student and of a model that reads the student's tokens."""

    conflict: str | None = None  # message if an id of the student is another token, or no token, in the other tokenizer
    differences: tuple[str, ...] = ()  # messages for all other differences
    only_student: int = 0  # number of ids missing in the other tokenizer
    only_other: int = 0


def compare_tokenizers(student: Path, other: Path, name: str = "teacher") -> TokenizerComparison:
    """Compare the student's tokenizer with the tokenizer of another model.

    `name` is the name of the other model in messages. Raises ModelFilesError if a file cannot be read.
    """
    if student == other:
        return TokenizerComparison()
    try:
        comparison = _compare_ids(student, other, name)
        further = (
            _settings_difference(_settings(student), _settings(other), name),
            _ends_difference(_ends(student), _ends(other), name),
            _template_difference(chat_template_of(student), chat_template_of(other), name),
        )
        return replace(comparison, differences=(*comparison.differences, *filter(None, further)))
    except OSError as error:
        raise ModelFilesError(os_sentence(error)) from None
    except MALFORMED:
        raise ModelFilesError(f"a tokenizer file of {student} or {other} has an unknown format") from None


def _compare_ids(student: Path, other: Path, name: str) -> TokenizerComparison:
    if _have_equal_files(student, other):
        return TokenizerComparison()
    readings = read_tokenizer(student), read_tokenizer(other)
    if not all(readings):
        return TokenizerComparison("one of them has no file of a known format; a comparison by token id needs tokens")
    mine, theirs = (reading.by_id for reading in readings if reading)
    differences = []
    if new := sorted(theirs.keys() - mine.keys()):
        many = f"{len(new)} token ids exist" if len(new) > 1 else "one token id exists"
        differences.append(f"{many} only in the {name}; {_first(new[0], theirs)}")
    files = [path / "tokenizer.json" for path in (student, other)]
    if all(file.is_file() for file in files):
        differences += _pipeline_differences(read_json(files[0]), read_json(files[1]), name)
    return TokenizerComparison(
        _id_conflict(mine, theirs, name), tuple(differences), len(mine.keys() - theirs.keys()), len(new)
    )


def _have_equal_files(student: Path, other: Path) -> bool:
    """Return whether all files of two tokenizers are equal, except for their chat templates."""
    return declarations(student) == declarations(other) and all(
        _digest(student / name) == _digest(other / name) for name in VOCABULARIES
    )


def _id_conflict(mine: Mapping[int, str], theirs: Mapping[int, str], name: str) -> str | None:
    changed = [number for number in sorted(mine) if mine[number] != theirs.get(number)]
    if not changed:
        return None
    first = changed[0]
    there = f"{theirs[first]!r} in the {name}" if first in theirs else f"none in the {name}"
    counts = f"{len(changed)} of the student's {len(mine)} token ids differ"
    return f"{counts}; {_first(first, mine)} in the student, {there}"


def _first(number: int, tokens: Mapping[int, str]) -> str:
    return f"the first is id {number}: {tokens[number]!r}"


def _pipeline_differences(mine: dict[str, Any], theirs: dict[str, Any], name: str) -> list[str]:
    """Return the differences between the tokenization steps of two tokenizers."""
    found = [f"{step} differs" for step in PIPELINE if mine.get(step) != theirs.get(step)]
    found += [f"{key} of the model differs" for key in _differing(_of_model(mine), _of_model(theirs))]
    flags, other_flags = _flags(mine), _flags(theirs)
    found += [
        f"{', '.join(_differing(flags[token], other_flags[token]))} of the added token {token!r} differs"
        for token in sorted(flags.keys() & other_flags.keys())
        if flags[token] != other_flags[token]
    ]
    return [*filter(None, [_merges_difference(_merges(mine), _merges(theirs), name)]), *found]


def _differing(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))


def _of_model(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a tokenizer's model that are set, and the scores of a unigram model's tokens."""
    model = content.get("model") or {}
    scores = {"scores": dict(model["vocab"])} if isinstance(model.get("vocab"), list) else {}
    return {key: value for key, value in model.items() if value and key not in ("vocab", "merges")} | scores


def _flags(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tokens = content.get("added_tokens") or []
    return {str(token["content"]): {flag: token.get(flag, False) for flag in FLAGS} for token in tokens}


def _digest(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def _merges(content: dict[str, Any]) -> list[str]:
    """Return BPE merges as strings "a b".

    Older files store merges as such strings, and newer files store merges as pairs.
    """
    merges = content.get("model", {}).get("merges") or []
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _merges_difference(mine: list[str], theirs: list[str], name: str) -> str | None:
    if mine == theirs:
        return None
    for index, (left, right) in enumerate(zip(mine, theirs, strict=False)):
        if left != right:
            return f"merge {index} is {left!r} in the student, {right!r} in the {name}"
    return f"the student has {len(mine)} merges, the {name} {len(theirs)}"


def _settings(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json"
    values = (read_json(file) if file.is_file() else {}) | dict.fromkeys(TOKENS) | special_tokens(path)
    return {name: values.get(name) or None for name in (*TOKENS, *SWITCHES)}  # a missing switch means false


def _settings_difference(mine: dict[str, Any], theirs: dict[str, Any], name: str) -> str | None:
    found = [
        f"{key} is {mine[key]!r} in the student, {theirs[key]!r} in the {name}"
        for key in mine
        if mine[key] != theirs[key]
    ]
    return "; ".join(found) or None


def _ends(path: Path) -> frozenset[int]:
    """Return the eos_token_id values of generation_config.json, else of config.json.

    The set is empty if neither file has the key.
    """
    for file in ("generation_config.json", "config.json"):
        ids = read_json(path / file).get("eos_token_id") if (path / file).is_file() else None
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()


def _ends_difference(mine: frozenset[int], theirs: frozenset[int], name: str) -> str | None:
    if mine == theirs or not (mine and theirs):
        return None
    ids = [" and ".join(map(str, sorted(side))) for side in (mine, theirs)]
    return f"an answer ends with id {ids[0]} in the student, {ids[1]} in the {name} (generation_config.json)"


def _template_difference(mine: Any, theirs: Any, name: str) -> str | None:
    if mine == theirs:
        return None
    if mine is None or theirs is None:
        return f"only the {name if mine is None else 'student'} has a chat template"
    if not (isinstance(mine, str) and isinstance(theirs, str)):
        return "the chat templates differ"
    left, right = mine.splitlines(), theirs.splitlines()
    shared = min(len(left), len(right))
    line = next((index for index in range(shared) if left[index] != right[index]), shared)
    return f"the chat templates differ from line {line + 1} on"
