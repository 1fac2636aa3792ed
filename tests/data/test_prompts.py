"""Templates and prompts: the tokens a model is given, and which rows become prompts."""

from pathlib import Path

import pytest

from roll_opd.config.frozen import FrozenDict
from roll_opd.config.plan import DataPlan
from roll_opd.data.rows import DataError, Row
from roll_opd.data.source import build_prompts
from roll_opd.data.templates import TEMPLATES, encode_prompt, load_tokenizer


def chat(identity: str, content: str, role: str = "user") -> Row:
    return Row(id=identity, tag="t", messages=(FrozenDict({"role": role, "content": content}),), ground_truth="4")


USER = "<|im_start|>user\nhow many<|im_end|>\n<|im_start|>assistant\n"
EXPECTED = {
    "native": USER,
    "qwen2_5": USER,
    "qwen3": USER,
    "chatml": USER,
    "native_nonthinking": USER + "<think>\n\n</think>\n\n",
    "qwen3_nothink": USER + "<think>\n\n</think>\n\n",
    "base": "how many",
    "empty": "how many",
}


def test_every_template_has_an_expectation() -> None:
    assert set(EXPECTED) == set(TEMPLATES)


@pytest.mark.parametrize("template", sorted(EXPECTED))
def test_a_template_gives_these_tokens(tokenizer_dir: Path, template: str) -> None:
    tokenizer = load_tokenizer(str(tokenizer_dir))
    tokens = encode_prompt(tokenizer, chat("a", "how many"), template)
    assert all(type(token) is int for token in tokens)
    assert tokenizer.decode(tokens) == EXPECTED[template]
    assert tokens == tokenizer(EXPECTED[template], add_special_tokens=False)["input_ids"]


def test_a_plain_prompt_is_given_as_it_is(tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_dir))
    tokens = encode_prompt(tokenizer, Row(id="a", tag="t", prompt="2+2="), "native")
    assert tokenizer.decode(tokens) == "2+2="


def test_what_a_template_cannot_do_is_said(tokenizer_dir: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_dir))
    with pytest.raises(DataError, match=r"qwen9.*known are base"):
        encode_prompt(tokenizer, chat("a", "x"), "qwen9")
    with pytest.raises(DataError, match=r"row a: .*unknown role judge"):
        encode_prompt(tokenizer, chat("a", "x", role="judge"))
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        encode_prompt(tokenizer, chat("a", "x"))
    with pytest.raises(DataError, match="no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_long_and_refused_rows_are_reported(tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_dir))
    rows = [chat("short", "2"), chat("long", "2" * 200), chat("odd", "2", role="judge"), chat("last", "3")]
    data = DataPlan(files=("x",), prompt_length=40, on_bad_row="drop")
    prompts, report = build_prompts(rows, tokenizer, data)
    assert [(prompt.id, prompt.index) for prompt in prompts] == [("short", 0), ("last", 1)]
    assert prompts[0].tokens.tolist() == encode_prompt(tokenizer, rows[0])
    assert (prompts[0].tag, prompts[0].ground_truth) == ("t", "4")
    assert (report.prompts, report.too_long, report.unusable) == (2, 1, 1)
    assert report.longest == len(encode_prompt(tokenizer, rows[1]))
    assert "long (" in report.summary()
    with pytest.raises(DataError, match="on_long_prompt: drop"):
        build_prompts(rows[:2], tokenizer, DataPlan(files=("x",), prompt_length=40, on_long_prompt="refuse"))
    with pytest.raises(DataError, match="on_bad_row: drop"):
        build_prompts(rows, tokenizer, DataPlan(files=("x",), prompt_length=40))
    with pytest.raises(DataError, match="no row is left"):
        build_prompts(rows[1:2], tokenizer, data)


def test_the_longest_prompt_allowed_is_kept(tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_dir))
    length = len(encode_prompt(tokenizer, chat("a", "2")))
    assert len(build_prompts([chat("a", "2")], tokenizer, DataPlan(files=("x",), prompt_length=length))[0]) == 1
    with pytest.raises(DataError):
        build_prompts([chat("a", "2")], tokenizer, DataPlan(files=("x",), prompt_length=length - 1))
