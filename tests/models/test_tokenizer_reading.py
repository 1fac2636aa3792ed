"""The reading of a tokenizer equals the tokenizer that transformers loads, for every file that declares tokens."""

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoTokenizer

from roll_opd.models.model_files import ModelFilesError
from roll_opd.models.tokenizer_comparison import compare_tokenizers
from roll_opd.models.tokenizer_files import _FOUR, _FOUR_TOKENS, read_tokenizer

STUDENT = Path(__file__).parents[2] / "examples/demo/models/student"
X = {"content": "<x>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
# file -> entries that are added to it
VARIANTS: list[dict[str, dict[str, Any]]] = [
    {},
    {"tokenizer_config.json": {"added_tokens_decoder": {"261": X}}},
    {"tokenizer_config.json": {"added_tokens_decoder": {"300": X}}},  # gets id 261
    {"tokenizer_config.json": {"added_tokens_decoder": {"5": X | {"content": "<|end|>"}}}},  # keeps its id
    {"tokenizer_config.json": {"extra_special_tokens": ["<x>"]}},
    {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<x>"}}},
    {"tokenizer_config.json": {"mask_token": "<x>"}},
    {"tokenizer_config.json": {"eos_token": X | {"__type": "AddedToken"}}},
    {"special_tokens_map.json": {"eos_token": "<x>"}},
    {"special_tokens_map.json": {"eos_token": "<|user|>"}},
    {"added_tokens.json": {"<x>": 261}},
    {"tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer"}},  # adds <|endoftext|> as unk_token
    {"tokenizer_config.json": {"tokenizer_class": "Qwen2TokenizerFast", "unk_token": None, "bos_token": None}},
    {"tokenizer_config.json": {"tokenizer_class": "GemmaTokenizer"}},  # adds <mask>
    {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "bos_token": "<x>"}},
    {"tokenizer_config.json": {"tokenizer_class": None}},  # the class of the model: Qwen2Tokenizer
    {"tokenizer_config.json": {"tokenizer_class": "MyTokenizer"}},
]


def variant(path: Path, changes: dict[str, dict[str, Any]]) -> Path:
    shutil.copytree(STUDENT, path)
    for name, entries in changes.items():
        values = json.loads((path / name).read_text()) if (path / name).is_file() else {}
        (path / name).write_text(json.dumps(values | entries))
    return path


@pytest.mark.slow
def test_a_reading_is_the_loaded_tokenizer(tmp_path: Path) -> None:
    for number, changes in enumerate(VARIANTS):
        path = variant(tmp_path / str(number), changes)
        loaded, found = AutoTokenizer.from_pretrained(path), read_tokenizer(path)
        assert found is not None, changes
        assert {token: number for number, token in found.by_id.items()} == loaded.get_vocab(), changes
        assert dict(found.added) == {str(token): n for n, token in loaded.added_tokens_decoder.items()}, changes
        names = loaded.special_tokens_map.items()
        assert dict(found.named) == {name: token for name, token in names if isinstance(token, str)}, changes


@pytest.mark.slow
def test_classes_without_loading_have_four_tokens_of_their_own() -> None:
    for name in _FOUR_TOKENS:
        parameters = inspect.signature(getattr(transformers, name)).parameters.values()
        own = {one.name for one in parameters if one.name.endswith("_token") and isinstance(one.default, str)}
        assert own <= _FOUR, name


@pytest.mark.slow
def test_a_tokenizer_of_a_class_in_the_models_directory_is_refused(tmp_path: Path) -> None:
    mapped = {"tokenizer_class": "MyTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_my.MyTokenizer", None]}}
    path = variant(tmp_path / "a", {"tokenizer_config.json": mapped, "config.json": {"model_type": "my_model"}})
    with pytest.raises(ModelFilesError, match="auto_map"):
        read_tokenizer(path)


@pytest.mark.slow
def test_tokenizers_that_differ_in_one_file(tmp_path: Path) -> None:
    """The student has <x> as id 261, the other has <y>, in each of the files that can declare it."""
    for number, changes in enumerate(VARIANTS):
        if "<x>" not in json.dumps(changes):
            continue
        other = json.loads(json.dumps(changes).replace("<x>", "<y>"))
        paths = [variant(tmp_path / f"{number}{name}", found) for name, found in (("a", changes), ("b", other))]
        found = compare_tokenizers(*paths)
        assert found.conflict and "id 261: '<x>' in the student, '<y>' in the teacher" in found.conflict, changes
        assert compare_tokenizers(STUDENT, paths[1]).conflict is None  # the student cannot write <y>
        same = variant(tmp_path / f"{number}c", changes)
        assert compare_tokenizers(paths[0], same) == compare_tokenizers(paths[0], paths[0])


@pytest.mark.slow
def test_every_setting_of_a_tokenizer_is_compared(tmp_path: Path) -> None:
    content = json.loads((STUDENT / "tokenizer.json").read_text())
    model = {"ignore_merges": True, "byte_fallback": True, "dropout": 0.1, "fuse_unk": True, "unk_token": "<|end|>"}
    unigram = [[["a", -1.0], ["b", score]] for score in (-2.0, -3.0)]
    changed: list[tuple[dict[str, Any], dict[str, Any]]] = [
        *(({}, {"model": content["model"] | {name: value}}) for name, value in model.items()),
        *(({}, {step: {"type": "Other"}}) for step in ("normalizer", "pre_tokenizer", "post_processor", "decoder")),
        ({"model": {"vocab": unigram[0]}}, {"model": {"vocab": unigram[1]}}),
    ]
    first, *others = content["added_tokens"]
    for flag in ("special", "lstrip", "rstrip", "normalized", "single_word"):
        changed.append(({}, {"added_tokens": [first | {flag: not first[flag]}, *others]}))
    for number, changes in enumerate(changed):
        paths = [variant(tmp_path / f"{number}{n}", {"tokenizer.json": one}) for n, one in enumerate(changes)]
        assert compare_tokenizers(*paths).differences, changes[1].keys()
    whole = variant(tmp_path / "whole", {"tokenizer_config.json": {"split_special_tokens": True}})
    assert compare_tokenizers(STUDENT, whole).differences and not compare_tokenizers(STUDENT, STUDENT).differences
