"""The date and time at which a run began, for chat templates that write it (`strftime_now`).

A run has one date: over midnight, in every process that renders, and where it is resumed on another day.
"""

import os
from datetime import datetime
from functools import partial
from typing import Any

BEGAN = "ROLL_OPD_RUN_BEGAN"  # in the environment of the processes that render: local time, as ISO 8601 writes it


def set_date(moment: datetime) -> None:
    """Make `moment` the date of this process's run, and of the processes that inherit its environment."""
    os.environ[BEGAN] = moment.isoformat()


def variables() -> dict[str, str]:
    """Return the environment that gives another process the run's date."""
    return {BEGAN: os.environ[BEGAN]} if BEGAN in os.environ else {}


def writes_date(tokenizer: Any) -> bool:
    """Whether a chat template of `tokenizer` asks for the date."""
    return "strftime_now" in str(getattr(tokenizer, "chat_template", None))


def with_date(tokenizer: Any, moment: datetime | None = None) -> Any:
    """Return `tokenizer` with a chat template that reads `moment` as the date; by default the run's, or else now."""
    if writes_date(tokenizer):
        moment = moment or (datetime.fromisoformat(os.environ[BEGAN]) if BEGAN in os.environ else datetime.now())
        tokenizer.apply_chat_template = partial(
            tokenizer.apply_chat_template, strftime_now=partial(datetime.strftime, moment)
        )
    return tokenizer
