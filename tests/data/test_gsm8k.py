"""GSM8K: the converter on small made-up files and on the real data."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from roll_opd.config.plan import DataPlan
from roll_opd.data.dataset import open_prompts
from roll_opd.data.gsm8k import final_answer, main
from roll_opd.data.row_files import open_file
from roll_opd.data.row_formats import DataError, parse_row

EXAMPLES = [
    {"question": "How many?", "answer": "It is 2*3 = <<2*3=6>>6.\n#### 6"},
    {"question": "How much für “her”?", "answer": "A lot.\n#### 1,234,567"},
]


def write(path: Path, examples: list[dict]) -> Path:
    path.write_text("".join(json.dumps(example) + "\n" for example in examples), encoding="utf-8")
    return path


def test_the_final_answer_is_the_number_behind_the_last_mark() -> None:
    assert final_answer("#### 1\nno\n#### -1,000 ") == "-1000"
    for bad in ("72", "####", "#### \n"):
        with pytest.raises(DataError):
            final_answer(bad)


def test_converts_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out" / "rows.jsonl"
    source = write(tmp_path / "train.jsonl", EXAMPLES)
    assert main(["--input", str(source), "--output", str(output), "--instruction", "Think."]) == 0
    assert "2 rows" in capsys.readouterr().out
    rows = [parse_row(value, "none") for _, _, value in open_file(str(output)).scan()]
    assert [row.id for row in rows] == ["gsm8k-train-0", "gsm8k-train-1"]
    assert [row.ground_truth for row in rows] == ["6", "1234567"]
    assert rows[1].messages == ({"role": "user", "content": "How much für “her”?\nThink."},)
    assert (rows[0].tag, rows[0].extra) == ("math_rule", {"source": "gsm8k"})


def test_a_local_data_set_gives_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "gsm8k"
    directory.mkdir()
    source = write(directory / "train.jsonl", EXAMPLES)
    outputs = tmp_path / "from_file.jsonl", tmp_path / "from_dataset.jsonl"
    assert main(["--input", str(source), "--output", str(outputs[0])]) == 0
    assert main(["--dataset", str(directory), "--split", "train", "--output", str(outputs[1])]) == 0
    assert outputs[0].read_text() == outputs[1].read_text()


def test_wrong_input_ends_with_2_and_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rows.jsonl"
    not_gsm8k = write(tmp_path / "a.jsonl", [EXAMPLES[0], {"question": "x", "answer": "no mark"}])
    lacking = write(tmp_path / "b.jsonl", [{"text": "x"}])
    (tmp_path / "c.jsonl").write_text("{oops\n")
    for source, message in (
        (not_gsm8k, "example 1 of a"),
        (lacking, "example 0 of b"),
        (tmp_path / "c.jsonl", "c.jsonl:1 is not JSON"),
        (tmp_path / "missing.jsonl", "missing.jsonl"),
    ):
        assert main(["--input", str(source), "--output", str(output)]) == 2
        assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "c.jsonl"]


def test_all_of_gsm8k_loads(tmp_path: Path, gsm8k_dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    output = tmp_path / "rows.jsonl"
    assert main(["--input", str(gsm8k_dir / "train.jsonl"), "--output", str(output)]) == 0
    data = DataPlan(files=(str(output),), prompt_length=4096, on_long_prompt="refuse")
    prompts, report = open_prompts(data, tokenizer)
    assert (report.prompts, report.rows, report.bad, report.renamed) == (7473, 7473, 0, 0)
    question = json.loads((gsm8k_dir / "train.jsonl").read_text(encoding="utf-8").splitlines()[7472])["question"]
    assert question in tokenizer.decode(prompts.read([7472])[0].tokens)
