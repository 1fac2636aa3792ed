"""`roll-opd score` on the command line: scores equal Hugging Face's, and unsupported cases are refused."""

import codecs
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import megatron_data as data
import megatron_layouts as layouts
import megatron_models as models
import megatron_reference as reference
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from roll_opd.commands import main

MODEL = layouts.DEMO / "teacher"  # 4 heads, 2 key/value heads, 4 layers, 320 tokens, 2048 positions
ROW = {"id": "a", "tokens": [1, 2, 3], "prompt_length": 1}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def score(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "roll_opd.commands.main", "score", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_scores_equal_hugging_face(tmp_path: Path) -> None:
    """TP 2, one data-parallel group, rows in their order, ids of any kind kept.

    The file has a byte order mark, lines that end as on Windows, and a blank line.
    """
    sequences = data.demo_sequences()
    ids = [f"row {number}" if number % 2 else number for number in range(len(sequences))]
    rows: list[Any] = [
        {"id": name, "tokens": tokens.tolist(), "prompt_length": prompt}
        for name, (tokens, prompt) in zip(ids, sequences, strict=True)
    ]
    source = write(tmp_path / "rows.jsonl", [*rows[:3], "", *rows[3:]])
    source.write_bytes(codecs.BOM_UTF8 + source.read_bytes().replace(b"\n", b"\r\n"))
    target = tmp_path / "out.jsonl"
    options = ["--tp", "2", "--temperature", "0.7", "--max-tokens-per-microbatch", "90"]
    done = score("--model", str(MODEL), "--input", str(source), "--output", str(target), *options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "UserWarning" not in done.stderr
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["id"] for row in found] == ids
    network = models.load(MODEL)
    for row, (tokens, prompt) in zip(found, sequences, strict=True):
        with torch.no_grad():
            wanted = reference.token_logprobs(network, tokens, prompt, 0.7).numpy()
        assert len(row["logprobs"]) == len(wanted)
        np.testing.assert_allclose(row["logprobs"], wanted, rtol=0, atol=1e-5)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]


@pytest.mark.nightly
def test_a_teacher_file_has_hugging_faces_topk(tmp_path: Path) -> None:
    """On two ranks: for token rows, and for rows with answers, which have the same tokens as in SFT."""
    sequences = data.demo_sequences()
    rows: list[Any] = [
        {"id": number, "tokens": tokens.tolist(), "prompt_length": prompt}
        for number, (tokens, prompt) in enumerate(sequences)
    ]
    source, target = write(tmp_path / "rows.jsonl", rows), tmp_path / "out.parquet"
    options = ["--tp", "2", "--topk", "5", "--name", "large", "--max-tokens-per-microbatch", "90"]
    done = score("--model", str(MODEL), "--input", str(source), "--output", str(target), *options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.parquet", "rows.jsonl"]
    network = models.load(MODEL)
    for row, (tokens, prompt) in zip(pq.read_table(target).to_pylist(), sequences, strict=True):
        with torch.no_grad():
            logits = network(torch.from_numpy(tokens)[None]).logits[0, prompt - 1 : -1].double()
        best = logits.log_softmax(-1).topk(5)
        found = np.reshape(row["teacher_topk_logprobs"], (-1, 5))  # a row without response tokens stores []
        np.testing.assert_allclose(found, best.values, rtol=0, atol=1e-5)
        rest = torch.log1p(-best.values.exp().sum(-1))
        np.testing.assert_allclose(np.exp(row["teacher_topk_rest"]), rest.exp(), rtol=0, atol=1e-5)
        assert row["prompt_ids"] + row["response_ids"] == tokens.tolist() and row["teacher"] == "large"
        np.testing.assert_allclose(
            row["teacher_logprobs"], reference.token_logprobs(network, tokens, prompt, 1.0).detach(), atol=1e-5
        )
    answered = layouts.DEMO.parent / "data/sft_val.jsonl"
    done = score("--model", str(MODEL), "--input", str(answered), "--output", str(target), "--topk", "5")
    assert done.returncode == 0, done.stderr[-3000:]
    assert pq.read_metadata(target).num_rows == 100
    refused = score("--model", str(MODEL), "--input", str(source), "--output", str(tmp_path / "a.jsonl"), "--topk", "5")
    assert refused.returncode == 2 and "--topk: is written only to parquet" in refused.stderr


@pytest.mark.nightly  # two launches of half a minute; the layouts themselves are tested in the engine
def test_a_mixture_is_scored_in_its_layout(tmp_path: Path) -> None:
    """Two pipeline stages with two virtual stages each, attention over two ranks, unsplit experts; against one rank."""
    model = tmp_path / "mixture"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(models.CONFIGS["qwen2_moe"]()).float().save_pretrained(model)
    sequences = data.sequences(layouts.VOCABULARY)
    rows: list[Any] = [{"id": n, "tokens": each.tolist(), "prompt_length": p} for n, (each, p) in enumerate(sequences)]
    source = write(tmp_path / "rows.jsonl", rows)
    scored = sum(len(each) - prompt for each, prompt in sequences)
    found = []
    for options in ([], ["--tp", "2", "--expert-tp", "1", "--ep", "2", "--pp", "2", "--vpp", "2"]):
        target = tmp_path / "out.jsonl"
        done = score("--model", str(model), "--input", str(source), "--output", str(target), *options)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(np.concatenate([json.loads(line)["logprobs"] for line in target.read_text().splitlines()]))
        said = f"{len(rows)} rows, {scored} tokens: mean log-prob {found[-1].mean():.4f}, "
        [line] = [line for line in done.stdout.splitlines() if str(target) in line]
        assert line.startswith(said) and re.search(r", \d+\.\d s, [\d,]+ tokens/s: ", line)
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-5)


