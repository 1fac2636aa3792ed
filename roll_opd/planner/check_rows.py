"""Checks of the first rows of the data sets: rows that a run would refuse, and prompts that no template renders."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from roll_opd.config.plan import DataPlan, RunPlan
from roll_opd.data.answers import parse_answered
from roll_opd.data.data_checks import NOT_LEARNED
from roll_opd.data.dataset import columns_needed
from roll_opd.data.files import open_file
from roll_opd.data.rows import BadRow, DataError, Row
from roll_opd.data.teacher_files import SCHEMA
from roll_opd.models.tokenizer_files import has_chat_template

COLUMN_KEYS = ("messages", "prompt", "tag", "id", "ground_truth")  # keys of data_args that name a column
TRUTH_OF_TASK = ("ground_truth", "task")
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
    sets = data_sets(plan)
    for key, some in rows.items():
        bad = [row for row in some if isinstance(row, str)]
        if bad and (sets[key].on_bad_row == "refuse" or len(bad) == len(some)):
            first = f"{len(bad)} of the first {len(some)} rows cannot be used, such as {bad[0]}"
            problems.append(f"{key}.file_name: {first}; correct the rows, or name their columns in {key}")
    return problems


def absent_columns(plan: RunPlan) -> Mapping[str, Sequence[str]]:
    """Return the problems of each section that names a column that no row has, as a map: section -> problems.

    The names that a section takes from the training data are not checked again. If the first rows lack a column, all
    rows are read.
    """
    problems = {}
    for key, data in data_sets(plan).items():
        inherited = {} if data is plan.data else plan.data.columns
        named = {name: column for name, column in data.columns.items() if column and inherited.get(name) != column}
        # a workflow has other keys for the ground truth
        wanted = {name: named[name] for name in COLUMN_KEYS if name in named and (name, data.schema) != TRUTH_OF_TASK}
        with suppress(DataError, OSError):  # stated as an unusable row
            if absent := _absent(data, frozenset(wanted.values())):
                first = {name for file in data.files for name in _first_columns(file)}
                problems[key] = [
                    f"{key}.{name}: no row has the column {column!r}; name one of {', '.join(sorted(first))}, or remove"
                    " the key"
                    for name, column in wanted.items()
                    if column in absent
                ]
    return problems


def _absent(data: DataPlan, columns: frozenset[str]) -> frozenset[str]:
    """Return those of `columns` that no row of the files has."""
    for name in data.files if columns else ():
        for _, _, value in open_file(name, columns_needed(data)).scan():
            columns -= value.keys() if isinstance(value, dict) else frozenset()
            if not columns:
                return columns
    return columns


def _first_columns(file: str) -> set[str]:
    rows = islice(open_file(file).scan(), ROWS_SEEN)
    return {name for _, _, value in rows if isinstance(value, dict) for name in value}


def plain_prompts(plan: RunPlan, rows: Rows) -> str:
    """Return a warning if prompts are plain texts although the student's tokenizer has a chat template, else ""."""
    if plan.workflow or not has_chat_template(Path(plan.student.model.path)):
        return ""
    plain = [key for key, some in rows.items() if any(isinstance(row, Row) and row.prompt is not None for row in some)]
    if not plain:
        return ""
    return (
        f"{' and '.join(plain)}: prompts that are plain texts are read without the student's chat template; write them"
        " as messages to use it"
    )
