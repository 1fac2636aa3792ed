"""Prompts of a session's `sample` call are read like rows of the configuration's files."""

from typing import Any

import pytest

from roll_opd.config.plan import DataPlan
from roll_opd.data.supervised_rows import parse_answered
from roll_opd.pipelines.session_arguments import row_of

ASK, SYSTEM = {"role": "user", "content": "2+2="}, {"role": "system", "content": "Be brief."}


def test_a_prompt_is_read_as_a_row_of_the_files() -> None:
    for system_prompt in (None, "Answer with a number."):
        data = DataPlan(files=(), prompt_length=8, system_prompt=system_prompt)
        for messages in ([ASK], [SYSTEM, ASK], [ASK, {"role": "assistant", "content": "4"}, ASK]):
            assert row_of(messages, "0", data) == parse_answered({"messages": messages}, "0", data)
    assert row_of("2+2=", "0", DataPlan(files=(), prompt_length=8)).prompt == "2+2="
    bad: tuple[Any, ...] = ("2+2=", [{"role": "user"}], [SYSTEM | {"content": 3}])
    for prompt in bad:  # a text cannot have the system prompt
        with pytest.raises(ValueError, match="sample: prompt"):
            row_of(prompt, "0", data)
