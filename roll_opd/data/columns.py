"""Columns of a data set: columns a run reads, and warnings for non-empty columns it ignores."""

from collections import Counter
from collections.abc import Sequence

from roll_opd.config.plan import DataPlan
from roll_opd.data.answers import COLUMN_KEYS, HISTORY, SCHEMAS
from roll_opd.data.data_report import FileReport
from roll_opd.data.loss_marks import MARKS, SPANS
from roll_opd.data.rows import PROMPT_COLUMNS
from roll_opd.data.teacher_prompts import names_in
from roll_opd.data.template_check import TEXT_WITH_CALLS

# columns that make and route a prompt, in every schema
_USUAL = ("id", "tag", "domain", "messages", "conversations", "system", "prompt", "ground_truth", *PROMPT_COLUMNS)
# ignored column or key -> what to do
_LEFT_OUT = {
    "system": "write it as the first message",
    HISTORY: "write the turns as `messages`",
    "tools": "write a list of objects with a name, in OpenAI's form, together with `messages`",
    TEXT_WITH_CALLS: "the chat template renders only the calls of such a turn",
    "functions": "write a list of objects with a name, in OpenAI's form",
    **dict.fromkeys(MARKS, "only 0 and 1, true and false are read, for a row or a turn"),
    **dict.fromkeys(SPANS, "a turn is learned as a whole, or excluded with `weight: 0`"),
}


def columns_needed(plan: DataPlan) -> frozenset[str] | None:
    """Return the columns from which `plan` makes tokens, ids, tags and ground truths; None for all.

    Other columns do not change the prompt. A workflow may read any column of its task.
    """
    if plan.schema == "task":
        return None
    of_schema = (*SCHEMAS[plan.schema].columns, *MARKS, *SPANS, HISTORY) if plan.schema in SCHEMAS else ()
    hints = (text for context in plan.contexts for text in (context.hint, context.system_prompt) if text)
    named = (name for text in hints for name in names_in(text))
    return frozenset((*_USUAL, *of_schema, *named, *plan.columns.values()))


def unread_warnings(files: Sequence[FileReport], schema: str) -> tuple[str, ...]:
    """Return a warning for each ignored column or key: number of rows, remedy, files."""
    counts = sum((file.unread for file in files), Counter())
    warnings = []
    for name, count in counts.items():
        first, *others = (file.path for file in files if file.unread[name])
        where = f"{first} and {len(others)} more files" if others else first
        having = "row has" if count == 1 else "rows have"
        warnings.append(f"{count} {having} `{name}`, which is ignored; {_remedy(name, schema)} ({where})")
    return tuple(warnings)


def _remedy(name: str, schema: str) -> str:
    if schema not in SCHEMAS or name not in COLUMN_KEYS:
        return _LEFT_OUT.get(name, "the chat template does not render it")
    return f"{COLUMN_KEYS[name]}: {name} adds it" if SCHEMAS[schema].has_prompt_keys else "write it in `instruction`"
