"""Rows: every form that is accepted, and every bad row counted, named, dropped or refused."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roll_opd.config.plan import DataPlan
from roll_opd.data.rows import EMPTY, NO_PROMPT, NOT_AN_OBJECT, NOT_JSON, WRONG_TYPE, DataError, load_rows

CHAT = [{"role": "user", "content": "2+2?"}]


def plan(*files: Path, **options: object) -> DataPlan:
    return DataPlan(files=tuple(map(str, files)), prompt_length=64, **options)


def write(path: Path, *lines: object) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    return path


def test_reads_every_form_of_a_row(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl",
        {
            "id": 7,
            "tag": "math",
            "messages": json.dumps(CHAT),
            "ground_truth": 4,
            "source": "s",
            "difficulty": 0.5,
        },
        {"messages": CHAT, "test_cases": ["x"]},
        "",
        {"prompt": "2+2="},
    )
    rows, report = load_rows(plan(file), default_tag="other")
    assert [row.id for row in rows] == ["7", "a:2", "a:4"]
    assert [row.tag for row in rows] == ["math", "other", "other"]
    assert rows[0].messages == rows[1].messages == tuple(CHAT)
    assert (rows[0].ground_truth, rows[0].source, rows[0].difficulty) == ("4", "s", 0.5)
    assert rows[1].extra == {"test_cases": ("x",)}
    assert (rows[2].prompt, rows[2].messages) == ("2+2=", ())
    assert (report.rows, report.bad) == (3, 0)


BAD_LINES = [
    (NOT_JSON, "{oops"),
    (NOT_JSON, {"messages": "[{"}),
    (NOT_JSON, "[" * 100_000),
    (NOT_AN_OBJECT, [1, 2]),
    (NO_PROMPT, {"id": "x"}),
    (NO_PROMPT, {"messages": None}),
    (WRONG_TYPE, {"messages": 3}),
    (WRONG_TYPE, {"messages": ["hello"]}),
    (WRONG_TYPE, {"messages": [{"role": "user"}]}),
    (WRONG_TYPE, {"prompt": ["a"]}),
    (WRONG_TYPE, {"prompt": "a", "tag": 5}),
    (WRONG_TYPE, {"prompt": "a", "ground_truth": {"x": 1}}),
    (WRONG_TYPE, {"prompt": "a", "id": True}),
    (WRONG_TYPE, '{"prompt": "\\ud800"}'),
    (EMPTY, {"messages": []}),
    (EMPTY, {"messages": ""}),
    (EMPTY, {"messages": [{"role": "user", "content": " "}]}),
    (EMPTY, {"prompt": "\n"}),
]


@pytest.mark.parametrize(("kind", "line"), BAD_LINES)
def test_a_bad_row_is_counted_and_named(tmp_path: Path, kind: str, line: object) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "good"}, line)
    rows, report = load_rows(plan(file, on_bad_row="drop"))
    assert len(rows) == 1
    assert report.bad_counts == {kind: 1}
    assert f"{file}:2" in report.bad_examples[kind][0]
    with pytest.raises(DataError, match="on_bad_row: drop") as refused:
        load_rows(plan(file))
    assert kind in str(refused.value)
    assert f"{file}:2" in str(refused.value)


def test_the_report_of_many_bad_rows_stays_short(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "good"}, *["nope"] * 500)
    _, report = load_rows(plan(file, on_bad_row="drop"))
    assert report.bad == 500
    assert "500 x not JSON" in report.summary()
    assert len(report.summary()) < 1000


def test_bytes_that_are_not_utf8_are_a_bad_row(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "with a byte order mark"}\n{"prompt": "\xff"}\n')
    rows, report = load_rows(plan(file, on_bad_row="drop"))
    assert [row.prompt for row in rows] == ["with a byte order mark"]
    assert report.bad_counts == {NOT_JSON: 1}


def test_parquet_gives_the_rows_of_the_same_jsonl(tmp_path: Path) -> None:
    values = [
        {"id": "a", "messages": json.dumps(CHAT), "ground_truth": "4", "tag": "t"},
        {"id": "b", "messages": None, "ground_truth": "4", "tag": "t"},
        {"id": "c", "messages": json.dumps(CHAT), "ground_truth": None, "tag": None},
    ]
    pq.write_table(pa.Table.from_pylist(values), tmp_path / "rows.parquet")
    from_parquet = load_rows(plan(tmp_path / "rows.parquet", on_bad_row="drop"))
    from_jsonl = load_rows(plan(write(tmp_path / "rows.jsonl", *values), on_bad_row="drop"))
    assert from_parquet[0] == from_jsonl[0]
    assert from_parquet[1].bad_counts == from_jsonl[1].bad_counts == {NO_PROMPT: 1}
    (tmp_path / "bad.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=r"bad\.parquet"):
        load_rows(plan(tmp_path / "bad.parquet"))


def test_ids_stay_unique_over_files(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", {"id": "0", "prompt": "x"})
    second = write(tmp_path / "b.jsonl", {"id": "0", "prompt": "y"})
    rows, report = load_rows(plan(first, second))
    assert len({row.id for row in rows}) == 2
    assert report.renamed == 1


def test_limit_takes_the_first_usable_rows(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "0"}, "bad", {"prompt": "1"}, {"prompt": "2"})
    rows, _ = load_rows(plan(file, limit=2, on_bad_row="drop"))
    assert [row.prompt for row in rows] == ["0", "1"]


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no usable row"):
        load_rows(plan(write(tmp_path / "empty.jsonl")))
    with pytest.raises(DataError, match="all 1 rows are bad"):
        load_rows(plan(write(tmp_path / "bad.jsonl", "bad"), on_bad_row="drop"))
    with pytest.raises(DataError, match=r"missing\.jsonl"):
        load_rows(plan(tmp_path / "missing.jsonl"))
    with pytest.raises(DataError, match="file_name"):
        load_rows(plan())
