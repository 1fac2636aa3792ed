"""Which columns of a row a data set needs, and which of them hold something that is not read."""

from collections import Counter
from collections.abc import Sequence

from roll_opd.data.answers import COLUMN_KEYS, HISTORY, SCHEMAS
from roll_opd.data.marks import MARKS, SPANS
from roll_opd.data.report import FileReport
from roll_opd.data.rows import OF_PROMPTS
from roll_opd.data.teacher_prompts import names_in
from roll_opd.data.written import BESIDE_CALLS
from roll_opd.plan import DataPlan

# what makes and routes a prompt, whatever the schema
_USUAL = ("id", "tag", "domain", "messages", "conversations", "system", "prompt", "ground_truth", *OF_PROMPTS)
# what is left out of a row -> why, and what to do
_LEFT_OUT = {
    "system": "write it as the first message",
    HISTORY: "write the turns as `messages`",
    "tools": "they are read as a list of objects with a name, as OpenAI writes them, beside `messages`",
    BESIDE_CALLS: "the chat template writes the calls of such a turn alone",
    "functions": "they are read as a list of objects with a name, as OpenAI writes them",
    **dict.fromkeys(MARKS, "0 and 1, true and false are read, for a row or a turn"),
    **dict.fromkeys(SPANS, "a turn is learned as a whole or, with `weight: 0`, not at all"),
}


def columns_needed(plan: DataPlan) -> frozenset[str] | None:
    """Return the columns from which `plan` makes tokens, ids, tags and ground truths; None for all.

    A row that is read with these alone and one that is read whole give the same prompt. A workflow's row is its
    task, and any column of it may be read.
    """
    if plan.schema == "task":
        return None
    of_schema = (*SCHEMAS[plan.schema].columns, *MARKS, *SPANS, HISTORY) if plan.schema in SCHEMAS else ()
    hints = (text for context in plan.contexts for text in (context.hint, context.system_prompt) if text)
    named = (name for text in hints for name in names_in(text))
    return frozenset((*_USUAL, *of_schema, *named, *plan.columns.values()))


def unread_warnings(files: Sequence[FileReport], schema: str) -> tuple[str, ...]:
    """Return a warning for each column or key that is left out, with the rows of `files` and what to do."""
    counts = sum((file.unread for file in files), Counter())
    warnings = []
    for name, count in counts.items():
        first, *others = (file.path for file in files if file.unread[name])
        where = f"{first} and {len(others)} more files" if others else first
        having = "row has" if count == 1 else "rows have"
        warnings.append(f"{count} {having} `{name}`, which is left out; {_remedy(name, schema)} ({where})")
    return tuple(warnings)


def _remedy(name: str, schema: str) -> str:
    if schema not in SCHEMAS or name not in COLUMN_KEYS:
        return _LEFT_OUT.get(name, "the chat template does not write it")
    return f"{COLUMN_KEYS[name]}: {name} adds it" if SCHEMAS[schema].has_prompt_keys else "write it in `instruction`"
