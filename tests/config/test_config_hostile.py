"""Input that is not a configuration: each gives a short message.

Wrong YAML, numbers that no engine accepts, missing paths, special files, missing permissions.
"""

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from config_assets import base_values, write_config

from roll_opd.base import hardware
from roll_opd.base.failures import ConfigError
from roll_opd.base.frozen import FrozenDict
from roll_opd.commands import main
from roll_opd.config.compose import load_config
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import RunPlan
from roll_opd.planner.lengths_and_batches import check_batched_tokens
from roll_opd.planner.load_plan import load_plan

MODEL = "student_train.model_args.model_name_or_path"
ROWS = "student_train.data_args.file_name"
ENGINE = "student_infer.strategy_args.strategy_config"
SAMPLING = "student_infer.generating_args"
TRAINER = "student_train.strategy_args.strategy_config"


YAML: dict[str, tuple[str | bytes, str]] = {
    "a circle of references": ("exp_name: ${a}\na: ${exp_name}\n", "exp_name"),
    "itself among its defaults": ("defaults: [run]\n", "defaults list"),
    "defaults that are a number": ("defaults: 3\n", "run.yaml"),
    "a list": ("- a\n- b\n", "line 1: a list, where keys"),
    "a word": ("hello\n", "line 1: a single value, where keys"),
    "a day that is none": ("a: !!timestamp 2001-99-99\n", "a value cannot be parsed (month"),
    "a NUL": ('a: "x\0y"\n', "line 1: the character U+0000"),
    "an escaped NUL": ('exp_name: "x\\0y"\n', "exp_name: 'x\\x00y' has a NUL"),
    "half a character": ('exp_name: "\\ud800"\n', "character"),
    "a control character": ("a: 1\nb: \x07\n", "line 2"),
    "Latin-1": ("a: 1\nb: é\n".encode("latin-1"), "line 2: not UTF-8"),
    "UTF-16": ("a: 1\n".encode("utf-16"), "not UTF-8"),
    "an object": ("a: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
    "a path": ("a: !!python/object/apply:pathlib.PosixPath [/data]\n", "a: is a Python object"),
    "binary data": ("exp_name: !!binary aGVsbG8=\n", "binary"),
    "a number of many digits": (f"seed: {'9' * 5000}\n", "run.yaml"),
    "a number of many bits": (f"seed: 0x{'f' * 5000}\n", "20000 bits"),
}


@pytest.mark.parametrize("name", YAML)
def test_yaml_without_sense(name: str, tmp_path: Path) -> None:
    text, said = YAML[name]
    (tmp_path / "run.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path), "run", [])
    assert said in str(caught.value) and len(str(caught.value)) < 1000


def test_files_that_the_defaults_name_are_checked_too(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("defaults: [other]\n")
    (tmp_path / "other.yaml").write_text("a: 1\na: 2\n")
    with pytest.raises(ConfigError, match=r"other\.yaml.*line 2.*duplicate key"):
        load_config(str(tmp_path), "run", [])


VALUES: list[tuple[str, Any, str]] = [
    ("seed", 2**32, "4294967295"),
    ("seed", 2**70, "71 bits"),
    ("max_steps", 10**12, "2147483647"),
    ("rollout_batch_size", 10**9, "1000000"),
    ("max_additional_running_prompts", 10**9, "1000000"),
    ("num_gpus_per_node", 10**6, "1024"),
    (f"{ENGINE}.max_num_seqs", -4, "greater than or equal to 1"),
    (f"{ENGINE}.gpu_memory_utilization", 17, "less than or equal to 1"),
    (f"{ENGINE}.block_size", 0, "greater than 0"),
    (f"{ENGINE}.kv_cache_dtype", "fp9", "'fp8'"),
    (f"{TRAINER}.recompute_granularity", "fulll", "'selective'"),
    (f"{SAMPLING}.stop_strings", [""], 'a text that is not empty, got ""'),
    (f"{SAMPLING}.stop_strings", "", 'a text that is not empty, got ""'),
    (
        f"{SAMPLING}.temperature",
        0.005,
        "0 (greedy) or at least 0.01, because vLLM uses 0.01 in place of a value between 0 and 0.01, got",
    ),
    (f"{SAMPLING}.temperature", 2.5, "less than or equal to 2"),
    (f"{SAMPLING}.top_k", 2**40, "2147483647"),
    ("validation.generating_args.stop_strings", ["x", ""], "a text that is not empty"),
    ("validation.generating_args.temperature", 1e-9, "0 (greedy) or at least 0.01"),
    ("auxiliary_models.judge.generating_args.temperature", 1e-9, "0 (greedy) or at least 0.01"),
    ("output_dir", "~nosuchuser/x", "no home directory ~nosuchuser"),
    (MODEL, "~nosuchuser/x", "no home directory ~nosuchuser"),
    (ROWS, "~nosuchuser/x", "no home directory ~nosuchuser"),
    ("resume_from_checkpoint", "~nosuchuser/x", "no home directory ~nosuchuser"),
    ("output_dir", "x" * 300, "too long"),
    (MODEL, "x" * 300, "too long"),
    (ROWS, "x" * 300, "too long"),
    ("exp_name", "x" * 300, "255 bytes"),
    ("output_dir", "a\0b", "NUL"),
    (MODEL, "", "missing"),
    (ROWS, "", "empty"),
    (ROWS, "/dev/zero", "a device"),
    (ROWS, "/proc/kmsg", "not a regular file"),
    ("output_dir", "", "empty"),
    ("system_envs", {"A=B": "1"}, "pattern"),
    ("student_train.device_mapping", "list(range(0,1)) + " * 700 + "x", "characters"),
]


@pytest.mark.parametrize(("key", "value", "said"), VALUES, ids=[f"{key}-{said}" for key, _, said in VALUES])
def test_values_that_nothing_can_use(key: str, value: Any, said: str, problems: Callable[..., list[str]]) -> None:
    (about,) = [text for text in problems({key: value}) if text.startswith(f"{key}")]
    assert said in about and len(about) < 1500


@pytest.mark.parametrize("temperature", [0.01, "1e-2", 2])
def test_temperatures_that_vllm_leaves_alone(temperature: Any, plan: Callable[..., RunPlan]) -> None:
    assert plan({f"{SAMPLING}.temperature": temperature}).rollout.sampling.temperature == float(temperature)  # type: ignore[union-attr]


# a sequence has 32 + 48 = 80 tokens
BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"max_num_seqs": 81, "max_num_batched_tokens": 80}, "80 is less than one token for each of the 81 sequences"),
    ({"max_num_seqs": 80, "max_num_batched_tokens": 80, "enable_chunked_prefill": False}, ""),
    ({"max_num_seqs": 16, "max_num_batched_tokens": 79, "enable_chunked_prefill": False}, "is false, which vLLM"),
    ({"max_num_seqs": 16, "max_num_batched_tokens": 79}, "79 is less than the 80 that an engine without a GPU needs"),
    ({"max_num_batched_tokens": 255}, "255 is less than the 256 that an engine without a GPU needs"),
    ({"max_num_batched_tokens": 256}, ""),
]


