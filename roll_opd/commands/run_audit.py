"""`roll-opd audit`: compare the files of a run with each other, and with the data files."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from roll_opd.base.command_line import DONE, FAILED, USER_ERROR
from roll_opd.base.failures import ConfigError, os_sentence
from roll_opd.tracking.audit import examine
from roll_opd.tracking.audit_records import Evidence

MAX_ERRORS = 50  # printed
MAX_DRAWS = 10_000  # whose prompts are read from the data files
CHUNK = 500  # prompts in memory


def run(place: Path, *, with_data: bool) -> int:
    """Print the result of an audit, and return the exit code."""
    try:
        found = examine(place, drawn_ids if with_data else None)
    except OSError as error:
        print(f"roll-opd: {os_sentence(error)}", file=sys.stderr)
        return USER_ERROR
    print(", ".join(f"{name}: {count}" for name, count in found.counts.items()))
    for title, lines in (("checked", found.checked), ("not checked", found.unchecked)):
        print(f"{title}:", *(lines or ["nothing"]), sep="\n  ")
    wrong = [*found.errors, *found.damaged]
    if wrong:
        more = [f"and {len(wrong) - MAX_ERRORS} more"] if len(wrong) > MAX_ERRORS else []
        print("wrong:", *wrong[:MAX_ERRORS], *more, sep="\n  ")
    elif found.counts["steps"]:
        print("no contradiction: each prompt is trained once, or filtered once, or failed once")
    else:
        print("no step is recorded")
    return FAILED if found.errors else USER_ERROR if found.damaged else DONE


def drawn_ids(found: Evidence, count: int) -> list[str] | str:
    """Return the ids of the first `count` prompts that the configuration draws.

    If the data is not that of the run, or if it cannot be opened, the reason is returned.
    """
    from roll_opd.data.row_formats import DataError
    from roll_opd.models.model_info import ModelFilesError

    saved: dict[str, Any] | None = next(iter(found.sources.values()), None)
    if saved is None or found.facts is None:
        return "the run has no checkpoint that names its data"
    try:
        with redirect_stdout(sys.stderr):
            source = _opened(found.run, found.facts)
        first = source.state_dict()
        source.load_state_dict(saved)  # raises DataError if it was saved with other data
        source.load_state_dict(first)
        count = min(count, MAX_DRAWS)
        sizes = [min(CHUNK, count - begin) for begin in range(0, count, CHUNK)]
        return [prompt.id for size in sizes for prompt in source.take(size)]
    except (ConfigError, DataError, ModelFilesError, OSError, ValueError, LookupError, TypeError) as error:
        return f"the data cannot be opened as the run did ({' '.join(str(error).split())[:300]})"


def _opened(run: Path, facts: Any) -> Any:
    """Open the prompts of the run's configuration, as the run did."""
    from roll_opd.data.templates import load_tokenizer
    from roll_opd.pipelines.start_checks import open_data
    from roll_opd.planner.load_plan import plan_of_run

    plan = plan_of_run(run, facts)
    return open_data(plan, load_tokenizer(plan.student.model.path))[0]
