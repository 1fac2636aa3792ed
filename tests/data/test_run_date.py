"""The start date of a run in chat templates: after midnight, in other processes, in copies of the tokenizer."""

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest
import transformers.utils.chat_template_utils as rendering
from data_assets import write

from roll_opd.config.plan import ContextPlan, DataPlan
from roll_opd.data import templates
from roll_opd.data.dataset import open_prompts
from roll_opd.data.row_formats import DataError
from roll_opd.data.templates import load_tokenizer

MOMENT = datetime(2026, 2, 28, 23, 59, 58)
ASK = [{"role": "user", "content": "a"}]
FORMATS = {"%d %b %Y": "28 Feb 2026", "%Y-%m-%dT%H:%M:%S": "2026-02-28T23:59:58", "%A %j": "Saturday 059"}
# Llama 3.2's, which looks whether there is a date, and Granite's
LLAMA = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}{%- set date_string ="
    " strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}"
    "{{ date_string }}"
)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(templates.VARIABLE, MOMENT.isoformat())


@pytest.fixture
def model(tokenizer_dir: Path, tmp_path: Path) -> Callable[[str | dict], str]:
    def with_template(template: str | dict) -> str:
        for file in tokenizer_dir.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        tokenizer = load_tokenizer(str(tmp_path))
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path)
        return str(tmp_path)

    return with_template


@pytest.fixture
def another_day(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the clock that chat templates would read to another year."""

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return datetime(2031, 1, 1)

    monkeypatch.setattr(rendering, "datetime", Later)
    yield


@pytest.mark.parametrize("asked", FORMATS)
def test_every_format_of_the_date(model: Callable, another_day: None, asked: str) -> None:
    tokenizer = load_tokenizer(model(f"{{{{ strftime_now('{asked}') }}}}"))
    for each in (tokenizer, copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert each.apply_chat_template(ASK, tokenize=False) == FORMATS[asked]


def test_the_templates_that_ask_whether_there_is_a_date(model: Callable, another_day: None) -> None:
    path = model(LLAMA)
    assert load_tokenizer(path).apply_chat_template(ASK, tokenize=False) == "28 Feb 2026"
    assert load_tokenizer(path).apply_chat_template(ASK, tokenize=False, date_string="then") == "then"


def test_a_named_template_reads_the_date_of_the_run(model: Callable, another_day: None) -> None:
    path = model({"default": "none", "tool_use": "{{ strftime_now('%Y') }}"})
    assert load_tokenizer(path).apply_chat_template(ASK, chat_template="tool_use", tokenize=False) == "2026"


def test_without_a_run_the_date_is_that_of_loading(
    model: Callable, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.delenv(templates.VARIABLE)
    assert templates.variables() == {}
    path = model("{{ strftime_now('%Y') }}")
    tokenizer, year = load_tokenizer(path), f"{datetime.now():%Y}"
    request.getfixturevalue("another_day")
    assert tokenizer.apply_chat_template(ASK, tokenize=False) == year


def test_another_process_has_the_same_date(model: Callable) -> None:
    path = model("{{ strftime_now('%d %b %Y') }}")
    templates.set_date(datetime(2025, 12, 24, 1, 2, 3))
    program = (
        "from roll_opd.data.templates import load_tokenizer; import sys;"
        f"print(load_tokenizer(sys.argv[1]).apply_chat_template({ASK!r}, tokenize=False))"
    )
    variables = {**os.environ, "TZ": "Etc/GMT-14", **templates.variables()}
    done = subprocess.run([sys.executable, "-c", program, path], env=variables, capture_output=True, text=True)
    assert done.stdout.strip() == "24 Dec 2025", done.stderr


def test_prompts_of_rows_and_teachers_keep_the_date_past_midnight(
    model: Callable, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = model("{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}")
    file = write(tmp_path / "rows.jsonl", *({"messages": ASK, "id": str(number)} for number in range(3)))
    context = ContextPlan(name="t", key="teacher", prompt_length=64, hint="look", tokenizer=path)
    tokenizer = load_tokenizer(path)
    prompts, _ = open_prompts(DataPlan(files=(str(file),), prompt_length=64, contexts=(context,)), tokenizer)
    request.getfixturevalue("another_day")
    for prompt in prompts.all():
        assert tokenizer.decode(prompt.tokens) == "28 Feb 2026a"
        assert tokenizer.decode(prompt.teacher_prompts["t"]) == "28 Feb 2026a\n\nlook"


def test_a_template_that_draws_at_random_is_refused(model: Callable, tmp_path: Path) -> None:
    path = model("{{ ['x', 'y'] | random }}{% for m in messages %}{{ m.content }}{% endfor %}")
    file = write(tmp_path / "rows.jsonl", *({"messages": ASK} for _ in range(20)))
    with pytest.raises(DataError, match=rf"{file}:\d+: the chat template renders the same row differently"):
        open_prompts(DataPlan(files=(str(file),), prompt_length=64), load_tokenizer(path))
