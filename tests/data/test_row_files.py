"""Files by name, directory and pattern; the first tags and the number of rows equal those of the pass over all rows."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_assets import write

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import DataPlan
from roll_opd.data.row_files import ROWS_SCANNED, count_rows, find_files, first_tags, open_file
from roll_opd.data.row_formats import DEFAULT_TAG, DataError


def write_tags(path: Path, *tags: str | None) -> Path:
    return write(path, *({"prompt": "a", "tag": tag} for tag in tags))


def test_files_directories_and_patterns(tmp_path: Path) -> None:
    place = tmp_path / "data"
    place.mkdir()
    files = [write_tags(place / name, "t") for name in ("b.jsonl", "a.jsonl", "c.json", "d.parquet")]
    write_tags(place / "notes.txt", "t")
    for name in (".rows.jsonl", "._b.jsonl", "dataset_infos.json"):
        (place / name).write_bytes(b"\x00\x05\x16\x07")
    (place / ".ipynb_checkpoints").mkdir()
    write_tags(place / ".ipynb_checkpoints" / "b-checkpoint.jsonl", "t")
    (place / "nested.jsonl").mkdir()
    assert find_files(str(place), None) == sorted(files)
    assert find_files(str(place / "*.jsonl"), None) == sorted(files[:2])
    assert find_files(str(files[0]), "elsewhere") == [files[0]]
    assert find_files("b.jsonl", str(place)) == [files[0]]
    assert find_files("?.jsonl", str(place)) == sorted(files[:2])
    (tmp_path / "empty").mkdir()
    for name, message in (
        (str(tmp_path / "empty"), r"has no files named \*.jsonl or"),
        ("no-*.jsonl", "no file 'no-"),
        ("no.jsonl", "dataset_dir 'elsewhere'"),
    ):
        with pytest.raises(DataError, match=message):
            find_files(name, "elsewhere")


def test_links_in_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to(write_tags(tmp_path / "blob", "t"))
    assert find_files(str(tmp_path), None) == [tmp_path / "a.jsonl"]
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "missing")
    with pytest.raises(DataError, match=r"b\.jsonl"):
        find_files(str(tmp_path), None)


def test_a_directory_of_save_to_disk_is_refused_with_the_conversion(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    assert find_files(str(tmp_path), None) == [tmp_path / "state.json"]  # of another program
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    for name, advice in (("", "load_from_disk"), ("*.json", "load_from_disk"), ("two", '["train"].to_parquet')):
        with pytest.raises(DataError) as refused:
            find_files(str(tmp_path / name), None)
        assert advice in str(refused.value)
    with pa.OSFile(str(tmp_path / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, pa.schema([])):
        pass
    with pytest.raises(DataError, match=r"Dataset\.from_file"):
        open_file(str(tmp_path / "data.arrow"))


def test_directories_with_special_characters_are_no_patterns(tmp_path: Path) -> None:
    place = tmp_path / "runs [1] *" / "é#%"
    place.mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl"):
        (place / name).write_text('{"prompt": "1"}')
    assert find_files(f"{place}/*.jsonl", None) == [place / "a.jsonl", place / "b.jsonl"]
    assert find_files(f"{tmp_path}/runs [1] */**/b.jsonl", None) == [place / "b.jsonl"]
    assert find_files(f"{place}/a.jsonl", None) == [place / "a.jsonl"]


def test_tags_and_rows_of_every_kind_of_file(tmp_path: Path) -> None:
    tags: list[str | None] = ["math", None, "code"]
    jsonl = write_tags(tmp_path / "rows.jsonl", *tags)
    pq.write_table(pa.table({"tag": tags, "prompt": ["a"] * 3}), tmp_path / "rows.parquet")
    pq.write_table(pa.table({"prompt": ["a"] * 3}), tmp_path / "untagged.parquet")
    for file in (jsonl, tmp_path / "rows.parquet"):
        data, limited = DataPlan((str(file),), 8), DataPlan((str(file),), 8, limit=1)
        assert first_tags(data) == ({"math", DEFAULT_TAG, "code"}, True)
        assert first_tags(limited) == ({"math"}, False)
        assert (count_rows(data), count_rows(limited)) == (3, 1)
    assert first_tags(DataPlan((str(tmp_path / "untagged.parquet"),), 8)) == ({DEFAULT_TAG}, True)
    assert count_rows(DataPlan((str(jsonl), str(tmp_path / "untagged.parquet")), 8)) == 6
    named = write(tmp_path / "named.jsonl", {"kind": "a", "tag": "b"})
    assert first_tags(DataPlan((str(named),), 8, columns=FrozenDict({"tag": "kind"}))) == ({"a"}, True)


def test_only_the_first_rows_are_looked_at(tmp_path: Path) -> None:
    long = write_tags(tmp_path / "long.jsonl", *["math"] * ROWS_SCANNED, "late")
    assert first_tags(DataPlan((str(long),), 8)) == ({"math"}, False)


def test_tags_of_a_changed_file_are_read_again(tmp_path: Path) -> None:
    rows = write_tags(tmp_path / "rows.jsonl", "math")
    data = DataPlan((str(rows),), 8)
    assert first_tags(data) == first_tags(data) == ({"math"}, True)
    write_tags(tmp_path / "new.jsonl", "code").replace(rows)  # of the same size, perhaps in the same millisecond
    assert first_tags(data) == ({"code"}, True)
    rows.unlink()
    assert first_tags(data) == (set(), True)


def test_bad_rows_count_and_have_no_tag(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", "no JSON", "", [1], {"tag": 3, "prompt": "a"}, {"tag": "math", "prompt": "a"})
    broken = write(tmp_path / "broken.parquet", "no Parquet")
    assert first_tags(DataPlan((str(broken), str(rows)), 8)) == ({"math"}, True)
    assert count_rows(DataPlan((str(rows),), 8)) == 4
    with pytest.raises(DataError, match=r"broken\.parquet is not a readable Parquet file"):
        count_rows(DataPlan((str(broken),), 8))


def test_looking_at_data_imports_no_library_for_models() -> None:
    program = (
        "import sys; from roll_opd.data import row_files, templates\n"
        "print(sorted({'torch', 'transformers', 'ray', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
