"""Templates and prompts: the tokens of a prompt, the rows that become prompts, and repeated reading."""

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_assets import write
from transformers import PreTrainedTokenizerBase

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import DataPlan
from roll_opd.data.data_checks import NOT_ENCODABLE, TOO_LONG
from roll_opd.data.dataset import open_prompts, short_names
from roll_opd.data.row_formats import DataError, Row
from roll_opd.data.templates import BASE, TEMPLATES, load_tokenizer, render_prompt, tokenize
from roll_opd.data.usable_rows import repeated


def chat(identity: str, content: str, role: str = "user", **others: object) -> dict:
    return {"id": identity, "tag": "t", "messages": [{"role": role, "content": content}], "ground_truth": "4", **others}


def conversation(*messages: tuple[str, str]) -> Row:
    return Row(id="a", tag="t", messages=tuple(FrozenDict({"role": r, "content": c}) for r, c in messages))


def encode(tokenizer: PreTrainedTokenizerBase, row: Row, template: str = "native") -> list[int]:
    return tokenize(tokenizer, [render_prompt(tokenizer, row, template)])[0]


USER = "<|im_start|>user\nhow many<|im_end|>\n<|im_start|>assistant\n"
EXPECTED = {
    "native": USER,
    "qwen2_5": USER,
    "qwen3": USER,
    "chatml": USER,
    "native_nonthinking": USER + "<think>\n\n</think>\n\n",
    "qwen3_nothink": USER + "<think>\n\n</think>\n\n",
    "base": BASE[0] + "how many" + " Assistant:",
    "empty": USER,
}


def test_every_template_has_an_expectation() -> None:
    assert set(EXPECTED) == set(TEMPLATES)
    assert BASE[0].endswith(" User: ")


@pytest.mark.parametrize("template", sorted(EXPECTED))
def test_a_template_gives_these_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    tokens = encode(tokenizer, conversation(("user", "how many")), template)
    assert all(type(token) is int for token in tokens)
    assert tokenizer.decode(tokens) == EXPECTED[template]
    assert tokens == tokenizer(EXPECTED[template], add_special_tokens=False)["input_ids"]


