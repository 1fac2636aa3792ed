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
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

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