def test_a_mistake_exits_with_2_and_leaves_nothing(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [ROW, {**ROW, "tokens": [1, 320]}])
    done = score("--model", str(MODEL), "--input", str(source), "--output", str(tmp_path / "out.jsonl"))
    assert done.returncode == 2
    assert f"{source}:2: token 320 is outside the vocabulary of 320" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


BAD_ROWS = [
    ("not json", "not a row"),
    ("[1, 2]", "not a row"),
    ({"tokens": [1], "prompt_length": 1}, "not a row"),
    ({"id": 1, "tokens": [1]}, "not a row"),
    ({**ROW, "tokens": "123"}, "tokens must be a list of integers"),
    ({**ROW, "tokens": [1, 2.0]}, "tokens must be a list of integers"),
    ({**ROW, "tokens": [1, True]}, "tokens must be a list of integers"),
    ({**ROW, "tokens": []}, "prompt_length 1 must be 1 to the number of tokens (0)"),
    ({**ROW, "prompt_length": 0}, "prompt_length 0 must be 1 to"),
    ({**ROW, "prompt_length": 4}, "prompt_length 4 must be 1 to"),
    ({**ROW, "prompt_length": "1"}, "prompt_length '1' must be 1 to"),
    ({**ROW, "tokens": [1, -1]}, "token -1 is outside the vocabulary"),
    ({**ROW, "tokens": [1, 10**30]}, "is outside the vocabulary"),
    ({**ROW, "tokens": [1] * 2049}, "2049 tokens are more than the model's 2048 positions"),
]
BAD_OPTIONS = [
    (["--tp", "0"], "--tp: 0 is not a size"),
    (["--dp", "-1"], "--dp: -1 is not a size"),
    (["--tp", "4"], "4 exceeds the number of key/value heads"),
    (["--tp", "3"], "4 attention heads of teacher are not divisible by 3"),
    (["--pp", "3"], "the 4 layers of teacher are not divisible by 3"),
    (["--cp", "0"], "--cp: 0 is not a size"),
    (["--vpp", "0"], "--vpp: 0 is not a size"),
    (["--expert-tp", "0"], "--expert-tp: 0 is not a size"),
    (["--vpp", "2"], "--vpp: 2 needs --pp of at least 2"),
    (["--pp", "2", "--vpp", "3"], "--pp: teacher has only 4 layers for 2 pipeline stages x 3 virtual ones"),
    (["--dp", "2", "--ep", "2"], "--ep: teacher is a dense model without experts"),
    (["--tp", "2", "--expert-tp", "1"], "--expert-tp: teacher is a dense model without experts"),
    (["--vocab-size", "2"], "rows.jsonl:1: token 3 has no log-prob with --vocab-size 2; raise it, or remove the row"),
    (["--temperature", "0"], "--temperature: 0.0 must be a number greater than 0"),
    (["--temperature", "nan"], "--temperature: nan must be a number greater than 0"),
    (["--max-tokens-per-microbatch", "0"], "must be at least 1"),
    (["--input", "/nowhere/rows.jsonl"], "--input: /nowhere/rows.jsonl: No such file or directory"),
    (["--output", "/nowhere/out.jsonl"], "there is no directory /nowhere"),
    (["--model", "/nowhere"], "--model: "),
]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Any:
    """Run the command in this process, in which starting another process is an error; return its output."""

    def never(*arguments: Any, **_: Any) -> None:
        raise AssertionError(f"started {arguments}")

    importlib.import_module("roll_opd.commands.score")  # and Ray, which has a subclass of Popen
    monkeypatch.setattr(subprocess, "Popen", never)

    def run(rows: list[Any], options: list[str]) -> str:
        source, target = write(tmp_path / "rows.jsonl", rows), tmp_path / "out.jsonl"
        code = main.main(["score", "--model", str(MODEL), "--input", str(source), "--output", str(target), *options])
        assert code == 2
        assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_bad_row_is_refused(refused: Any, row: Any, message: str) -> None:
    error = refused([ROW, row], [])
    assert message in error and "rows.jsonl:2" in error


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_option_is_refused(refused: Any, options: list[str], message: str) -> None:
    assert message in refused([ROW], options)


@pytest.mark.parametrize("name", ["rows.jsonl", "../{}/rows.jsonl", "link.jsonl"])
def test_the_input_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture, name: str) -> None:
    source = write(tmp_path / "rows.jsonl", [ROW])
    (tmp_path / "link.jsonl").symlink_to(source)
    before, target = source.read_text(), tmp_path / name.format(tmp_path.name)
    assert main.main(["score", "--model", str(MODEL), "--input", str(source), "--output", str(target)]) == 2
    assert f"--output: {target} is the file of --input" in " ".join(capsys.readouterr().err.split())
    assert source.read_text() == before


def test_many_bad_rows_are_counted_and_an_empty_file_is_refused(refused: Any) -> None:
    error = refused(["x"] * 9, [])
    assert error.count("not a row") == 5 and "4 more of the 9 rows are bad" in error
    assert "has no rows" in refused([], [])
