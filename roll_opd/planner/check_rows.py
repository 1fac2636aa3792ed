"""Checks of the first rows of the data sets: rows that a run would refuse, and prompts that no template renders."""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from roll_opd.config.plan import DataPlan, RunPlan
from roll_opd.data.answers import parse_answered
from roll_opd.data.data_report import NOT_LEARNED
from roll_opd.data.dataset import columns_needed
from roll_opd.data.files import open_file
from roll_opd.data.rows import BadRow, DataError, Row
from roll_opd.data.teacher_files import SCHEMA
from roll_opd.models.tokenizer_files import has_chat_template

ROWS_SEEN = 64  # rows read from each file
Rows = Mapping[str, Sequence[Row | str]]  # section -> its first rows; a text is the reason why a row cannot be used


def data_sets(plan: RunPlan) -> dict[str, DataPlan]:
    """Return the data sets of rows that a run reads, as a map: section -> data set."""
    found = {f"{plan.student.name}.data_args": plan.data}
    found |= {"validation.data_args": plan.validation.data} if plan.validation else {}
    found |= {"demonstrations.data_args": plan.demonstrations.data} if plan.demonstrations else {}
    return {key: data for key, data in found.items() if data.files and data.schema != SCHEMA}


def first_rows(plan: RunPlan) -> Rows:
    """Return the first rows of each data set. Rows that are left out on purpose are left out here too."""
    return {key: _first_rows(data) for key, data in data_sets(plan).items()}


def _first_rows(data: DataPlan) -> list[Row | str]:
    found: list[Row | str] = []
    for name in data.files:
        try:
            rows = open_file(name, columns_needed(data)).scan()
            for line, _, value in islice(rows, min(ROWS_SEEN, data.limit or ROWS_SEEN)):
                try:
                    found.append(parse_answered(value, f"{name}:{line}", data))
                except BadRow as bad:
                    if bad.kind != NOT_LEARNED:
                        found.append(f"{name}:{line}: {': '.join(filter(None, (bad.kind, bad.detail)))}")
        except (DataError, OSError) as error:
            found.append(str(error))
    return found


def unusable_rows(plan: RunPlan, rows: Rows) -> list[str]:
    """Return a problem for each data set that a run would refuse because of its first rows."""
    problems = []
    for key, data in data_sets(plan).items():
        bad = [row for row in rows[key] if isinstance(row, str)]
        if bad and (data.on_bad_row == "refuse" or len(bad) == len(rows[key])):
            first = f"{len(bad)} of the first {len(rows[key])} rows cannot be used, such as {bad[0]}"
            problems.append(f"{key}.file_name: {first}; correct the rows, or name their columns in {key}")
    return problems


def plain_prompts(plan: RunPlan, rows: Rows) -> list[str]:
    """Return a warning if prompts are plain texts although the student's tokenizer has a chat template."""
    if plan.workflow or not has_chat_template(Path(plan.student.model.path)):
        return []
    plain = [key for key, some in rows.items() if any(isinstance(row, Row) and row.prompt is not None for row in some)]
    if not plain:
        return []
    return [
        f"{' and '.join(plain)}: prompts that are plain texts are read without the student's chat template; write them"
        " as messages to use it"
    ]
