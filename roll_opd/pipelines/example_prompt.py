"""The example prompt of the script that a run prints at its end."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from roll_opd.config.plan import DataPlan, RunPlan
from roll_opd.data.answers import parse_answered
from roll_opd.data.dataset import columns_needed
from roll_opd.data.files import open_file
from roll_opd.data.rows import BadRow, DataError, parse_messages

NEUTRAL = "Hello"
ROWS_TRIED = 20


def example_prompt(plan: RunPlan) -> str:
    """Return an example prompt: the user text of the first held-out row, if there is one.

    Otherwise the user text of the first training row is returned, or `NEUTRAL` if no row can be read.
    """
    held_out = [plan.validation.data] if plan.validation else []
    key = plan.workflow.prompt_key if plan.workflow else "prompt"
    return next((text for data in (*held_out, plan.data) for text in _texts(data, key)), NEUTRAL)


def _texts(data: DataPlan, key: str) -> Iterator[str]:
    """Yield the user texts of the first rows of a data set. A file that cannot be read gives no texts."""
    if data.schema == "scored":  # teacher files have tokens instead of text
        return
    try:
        for file in data.files[:1]:
            for line, _, value in itertools.islice(open_file(file, columns_needed(data)).scan(), ROWS_TRIED):
                try:
                    row = parse_answered(value, str(line), data)
                    given = row.extra.get(key) or row.extra.get("messages") if data.schema == "task" else row.prompt
                    text = given if isinstance(given, str) and key != "messages" else _of_user(row.messages or given)
                except BadRow:
                    continue
                if text.strip():
                    yield text
    except (OSError, DataError):
        return


def _of_user(messages: Any) -> str:
    turns: Sequence[Mapping[str, Any]] = parse_messages(messages)
    return next((turn["content"] for turn in turns if turn["role"] == "user"), "")