def test_the_tokenizers_own_template_tokenises_alike(tokenizer: PreTrainedTokenizerBase) -> None:
    """Rendering first and tokenizing many texts together gives the same tokens as transformers in one step."""
    rows = [conversation(("system", "what"), ("user", "2+2" * n)) for n in range(1, 5)]
    texts = [render_prompt(tokenizer, row) for row in rows]
    for row, tokens in zip(rows, tokenize(tokenizer, texts), strict=True):
        messages = [dict(message) for message in row.messages]
        assert tokens == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_a_plain_prompt_is_given_as_it_is(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = encode(tokenizer, Row(id="a", tag="t", prompt="2+2="), "native")
    assert tokenizer.decode(tokens) == "2+2="


def test_a_row_that_its_template_cannot_render_is_an_error(tokenizer_dir: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_dir))
    with pytest.raises(DataError, match=r"qwen9.*known are base"):
        encode(tokenizer, conversation(("user", "x")), "qwen9")
    with pytest.raises(DataError, match=r"row a: .*unknown role judge"):
        encode(tokenizer, conversation(("judge", "x")))
    with pytest.raises(DataError, match="row a: this template accepts only one message, of role user"):
        encode(tokenizer, conversation(("system", "x"), ("user", "x")), "empty")
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        encode(tokenizer, conversation(("user", "x")))
    plan = DataPlan(files=(str(write(tmp_path / "a.jsonl", chat("a", "x"))),), prompt_length=64, on_bad_row="drop")
    with pytest.raises(DataError, match="no chat template") as refused:
        open_prompts(plan, tokenizer)
    assert "rows" not in str(refused.value).partition(";")[0]  # said once, not once a row
    with pytest.raises(DataError, match="no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_tag_has_its_own_template(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, opened: Callable) -> None:
    file = write(tmp_path / "a.jsonl", chat("a", "how many"), chat("b", "how many", tag="plain"))
    prompts, _ = opened(file, template="qwen3", tag_templates=FrozenDict({"plain": "base"}), prompt_length=1000)
    assert [tokenizer.decode(prompt.tokens) for prompt in prompts] == [EXPECTED["qwen3"], EXPECTED["base"]]
    with pytest.raises(DataError, match="unknown template 'qwen9'"):
        opened(file, tag_templates=FrozenDict({"plain": "qwen9"}))


def test_long_and_refused_rows_are_reported(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, opened: Callable
) -> None:
    rows = [chat("short", "2"), chat("long", "2" * 200), chat("odd", "2", role="judge"), chat("last", "3", note=[1])]
    file = write(tmp_path / "a.jsonl", *rows)
    prompts, report = opened(file, prompt_length=40, on_bad_row="drop")
    assert [(prompt.id, prompt.index) for prompt in prompts] == [("short", 0), ("last", 1)]
    assert prompts[0].tokens.tolist() == encode(tokenizer, conversation(("user", "2")))
    assert prompts[0].tokens.dtype == np.int64
    assert (prompts[1].tag, prompts[1].ground_truth, prompts[1].extra) == ("t", "4", {"note": (1,)})
    assert (report.prompts, report.bad_counts) == (2, {TOO_LONG: 1, NOT_ENCODABLE: 1})
    assert report.longest == len(encode(tokenizer, conversation(("user", "2" * 200))))
    assert f"a.jsonl:2 (long, {report.longest} tokens)" in report.summary()
    assert "2 rows dropped (prompt_length=40 tokens)" in report.summary()
    with pytest.raises(DataError, match="on_bad_row: drop"):
        opened(file, prompt_length=40)
    with pytest.raises(DataError, match=r"raise `prompt_length` \(now 40\) or set `on_long_prompt: drop`"):
        opened(write(tmp_path / "b.jsonl", *rows[:2]), prompt_length=40, on_long_prompt="refuse")
    with pytest.raises(DataError, match="no usable row"):
        opened(write(tmp_path / "c.jsonl", rows[1]), prompt_length=40)


def test_the_longest_prompt_allowed_is_kept(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, opened: Callable
) -> None:
    file = write(tmp_path / "a.jsonl", chat("a", "2"))
    length = len(encode(tokenizer, conversation(("user", "2"))))
    assert len(opened(file, prompt_length=length)[0]) == 1
    with pytest.raises(DataError):
        opened(file, prompt_length=length - 1)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_prompts_are_read_in_any_order(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, suffix: str) -> None:
    """Compared with reading all prompts: any numbers, also repeated, over files of which one is empty."""
    files = []
    for name, count in (("a", 5), ("b", 1), ("c", 9)):
        rows = [{"id": f"{name}{n}", "prompt": "2" * (n + 1), "tag": name} for n in range(count)]
        rows = rows if name != "b" else [{"id": "b0", "prompt": "2" * 200, "tag": "b"}]
        if suffix == "jsonl":
            files.append(write(tmp_path / f"{name}.jsonl", "", *rows[:2], " \r", *rows[2:], ""))
        else:
            files.append(tmp_path / f"{name}.parquet")
            pq.write_table(pa.Table.from_pylist(rows), files[-1], row_group_size=2)
    prompts, _ = open_prompts(DataPlan(files=tuple(map(str, files)), prompt_length=64), tokenizer)
    everything = prompts.all()
    assert [prompt.id for prompt in everything] == [f"a{n}" for n in range(5)] + [f"c{n}" for n in range(9)]
    generator = np.random.default_rng(0)
    for _ in range(20):
        numbers = generator.integers(0, len(prompts), size=6).tolist()
        got = prompts.read(numbers)
        assert got == [everything[number] for number in numbers]
        assert all(np.array_equal(p.tokens, everything[number].tokens) for p, number in zip(got, numbers, strict=True))


def test_a_row_changed_during_a_run_is_an_error(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    file = write(tmp_path / "a.jsonl", *[{"id": str(n), "prompt": "2+2"} for n in range(3)])
    prompts, _ = open_prompts(DataPlan(files=(str(file),), prompt_length=64), tokenizer)
    whole = file.read_text()
    answered = whole.replace("2+2", '2+2", "ground_truth": "4')
    for changed in (answered, whole.replace("2+2", "3+3"), whole[5:], "", whole.replace('"id": "2"', '"id": "7"')):
        file.write_text(changed)
        with pytest.raises(DataError, match=r"a\.jsonl:\d has changed since the start of the run"):
            prompts.all()
    file.write_text(whole)
    os.utime(file, (0, 0))  # a new time alone is no change
    assert len(prompts.all()) == 3
    file.unlink()
    with pytest.raises(DataError, match=r"a\.jsonl can no longer be read"):
        prompts.all()


def test_repeated_against_a_set() -> None:
    ids = np.random.default_rng(1).integers(0, 50, size=200)
    seen: set[int] = set()
    for number, again in zip(ids.tolist(), repeated(ids).tolist(), strict=True):
        assert again == (number in seen)
        seen.add(number)
    assert repeated(np.array([], dtype=np.int64)).tolist() == []


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["jsonl", pytest.param("parquet", marks=pytest.mark.nightly)])
def test_a_file_of_60_mb_takes_little_memory(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, suffix: str) -> None:
    """Most of the file is not needed for prompts, such as test cases; only a batch and the index are in memory."""
    count, ballast = 10_000, "x" * 6000
    file = tmp_path / f"big.{suffix}"
    if suffix == "jsonl":
        with file.open("w") as out:
            for n in range(count):
                out.write(json.dumps({"id": str(n), "prompt": "2+2", "test_cases": ballast}) + "\n")
        assert file.stat().st_size > 60e6
    else:
        rows = {"id": [str(n) for n in range(count)], "prompt": ["2+2"] * count, "test_cases": [ballast] * count}
        pq.write_table(pa.table(rows), file, compression="none", use_dictionary=False)
        assert file.stat().st_size > 60e6
        del rows
    arrow_before = pa.total_allocated_bytes()
    tracemalloc.start()
    prompts, report = open_prompts(DataPlan(files=(str(file),), prompt_length=64), tokenizer)
    batch = prompts.read([1, 5000, count - 1])
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.prompts == count
    assert [(prompt.id, len(prompt.extra["test_cases"])) for prompt in batch] == [
        ("1", 6000),
        ("5000", 6000),
        (str(count - 1), 6000),
    ]
    assert peak < 10e6
    assert held < 3e6
    assert pa.total_allocated_bytes() - arrow_before < 5e6


def test_short_names_of_files_are_the_shortest_unique_suffixes() -> None:
    assert short_names(["/data/a/train.jsonl", "/data/val.jsonl"]) == ["train.jsonl", "val.jsonl"]
    assert short_names(["/data/a/x.jsonl", "/data/b/x.jsonl"]) == ["a/x.jsonl", "b/x.jsonl"]
    assert short_names(["/data/x.jsonl", "/data/x.jsonl"]) == ["/data/x.jsonl", "/data/x.jsonl"]
