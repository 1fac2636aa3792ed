"""A JSON array has the same rows as with `json.loads`; other files are refused by name."""

import gzip
import json
import random
import string
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_assets import write

from roll_opd.config.plan import DataPlan
from roll_opd.data.data_checks import DataReport
from roll_opd.data.dataset import Prompt
from roll_opd.data.file_types import JsonArrayFile, refusal
from roll_opd.data.row_files import JsonlFile, count_rows, first_tags, open_file
from roll_opd.data.row_formats import DataError


def random_value(rng: random.Random, depth: int = 0) -> object:
    text = "".join(rng.choices(string.printable + 'äπ漢😀"\\[]{},', k=rng.randrange(12)))
    kinds = [text, rng.randrange(-(10**9), 10**9), rng.random(), True, None]
    if depth < 3:
        kinds += [
            [random_value(rng, depth + 1) for _ in range(rng.randrange(4))],
            {f"{text}{n}": random_value(rng, depth + 1) for n in range(rng.randrange(4))},
        ]
    return rng.choice(kinds)


def test_elements_equal_those_of_json_loads(tmp_path: Path) -> None:
    rng = random.Random(0)
    for number in range(80):
        values = [random_value(rng) for _ in range(rng.randrange(8))]
        ascii_only, indent = rng.random() < 0.5, rng.choice([None, 1, 4])
        text = json.dumps(values, ensure_ascii=ascii_only, indent=indent)
        mark = b"\xef\xbb\xbf" if rng.random() < 0.3 else b""
        path = tmp_path / f"{number}.json"
        path.write_bytes(mark + text.encode() + rng.choice([b"", b"\n \r\n"]))
        file = open_file(str(path))
        assert isinstance(file, JsonArrayFile)
        found = list(file.scan())
        assert [value for _, _, value in found] == values
        assert [line for line, _, _ in found] == list(range(1, len(values) + 1))
        assert file.count() == len(values)
        chosen = sorted(rng.sample(range(len(values)), k=len(values) // 2))
        assert file.read([found[index][1] for index in chosen]) == [values[index] for index in chosen]


def test_rows_and_tags_of_an_array(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt": "a", "tag": tag} for tag in ("x", "y", "x")], indent=2))
    assert count_rows(DataPlan((str(path),), 8)) == 3
    assert first_tags(DataPlan((str(path),), 8)) == ({"x", "y"}, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1}, {"a": }]', "element 2, at byte 11"),
        ('[{"a": 1}', "element 1, at byte 9: cut off"),
        ('[{"a": 1},\n', "element 2"),
        ('[{"a": 1} {"a": 2}]', "no comma"),
        ('[\n{"a": 1}\n]\n{"a": 2}', "text after the end"),
        ('[{"a": 1},\n{"a": "[},\\\\"]]\n', "element 2"),
        ('[{"a": 1},\n{"a": "b]\n', "element 2"),
        ('[{"a": 1},\n]', "element 2, at byte 11"),
        ("[" * 100_000, "element 1"),
    ],
)
def test_a_broken_array_is_named_by_its_element(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        list(open_file(str(path)).scan())


def test_an_object_a_line_stays_jsonl(tmp_path: Path) -> None:
    for lines in ([{"prompt": "a"}], [[1, 2], {"prompt": "a"}], ["", {"prompt": "a"}]):
        assert isinstance(open_file(str(write(tmp_path / "rows.json", *lines))), JsonlFile)


def test_files_of_other_kinds_are_named_with_what_to_do(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", {"prompt": "a"})
    packed = tmp_path / "packed.jsonl"
    packed.write_bytes(gzip.compress(rows.read_bytes()))
    table = tmp_path / "table.csv"
    table.write_text("prompt,tag\na,b\n")
    spread = tmp_path / "spread.json"
    spread.write_text(json.dumps({"prompt": "a"}, indent=2))
    for path, what in ((packed, "compressed with gzip"), (table, "CSV"), (spread, "over several lines")):
        with pytest.raises(DataError, match=what):
            open_file(str(path))
    assert refusal(rows) is None
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "called.jsonl")
    assert [value for _, _, value in open_file(str(tmp_path / "called.jsonl")).scan()] == [{"prompt": "a"}]


def test_prompts_of_an_array_are_those_of_its_lines_and_bad_rows_have_numbers(
    tmp_path: Path, opened: Callable[..., tuple[list[Prompt], DataReport]]
) -> None:
    rows = [{"id": str(n), "prompt": f"what is {n}", "tag": "t"} for n in range(5)]
    rows.insert(3, {"id": "bad"})
    array = tmp_path / "rows.json"
    array.write_text(json.dumps(rows, indent=2))
    lines, _ = opened(write(tmp_path / "rows.jsonl", *rows), on_bad_row="drop")
    elements, report = opened(array, on_bad_row="drop")
    assert [prompt.tokens.tolist() for prompt in elements] == [prompt.tokens.tolist() for prompt in lines]
    assert (report.rows, report.bad) == (6, 1)
    assert f"{array}:4" in report.describe_bad()
