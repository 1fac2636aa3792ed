"""Compare the files of two tokenizers. Read their ids, special tokens and chat templates.

Teachers get token ids, not text. Every id that the student can generate must therefore be the same token in both
tokenizers. Differences in tokenization, special tokens and chat templates affect only the student, so they only cause a
warning.
"""

import hashlib
import operator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll_opd.base.failures import os_sentence
from roll_opd.models.model_files import ModelFilesError, is_pointer, pointer_sentence, read_json

# steps of tokenizer.json that affect tokenization, in addition to its model
PIPELINE = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
# keys of tokenizer_config.json that affect ids, most important first
SPECIAL = ("eos_token", "bos_token", "pad_token", "unk_token", "add_bos_token", "add_eos_token", "add_prefix_space")
OTHER_FORMATS = ("vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "tiktoken.model")


MALFORMED = (KeyError, TypeError, AttributeError, ValueError, IndexError, RecursionError)


@dataclass(frozen=True)
class TokenizerComparison:
    """Differences between the tokenizers of a student and of a model that reads the student's tokens."""

    conflict: str | None = None  # message if an id of the student is another token, or no token, in the other tokenizer
    differences: tuple[str, ...] = ()  # messages for all other differences
    only_student: int = 0  # number of ids missing in the other tokenizer
    only_other: int = 0


def has_tokenizer(path: Path) -> bool:
    """Return whether a model directory has tokenizer files."""
    return any((path / name).is_file() for name in ("tokenizer.json", *OTHER_FORMATS))


def largest_token_id(path: Path) -> int | None:
    """Return the largest token id in tokenizer.json, or None if the model has no such file.

    Raises ModelFilesError if the file cannot be read, if it is a git-LFS pointer, or if it is not in the format of the
    `tokenizers` library.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        for other in (path / name for name in OTHER_FORMATS):
            if other.is_file() and is_pointer(other):
                raise ModelFilesError(pointer_sentence(other))
        return None
    content = read_json(file)
    try:
        added = [token["id"] for token in content.get("added_tokens") or []]
        return max(map(operator.index, [*_vocabulary(content).values(), *added]), default=None)
    except MALFORMED:
        raise ModelFilesError(f"{file} is not in the format of the tokenizers library") from None


def added_ids(path: Path) -> frozenset[int]:
    """Return the ids of the added tokens in tokenizer.json, for example of template tokens."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return frozenset()
    return frozenset(int(token["id"]) for token in read_json(file).get("added_tokens") or [])


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
    files = [path / "tokenizer.json" for path in (student, other)]
    if all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes():
        return TokenizerComparison()
    mine, theirs = tokens_by_id(student), tokens_by_id(other)
    if mine is None or theirs is None:
        unlike = [file for file in OTHER_FORMATS if _digest(student / file) != _digest(other / file)]
        if mine == theirs and not unlike:
            return TokenizerComparison()
        what = unlike[0] if unlike else "tokenizer.json"
        return TokenizerComparison(f"{what} differs; a comparison by token id needs tokenizer.json")
    differences = []
    if new := sorted(theirs.keys() - mine.keys()):
        many = f"{len(new)} token ids exist" if len(new) > 1 else "one token id exists"
        differences.append(f"{many} only in the {name}; {_first(new[0], theirs)}")
    if all(file.is_file() for file in files):
        differences += _pipeline_differences(read_json(files[0]), read_json(files[1]), name)
    return TokenizerComparison(
        _id_conflict(mine, theirs, name), tuple(differences), len(mine.keys() - theirs.keys()), len(new)
    )


def _id_conflict(mine: dict[int, str], theirs: dict[int, str], name: str) -> str | None:
    changed = [number for number in sorted(mine) if mine[number] != theirs.get(number)]
    if not changed:
        return None
    first = changed[0]
    there = f"{theirs[first]!r} in the {name}" if first in theirs else f"none in the {name}"
    counts = f"{len(changed)} of the student's {len(mine)} token ids differ"
    return f"{counts}; {_first(first, mine)} in the student, {there}"


def _first(number: int, tokens: dict[int, str]) -> str:
    return f"the first is id {number}: {tokens[number]!r}"


def tokens_by_id(path: Path) -> dict[int, str] | None:
    """Return a map from id to token, including added tokens, or None if no file has a known format."""
    if (path / "tokenizer.json").is_file():
        content = read_json(path / "tokenizer.json")
        added = {int(token["id"]): token["content"] for token in content.get("added_tokens") or []}
        return {number: token for token, number in _vocabulary(content).items()} | added
    if not (path / "vocab.json").is_file():
        return None
    tokens = {number: token for token, number in read_json(path / "vocab.json").items()}
    if (path / "added_tokens.json").is_file():
        tokens |= {number: token for token, number in read_json(path / "added_tokens.json").items()}
    if (path / "tokenizer_config.json").is_file():
        decoder = read_json(path / "tokenizer_config.json").get("added_tokens_decoder") or {}
        tokens |= {int(number): token["content"] for number, token in decoder.items()}
    return tokens


def vocabulary_fingerprint(path: Path) -> str:
    """Return a fingerprint of a model's tokens and their ids: 16 hexadecimal digits, or "" for an unknown format.

    If two fingerprints are equal, every id is the same token in both models. Padding rows of the embedding and chat
    templates do not affect the fingerprint.
    """
    tokens = tokens_by_id(path)
    if tokens is None:
        return ""
    state = hashlib.sha256()
    for number in sorted(tokens):
        state.update(f"{number}\0{tokens[number]}\0".encode("utf-8", "surrogatepass"))
    return state.hexdigest()[:16]


def _pipeline_differences(mine: dict[str, Any], theirs: dict[str, Any], name: str) -> list[str]:
    """Return the differences between the tokenization steps of two tokenizers."""
    found = [f"{step} differs" for step in PIPELINE if mine.get(step) != theirs.get(step)]
    return [*filter(None, [_merges_difference(_merges(mine), _merges(theirs), name)]), *found]


def _digest(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def _vocabulary(content: dict[str, Any]) -> dict[str, int]:
    """Return a map from tokens to ids.

    The file of a BPE model contains this map. The file of a unigram model lists [token, score] pairs in the order of
    ids.
    """
    vocabulary = content.get("model", {}).get("vocab") or {}
    if isinstance(vocabulary, list):
        return {str(item[0]): index for index, item in enumerate(vocabulary)}
    return vocabulary


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
    content = read_json(file) if file.is_file() else {}
    found = {}
    for name in SPECIAL:
        value = content.get(name)
        # a missing switch means false; a token is a string or {"content": string}
        found[name] = value.get("content") if isinstance(value, dict) else (value or None)
    return found


def _settings_difference(mine: dict[str, Any], theirs: dict[str, Any], name: str) -> str | None:
    found = [
        f"{key} is {mine[key]!r} in the student, {theirs[key]!r} in the {name}"
        for key in SPECIAL
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


def has_chat_template(path: Path) -> bool:
    """Return whether the tokenizer in directory `path` has a chat template."""
    return bool(chat_template_of(path))


def special_tokens(path: Path) -> dict[str, str]:
    """Return the named special tokens (such as eos_token) that chat templates use."""
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, value in (read_json(path / file) if (path / file).is_file() else {}).items():
            token = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(token, str):
                found[name] = token
    return found


def chat_template_of(path: Path) -> Any:
    """Return the stored chat template of the tokenizer in directory `path`; None if it has none."""
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (path / name).is_file() and (template := read_json(path / name).get("chat_template")):
            return template
    return None


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
