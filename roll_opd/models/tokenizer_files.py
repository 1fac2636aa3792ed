"""Read a tokenizer's ids, special tokens and chat templates as transformers loads them, and compare two tokenizers.

Teachers get token ids, not text. Every id that the student can generate must therefore be the same token in both
tokenizers. Differences in tokenization, special tokens and chat templates affect only the student, so they only cause a
warning.

The files are enough if tokenizer.json (or vocab.json) has all tokens that the other files declare, and if the class of
the tokenizer adds no token that the files do not declare. Otherwise transformers adds the other tokens when it loads
the tokenizer, under ids that it chooses, so the tokenizer is loaded. Loading takes seconds, because it imports torch.
"""

import hashlib
import operator
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from roll_opd.base.failures import os_sentence
from roll_opd.base.installed import GENERIC_TOKENIZERS
from roll_opd.models.model_files import ModelFilesError, is_pointer, pointer_sentence, read_json

VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "tiktoken.model")
CONFIG, NAMES, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
SMALL = (CONFIG, NAMES, ADDED)  # files that declare tokens in addition to the vocabulary
_LISTS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
# classes that add at most these four tokens; the files can replace each one
_FOUR_TOKENS = ("Qwen2Tokenizer", "Qwen3_5Tokenizer", "LlamaTokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer")
_FOUR = {"eos_token", "bos_token", "unk_token", "pad_token"}
MALFORMED = (KeyError, TypeError, AttributeError, ValueError, IndexError, RecursionError)


@dataclass(frozen=True)
class TokenizerReading:
    """The tokens of a loaded tokenizer."""

    by_id: Mapping[int, str]  # every token, including added tokens
    added: Mapping[str, int]  # added tokens, for example of a template
    named: Mapping[str, str]  # special tokens by their names, such as eos_token


def read_tokenizer(path: Path) -> TokenizerReading | None:
    """Return the tokens of the tokenizer in a model directory, or None if no file has a known format.

    Raises ModelFilesError if a file cannot be read, and for a tokenizer that transformers cannot load.
    """
    return _read(path, *_versions(path))


def declarations(path: Path) -> dict[str, Any]:
    """Return the contents of the small files of a tokenizer, without the chat template."""
    found = {name: read_json(path / name) for name in SMALL if (path / name).is_file()}
    return {name: {key: value for key, value in found[name].items() if key != "chat_template"} for name in found}