@pytest.mark.parametrize(("options", "said"), BATCHES, ids=str)
def test_tokens_of_a_batch_that_vllm_refuses(
    options: dict[str, Any],
    said: str,
    plan: Callable[..., RunPlan],
    problems: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a GPU or a joined cluster, vLLM splits prompts unless the key is set."""
    monkeypatch.setattr(hardware, "has_gpu_driver", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    changes = {f"{ENGINE}.{key}": value for key, value in options.items()}
    if not said:
        assert plan(changes).warnings == ()
        return
    (problem,) = problems(changes)
    assert problem.startswith(f"{ENGINE}.max_num_batched_tokens: ") and said in problem
    if "without a GPU" in said:
        assert problem in plan(changes, runnable=False).warnings
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        assert plan(changes).warnings == ()
        monkeypatch.delenv("RAY_ADDRESS")
        monkeypatch.setattr(hardware, "has_gpu_driver", lambda: True)  # whether or not nvidia-smi knows its memory
        assert plan(changes).warnings == ()


@pytest.mark.slow
def test_the_installed_vllm_refuses_the_same_batches(plan: Callable[..., RunPlan]) -> None:
    from vllm.config.scheduler import SchedulerConfig

    engine, refusals = plan().rollout, 0
    assert engine is not None and engine.max_model_len == 80
    for tokens, sequences, chunked in itertools.product((16, 79, 80), (16, 80, 81), (True, False)):
        batch = {"max_num_batched_tokens": tokens, "max_num_seqs": sequences, "enable_chunked_prefill": chunked}
        diag, refused = Diagnostics(), False
        check_batched_tokens(replace(engine, engine_args=FrozenDict(batch)), diag, on_cpu=False)
        try:
            SchedulerConfig(max_model_len=80, is_encoder_decoder=False, **batch)
        except ValueError:
            refused = True
        assert bool(diag.problems) == refused, batch
        refusals += refused
    assert 0 < refusals < 18


def _fifo(root: Path) -> None:
    (root / "train.jsonl").unlink()
    os.mkfifo(root / "train.jsonl")


def _written(name: str, content: Any) -> Callable[[Path], None]:
    return lambda root: (root / name).write_text(content if isinstance(content, str) else json.dumps(content)) and None


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        file = root / "student" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


INDEX = "student/model.safetensors.index.json"
FILES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a FIFO of rows": (_fifo, ROWS, "FIFO"),
    "an index that is a list": (_written(INDEX, []), MODEL, "JSON object"),
    "an index of numbers": (_written(INDEX, {"weight_map": {"a": 3}}), MODEL, "weight_map"),
    "an index without a map": (_written(INDEX, {"weight_map": [1]}), MODEL, "weight_map"),
    "JSON without end": (_written("student/config.json", "[" * 100_000), MODEL, "not valid JSON"),
    "a size of 18 digits": (_config(vocab_size=10**18), MODEL, "vocab_size"),
    "rope_parameters that are a list": (_config(rope_parameters=[1]), "student_train", "rope_parameters"),
    "a link to itself": (lambda root: _replaced(root / "student"), MODEL, "not found"),
}


def _replaced(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.symlink_to(directory)


@pytest.mark.parametrize("name", FILES)
def test_paths_that_are_no_regular_files_are_refused(name: str, root: Path, values: dict[str, Any]) -> None:
    damage, key, said = FILES[name]
    damage(root)
    with pytest.raises(ConfigError) as caught:
        load_plan(write_config(root, values), "run", pure=True)
    assert any(text.startswith(key) and said in text for text in caught.value.problems), caught.value


@pytest.fixture
def without_rights() -> Iterator[Path]:
    """Return a directory that every user may enter, for a process without rights, even if root runs the tests."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    yield place
    os.seteuid(os.getuid())
    for directory in [path for path in place.rglob("*") if path.is_dir()]:
        directory.chmod(0o755)
    shutil.rmtree(place)


@pytest.mark.parametrize("key", [MODEL, ROWS, "output_dir", "resume_from_checkpoint", "--config_path"])
def test_directories_that_may_not_be_entered(key: str, without_rights: Path) -> None:
    values = base_values(without_rights)
    closed = without_rights / "closed"
    (closed / "deep").mkdir(parents=True)
    path, directory = values, write_config(without_rights, values)
    load_plan(directory, "run", pure=True)  # imports what nobody may read where Python belongs to root
    *parents, last = key.split(".")
    for parent in parents:
        path = path[parent]
    if key == "--config_path":
        key, directory = "run in ", str(closed / "deep")
    else:
        path[last] = str(closed / "deep")
        write_config(without_rights, values)
    closed.chmod(0)
    if os.getuid() == 0:
        os.seteuid(65534)
    with pytest.raises(ConfigError) as caught:
        load_plan(directory, "run", pure=True)
    assert any(text.startswith(key) and "Permission denied" in text for text in caught.value.problems), caught.value


def test_home_means_the_same_everywhere(
    plan: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert plan({"output_dir": "~/runs"}).output_dir == f"{tmp_path}/runs"


def test_what_nobody_foresaw_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def fails(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("roll_opd.planner.load_plan.load_plan", fails)
    assert main.main(["plan", "--config_path", "demo", "--config_name", "rlvr"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("roll-opd: ") and "KeyError: 'a bug'" in said and "ROLL_OPD_DEBUG=1" in said
    assert "Traceback" not in said and f"{Path(__file__).name}:" in said
