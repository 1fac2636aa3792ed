"""Parts that a chat template drops are detected; moved, trimmed or escaped parts are accepted."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_templates import GEMMA, LLAMA3, MISTRAL, QWEN2_5, QWEN3, R1
from data_assets import write

from roll_opd.config.plan import DataPlan
from roll_opd.data.dataset import open_prompts
from roll_opd.data.row_formats import DataError
from roll_opd.data.templates import load_tokenizer
from roll_opd.extras.trinity.workflows.single_turn import SimpleWorkflow
from roll_opd.workflows.workflow_interface import FormatConfig, Task

STUDENT = str(Path(__file__).parents[2] / "examples" / "demo" / "models" / "student")
SYSTEM, ASK, ANSWER = (
    {"role": "system", "content": 'You add numbers.\nBe brief, and say "so".'},
    {"role": "user", "content": "  1+2=\n"},
    {"role": "assistant", "content": "3"},
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <two> numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
RESULT = {"role": "tool", "content": '{"sum": "3"}', "name": "add"}
THOUGHT = {"role": "assistant", "content": "<think>\none and two\n</think>\n\n3"}


def read(
    tmp_path: Path, jinja: str, row: dict[str, Any], schema: str = "experience", **plan: Any
) -> tuple[str, list[str], tuple[str, ...]]:
    """Return the prompt, the answers and the warnings of one row."""
    tokenizer = load_tokenizer(STUDENT)
    tokenizer.chat_template = jinja
    file = write(tmp_path / "rows.jsonl", row)
    prompts, report = open_prompts(DataPlan((str(file),), 4096, schema=schema, **plan), tokenizer)
    (prompt,) = prompts.all()
    return tokenizer.decode(prompt.tokens), [tokenizer.decode(a) for a in prompt.answers], report.warnings


EACH = "{%% for m in messages %%}{{ %s }}{%% endfor %%}"
WRITTEN = {
    "qwen2.5": (QWEN2_5, [SYSTEM, ASK], {}),
    "qwen2.5, turns": (QWEN2_5, [SYSTEM, ASK, ANSWER, SYSTEM, ASK], {}),
    "qwen2.5, tools": (QWEN2_5, [ASK, CALL, RESULT, ANSWER, ASK], {"tools": [ADD]}),
    "qwen2.5, functions": (QWEN2_5, [ASK], {"functions": json.dumps([ADD["function"]])}),
    "qwen3": (QWEN3, [SYSTEM, ASK, THOUGHT, ASK, THOUGHT, ASK], {}),
    "llama3": (LLAMA3, [SYSTEM, ASK, ANSWER, ASK], {}),
    "llama3, tools": (LLAMA3, [SYSTEM, ASK, CALL, RESULT], {"tools": json.dumps([ADD])}),
    "r1": (R1, [SYSTEM, ASK, THOUGHT, ASK], {}),
    "r1, calls": (R1, [ASK, CALL, RESULT, THOUGHT, ASK], {}),
    "gemma": (GEMMA, [SYSTEM, ASK, ANSWER, ASK], {}),
    "mistral": (MISTRAL, [SYSTEM, ASK, ANSWER, ASK], {}),
    "lower case": (EACH % "m.content | lower", [SYSTEM, ASK], {}),
    "escaped": ("{{ messages | tojson }}", [SYSTEM, {"role": "user", "content": 'say "ß\\n"'}, ANSWER, ASK], {}),
    "html": (EACH % "m.content | e", [{"role": "user", "content": "is 1 < 2 & so?"}], {}),
    "switch": (EACH % "m.content.replace('/no_think', '')", [{"role": "system", "content": "/no_think"}, ASK], {}),
    "blank turn": (QWEN2_5, [{"role": "system", "content": ""}, ASK], {}),
    "own role": (EACH % "m.content if m.role == 'narrator'", [{"role": "narrator", "content": "Once"}], {}),
}  # fmt: skip


@pytest.mark.parametrize("case", WRITTEN)
def test_complete_renderings_are_accepted(tmp_path: Path, case: str) -> None:
    template, messages, columns = WRITTEN[case]
    text, _, warnings = read(tmp_path, template, {"messages": messages, **columns})
    assert warnings == ()
    if "call" in case or "tools" in case:
        assert "add" in text and '"a": 1' in text
    if columns:
        assert "Adds <two> numbers." in text


LOST = {
    "unknown role": (QWEN2_5, [{"role": "narrator", "content": "x"}, ASK], {}, r"role 'narrator'.*write one of system"),
    "result": (QWEN2_5, [{"role": "observation", "content": "x"}, ASK], {}, r"role 'observation'.*write tool"),
    "tool's role": (QWEN3, [ASK, RESULT], {}, "message of role 'tool'"),
    "system, twice": (R1, [SYSTEM, {"role": "system", "content": "3"}, ASK], {}, "message of role 'system'"),
    "a short text": (QWEN3, [ASK, {"role": "tool", "content": "1"}], {}, "message of role 'tool'"),
    "first question": ("{{ messages[-1].content }}", [ASK, ANSWER, {"role": "user", "content": "2"}], {}, "'user'"),
    "tools": (QWEN3, [ASK], {"tools": [ADD]}, "the tool 'add'"),
    "second tool": (QWEN2_5.replace("in tools", "in tools[:1]"), [ASK], {"tools": [ADD, ADD]}, "the tool 'add'"),
    "call": (QWEN3, [ASK, CALL, ASK], {}, "the tool call 'add'"),
    "by its text": (EACH % "m.content.split('.')[-1]", [SYSTEM | {"content": "Long. x"}, ASK], {}, "'system'"),
    "not in base": (QWEN2_5, [ASK], {"tools": [ADD], "template": "base"}, "the tool 'add'"),
}  # fmt: skip


@pytest.mark.parametrize("case", LOST)
def test_dropped_parts_make_a_row_bad(tmp_path: Path, case: str) -> None:
    template, messages, columns, said = LOST[case]
    columns = dict(columns)
    plan = {"template": columns.pop("template")} if "template" in columns else {}
    with pytest.raises(DataError, match=rf"rows\.jsonl:1 \(row rows:1: the chat template .*{said}"):
        read(tmp_path, template, {"messages": messages, **columns}, **plan)
    with pytest.raises(DataError, match="no usable row"):
        read(tmp_path, template, {"messages": messages, **columns}, on_bad_row="drop", **plan)


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (QWEN3, THOUGHT),
        (QWEN3, {**ANSWER, "reasoning_content": "one and two"}),
        (QWEN2_5, THOUGHT),
        (LLAMA3, THOUGHT),
        (R1, {"role": "assistant", "content": "<think>\n\n</think>3"}),
    ],
    ids=["qwen3", "apart", "qwen2.5", "llama3", "none"],
)
def test_an_answer_is_learned_with_its_thoughts(tmp_path: Path, template: str, answer: dict) -> None:
    _, (text,), warnings = read(tmp_path, template, {"messages": [ASK, answer]}, "sft")
    assert "3" in text and warnings == ()
    assert ("one and two" in text) == (template != R1)


@pytest.mark.parametrize(
    ("template", "answer", "said"),
    [
        (R1, THOUGHT, "thoughts of the answer"),
        (R1, {"role": "assistant", "content": "<think>3</think>3"}, "thoughts of the answer"),
        (R1, {"role": "assistant", "content": "1+2=3, so</think>3"}, "thoughts of the answer"),
        (QWEN2_5, {**ANSWER, "reasoning_content": "one and two"}, "thoughts of the answer"),
        (LLAMA3, {**ANSWER, "thinking": "one and two"}, "thoughts of the answer"),
        (QWEN3, CALL, "tool call 'add'"),
        (LLAMA3, {**CALL, "content": "I will add them up."}, "text of the answer"),
    ],
)
def test_answers_with_dropped_parts_are_bad(tmp_path: Path, template: str, answer: dict, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read(tmp_path, template, {"messages": [ASK, answer]}, "sft")
    pair = {"prompt": [ASK], "chosen": [answer], "rejected": "4"}
    with pytest.raises(DataError, match=said):
        read(tmp_path, template, pair, "dpo")


def test_an_answer_that_is_a_call_is_learned(tmp_path: Path) -> None:
    for template in (QWEN2_5, LLAMA3):
        _, (text,), _ = read(tmp_path, template, {"messages": [ASK, CALL], "tools": [ADD]}, "sft")
        assert '"name": "add"' in text and '{"a": 1}' in text
    with pytest.raises(DataError, match="tool call 'add'"):
        read(tmp_path, QWEN2_5, {"prompt": "1+2=", "completion": [CALL]}, "sft")


def test_dropped_text_of_a_tool_call_turn_and_tools_with_a_plain_prompt_are_warned_of(tmp_path: Path) -> None:
    beside = {**CALL, "content": "I will add them up."}
    _, _, (warning,) = read(tmp_path, LLAMA3, {"messages": [ASK, beside, RESULT]})
    assert warning.startswith("1 row has `text next to a tool call`, which is ignored;")
    _, _, (warning,) = read(tmp_path, LLAMA3, {"prompt": "1+2=", "tools": [ADD]})
    assert warning.startswith("1 row has `tools`, which is ignored;")
    assert read(tmp_path, LLAMA3, {"prompt": "call add: 1+2=", "tools": [ADD]})[2] == ()


def test_a_workflow_of_the_package_asks_the_whole_row() -> None:
    tokenizer = load_tokenizer(STUDENT)
    tokenizer.chat_template = QWEN2_5
    for messages, system, said in (
        ([SYSTEM, ASK], None, None),
        ([{"role": "human", "content": "1+2="}], "Be brief.", None),
        ([{"role": "narrator", "content": "1"}, ASK], None, "role 'narrator'.*write one of"),
    ):
        config = FormatConfig(prompt_key="messages", system_prompt=system)
        task = Task(raw_task={"messages": messages}, format_args=config)
        workflow = SimpleWorkflow(task=task, model=SimpleNamespace(tokenizer=tokenizer))
        if said is None:
            assert [message["role"] for message in workflow.format_messages()][-1] == "user"
            continue
        with pytest.raises(ValueError, match=said):
            workflow.format_messages()
    tokenizer.chat_template = EACH % "m.content if m.role == 'user'"
    with pytest.raises(ValueError, match="message of role 'system'"):
        SimpleWorkflow(
            task=Task(raw_task={"prompt": "1+2="}, format_args=FormatConfig(system_prompt="Be brief.")),
            model=SimpleNamespace(tokenizer=tokenizer),
        ).format_messages()


def test_variables_of_a_row_reach_the_template(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{{ 'fast' if enable_thinking is defined and not enable_thinking }}"
    for value in ({"enable_thinking": False}, '{"enable_thinking": false}'):
        row = {"messages": [ASK], "chat_template_kwargs": value}
        assert read(tmp_path, template, row)[0].endswith("fast")
        assert read(tmp_path, template, row, template="qwen3")[0].endswith("fast")  # the row's own go before
    with pytest.raises(DataError, match="chat_template_kwargs"):
        read(tmp_path, template, {"messages": [ASK], "chat_template_kwargs": {"tokenize": True}})
