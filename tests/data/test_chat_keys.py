"""`system_prompt`, `chat_template_kwargs` and the column of the ground truth, in every kind of row and for teachers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from data_assets import write

from roll_opd.config.plan import ContextPlan, DataPlan
from roll_opd.data import templates
from roll_opd.data.dataset import open_prompts
from roll_opd.data.row_formats import DataError
from roll_opd.data.templates import load_plain_tokenizer, load_tokenizer

CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{% if mood is defined %}({{ mood }}){% endif %}"
)
ASK, REPLY, OWN = (
    {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("system", "c"))
)
OPENS = "[system]be brief[user]a[assistant](calm)"


@pytest.fixture
def path(tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tokenizer whose chat template reads a variable, in a run that sets this variable."""
    monkeypatch.setenv(templates.CHAT, "{}")  # restored at the end of the test
    tokenizer = load_plain_tokenizer(str(tokenizer_dir))
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path / "model")
    templates.set_chat_variables({"mood": "calm"})
    return str(tmp_path / "model")


def test_every_kind_of_row_has_the_system_prompt_and_the_variables(path: str, tmp_path: Path) -> None:
    tokenizer, teacher = load_tokenizer(path), ContextPlan(name="t", key="teacher", prompt_length=64, hint="look")
    rows = {
        "experience": {"messages": [ASK], "truth": "b"},
        "sft": {"messages": [ASK, REPLY]},
        "dpo": {"messages": [ASK], "chosen": "b", "rejected": "c"},
    }
    for schema, row in rows.items():
        plan = DataPlan((str(write(tmp_path / f"{schema}.jsonl", row)),), 128, schema=schema, system_prompt="be brief")
        plan = DataPlan(**{**vars(plan), "columns": {"ground_truth": "truth"}, "contexts": (teacher,)})
        if schema != "experience":  # the variable follows the answer as well, so that the prompt is no prefix
            templates.set_chat_variables({})
            tokenizer = load_tokenizer(path)
        (prompt,) = open_prompts(plan, tokenizer)[0].all()
        expected = OPENS if schema == "experience" else OPENS.removesuffix("(calm)")
        assert tokenizer.decode(prompt.tokens) == expected
        assert tokenizer.decode(prompt.teacher_prompts["t"]) == expected.replace("[user]a", "[user]a\n\nlook")
        assert prompt.ground_truth == ("b" if schema == "experience" else None)


def test_a_row_takes_precedence(path: str, tmp_path: Path) -> None:
    row = {"messages": [OWN, ASK], "chat_template_kwargs": {"mood": "wild"}}
    plan = DataPlan((str(write(tmp_path / "rows.jsonl", row)),), 128, system_prompt="be brief")
    tokenizer = load_tokenizer(path)
    (prompt,) = open_prompts(plan, tokenizer)[0].all()
    assert tokenizer.decode(prompt.tokens) == "[system]c[user]a[assistant](wild)"


def test_a_plain_prompt_with_a_system_prompt_is_refused(path: str, tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", {"prompt": "a"})
    with pytest.raises(DataError, match="system_prompt"):
        open_prompts(DataPlan((str(file),), 128, system_prompt="be brief"), load_tokenizer(path))


def test_other_processes_and_other_models(path: str) -> None:
    """Processes of the run get the variables; models of others, such as a judge, do not."""
    program = (
        "from roll_opd.data.templates import load_tokenizer; import sys, json;"
        "print(load_tokenizer(sys.argv[1]).apply_chat_template(json.loads(sys.argv[2]), tokenize=False))"
    )
    environment = {**os.environ, **templates.variables()}
    arguments = [sys.executable, "-c", program, path, json.dumps([ASK])]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "[user]a(calm)", done.stderr
    assert load_plain_tokenizer(path).apply_chat_template([ASK], tokenize=False) == "[user]a"