def _versions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the name and numbers that change with the content, for each file of the tokenizer."""
    for name in (*VOCABULARIES, *SMALL):
        if (path / name).is_file():
            stat = os.stat(path / name)
            yield name, stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=16)  # several checks read the same tokenizer
def _read(path: Path, *versions: tuple[str, int, int]) -> TokenizerReading | None:
    try:
        found = _of_files(path)
    except MALFORMED as error:
        if isinstance(error, ModelFilesError):
            raise
        name = next((name for name, *_ in versions), CONFIG)
        raise ModelFilesError(f"{path / name} has an unknown format, not that of the tokenizers library") from None
    return found or (_loaded(path) if versions else None)


def _of_files(path: Path) -> TokenizerReading | None:
    """Return the tokens in the files, or None if transformers would add tokens or read other files."""
    added: dict[str, int] = {}
    if (path / "tokenizer.json").is_file():
        content = read_json(path / "tokenizer.json")
        ids = dict(_vocabulary(content))
        added = {str(token["content"]): operator.index(token["id"]) for token in content.get("added_tokens") or []}
    elif (path / "vocab.json").is_file():
        ids = read_json(path / "vocab.json")
    else:
        refuse_pointers(path)
        return None
    ids = ids | added
    tokens = {operator.index(number): token for token, number in ids.items()}
    files = declarations(path)
    config, names = files.get(CONFIG, {}), files.get(NAMES, {})
    named = _named(names) | _named(config)
    declared = {*named.values(), *files.get(ADDED, {})}
    declared |= {_text(token) for token in (config.get("added_tokens_decoder") or {}).values()}
    for key in _LISTS:
        for value in (config.get(key), names.get(key)):
            declared |= {_text(token) for token in (value.values() if isinstance(value, dict) else value or ())}
    contradicts = any(named[key] != token for key, token in _named(names).items())
    if contradicts or not declared <= ids.keys() or _has_own_tokens(path, config):
        return None
    return TokenizerReading(tokens, added | {token: ids[token] for token in declared}, named)


def _has_own_tokens(path: Path, config: Mapping[str, Any]) -> bool:
    """Return whether the class of a tokenizer may have tokens that the files do not declare."""
    name = config.get("tokenizer_class")
    if name is None:  # the class follows from the model
        return (path / "config.json").is_file() and "model_type" in read_json(path / "config.json")
    return name not in GENERIC_TOKENIZERS and not (
        "auto_map" not in config and name.removesuffix("Fast") in _FOUR_TOKENS and config.keys() >= _FOUR
    )


def refuse_pointers(path: Path) -> None:
    """Raise ModelFilesError if a file of the vocabulary is a git-LFS pointer."""
    for file in (path / name for name in VOCABULARIES):
        if file.is_file() and is_pointer(file):
            raise ModelFilesError(pointer_sentence(file))


def _loaded(path: Path) -> TokenizerReading:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # the formats of tokenizers have readers of many packages
        if "AutoTokenizer" in (declarations(path).get(CONFIG, {}).get("auto_map") or ()):
            raise ModelFilesError(
                f"the tokenizer of {path} needs Python code of the model's directory (auto_map in {CONFIG}), which is"
                " not run; save it as a tokenizer.json with tokenizer_class: TokenizersBackend"
            ) from None
        raise ModelFilesError(f"the tokenizer of {path} cannot be loaded: {str(error).splitlines()[0]}") from None
    return TokenizerReading(
        {int(number): token for token, number in tokenizer.get_vocab().items()},
        {str(token): int(number) for number, token in tokenizer.added_tokens_decoder.items()},
        {key: str(token) for key, token in tokenizer.special_tokens_map.items() if isinstance(token, str)},
    )


def _vocabulary(content: Mapping[str, Any]) -> Mapping[str, int]:
    """Return a map from tokens to ids.

    The file of a BPE model contains this map. The file of a unigram model lists [token, score] pairs in the order of
    ids.
    """
    vocabulary = content.get("model", {}).get("vocab") or {}
    if isinstance(vocabulary, list):
        return {str(item[0]): index for index, item in enumerate(vocabulary)}
    return vocabulary


def _named(content: Mapping[str, Any]) -> dict[str, str]:
    found = {key: _text(token) for key, token in content.items() if key.endswith("_token") and token}
    return {key: token for key, token in found.items() if isinstance(token, str)}


def _text(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


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


def has_tokenizer(path: Path) -> bool:
    """Return whether a model directory has tokenizer files."""
    return any((path / name).is_file() for name in VOCABULARIES)


def largest_token_id(path: Path) -> int | None:
    """Return the largest token id in tokenizer.json, or None if the model has no such file.

    Raises ModelFilesError if the file cannot be read, if it is a git-LFS pointer, or if it is not in the format of the
    `tokenizers` library.
    """
    if not (path / "tokenizer.json").is_file():
        refuse_pointers(path)
        return None
    reading = read_tokenizer(path)
    return max(reading.by_id, default=None) if reading else None


def added_ids(path: Path) -> frozenset[int]:
    """Return the ids of the added tokens of a tokenizer, for example of template tokens."""
    reading = read_tokenizer(path)
    return frozenset(reading.added.values()) if reading else frozenset()


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


def vocabulary_fingerprint(path: Path) -> str:
    """Return a fingerprint of a model's tokens and their ids: 16 hexadecimal digits, or "" for an unknown format.

    If two fingerprints are equal, every id is the same token in both models. Padding rows of the embedding and chat
    templates do not affect the fingerprint.
    """
    reading = read_tokenizer(path)
    if reading is None:
        return ""
    tokens = reading.by_id
    state = hashlib.sha256()
    for number in sorted(tokens):
        state.update(f"{number}\0{tokens[number]}\0".encode("utf-8", "surrogatepass"))
    return state.hexdigest()[:16]


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


def has_chat_template(path: Path) -> bool:
    """Return whether the tokenizer in directory `path` has a chat template."""
    return bool(chat_template_of(path))


def special_tokens(path: Path) -> dict[str, str]:
    """Return the named special tokens (such as eos_token) that chat templates use."""
    reading = read_tokenizer(path)
    return dict(reading.named) if reading else {}


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
