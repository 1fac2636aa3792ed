"""Weight files in model directories, as different tools write them: the files that are read, and errors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from config_assets import SIZES, shapes_of, write_model, write_safetensors
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen3Config

from roll_opd.models.adapter_files import read_adapter
from roll_opd.models.model_files import INDEX, SINGLE, engine_problem
from roll_opd.models.model_info import ModelFilesError, find_model, read_model
from roll_opd.models.tokenizer_files import largest_token_id
from roll_opd.models.weight_files import weight_problems

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _split(path: Path, seed: int = 0) -> None:
    """Write the model in two files with an index."""
    shapes = list(shapes_of(SIZES).items())
    halves = {FIRST: shapes[: len(shapes) // 2], SECOND: shapes[len(shapes) // 2 :]}
    for name, half in halves.items():
        write_safetensors(path / name, dict(half), seed)
    weight_map = {tensor: name for name, half in halves.items() for tensor, _ in half}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_weight_files_are_those_of_transformers(tmp_path: Path) -> None:
    """A model saved in shards, then again in one file: transformers leaves the index."""
    sizes = {name: value for name, value in SIZES.items() if name != "model_type"}
    shards, single = (AutoModelForCausalLM.from_config(Qwen3Config(**sizes)) for _ in range(2))
    shards.save_pretrained(tmp_path, max_shard_size="5KB")
    several = read_model(tmp_path)
    assert len(several.weight_files) > 1
    single.save_pretrained(tmp_path)
    assert (tmp_path / INDEX).is_file(), "transformers removes the index now"
    info = read_model(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, tensor in info.tensors.items():
        with safe_open(tensor.file, "pt") as file:
            assert torch.equal(file.get_tensor(name), loaded[name])
    assert info.parameters == several.parameters and weight_problems(info) == []
    assert f"remove the index (rm {tmp_path / INDEX})" in str(engine_problem(tmp_path))


@pytest.mark.parametrize("hurt", ["missing", "cut", "pointer"])
def test_shards_that_are_not_whole_do_not_count_beside_a_whole_file(tmp_path: Path, hurt: str) -> None:
    path = write_model(tmp_path / "model")
    _split(path, seed=3)
    if hurt == "missing":
        (path / SECOND).unlink()
    else:
        (path / SECOND).write_bytes(POINTER.encode() if hurt == "pointer" else (path / SECOND).read_bytes()[:-1])
    assert read_model(path).weight_files == (path / SINGLE,)
    assert INDEX in str(engine_problem(path))


def test_two_whole_sets_must_be_the_same(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    _split(path)
    shutil.copyfile(path / SINGLE, path / "kept")
    (path / SINGLE).unlink()
    shards = read_model(path)
    assert shards.weight_files == (path / FIRST, path / SECOND) and engine_problem(path) is None
    with safe_open(path / FIRST, "pt") as one, safe_open(path / SECOND, "pt") as other:
        whole = {name: file.get_tensor(name) for file in (one, other) for name in file.keys()}  # noqa: SIM118
    from safetensors.torch import save_file

    save_file(whole, path / SINGLE, metadata={"format": "pt"})
    assert read_model(path).weight_files == (path / SINGLE,) and engine_problem(path) is None
    whole["model.norm.weight"] = whole["model.norm.weight"] + 1
    save_file(whole, path / SINGLE, metadata={"format": "pt"})
    with pytest.raises(ModelFilesError, match=r"both complete and differ \(model.norm.weight\).* Remove the"):
        read_model(path)
    save_file({name: tensor.bfloat16() for name, tensor in whole.items()}, path / SINGLE, metadata={"format": "pt"})
    with pytest.raises(ModelFilesError, match="both complete and differ"):
        read_model(path)


def test_an_index_that_names_fewer_tensors(tmp_path: Path) -> None:
    """transformers and vLLM load all tensors of its files."""
    path = write_model(tmp_path / "model")
    _split(path)
    (path / SINGLE).unlink()
    index = json.loads((path / INDEX).read_text())
    for name in list(index["weight_map"])[1:-1]:
        del index["weight_map"][name]
    (path / INDEX).write_text(json.dumps(index))
    assert weight_problems(read_model(path)) == []


def _link(path: Path) -> None:
    (path / SINGLE).unlink()
    (path / SINGLE).symlink_to("../../blobs/4d7a21")


def _renamed(path: Path) -> None:
    _split(path)
    (path / SINGLE).unlink()
    (path / FIRST).rename(path / "pytorch_model-00001-of-00002.safetensors")


def _without_index(path: Path) -> None:
    _split(path)
    (path / SINGLE).unlink()
    (path / INDEX).unlink()


@pytest.mark.parametrize(
    ("leave", "message"),
    [
        (
            lambda path: (path / SINGLE).write_text(POINTER),
            r"model.safetensors is a git-LFS pointer.*run `git lfs pull`",
        ),
        (lambda path: (path / "config.json").write_text(POINTER), r"config.json is a git-LFS pointer.*`git lfs pull`"),
        (lambda path: (path / SINGLE).write_bytes(b""), r"model.safetensors is empty \(0 bytes\); download it again"),
        (_link, r"model.safetensors is a broken link to ../../blobs/4d7a21; download the model again"),
        (_renamed, rf"{FIRST} of the index is missing \(found pytorch_model-00001-of-00002.safetensors"),
        (_without_index, rf"found {FIRST}, {SECOND}, but neither {SINGLE} nor {INDEX}.*download the index"),
        (
            lambda path: (path / SINGLE).rename(path / "pytorch_model.bin"),
            r"in .bin form only; save the model again",
        ),
    ],
)
def test_unusable_weights_are_refused(tmp_path: Path, leave: Callable[[Path], object], message: str) -> None:
    path = write_model(tmp_path / "model")
    leave(path)
    with pytest.raises(ModelFilesError, match=message):
        read_model(find_model(str(path)))


def test_unread_lfs_pointers_are_ignored(tmp_path: Path) -> None:
    """As `git lfs pull --include '*.safetensors'` leaves the rest."""
    path = write_model(tmp_path / "model")
    for name in ("pytorch_model.bin", "tf_model.h5", "original.pth"):
        (path / name).write_text(POINTER)
    assert read_model(path).weight_files == (path / SINGLE,)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_tokenizer_that_is_a_pointer(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "model")
    (path / "tokenizer.json").unlink()
    (path / name).write_text(POINTER)
    with pytest.raises(ModelFilesError, match=rf"{name} is a git-LFS pointer"):
        largest_token_id(path)


def test_an_adapter_that_is_a_pointer(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_text(POINTER)
    with pytest.raises(ModelFilesError, match=r"adapter_model.safetensors is a git-LFS pointer.*run `git lfs pull`"):
        read_adapter(tmp_path)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-4B"}))
    with pytest.raises(ModelFilesError, match=r"no config.json; it is an adapter of Qwen/Qwen3-4B; merge it"):
        read_model(tmp_path)


def test_a_stale_index_is_reported(problems: Callable[..., list[str]], root: Path) -> None:
    (root / "student" / INDEX).write_text(json.dumps({"weight_map": {"a": FIRST}}))
    (found,) = problems()
    assert "vLLM would not start; remove the index" in found
