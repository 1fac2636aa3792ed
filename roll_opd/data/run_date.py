"""Start date of a run, for chat templates that write the date (`strftime_now`).

It is the same past midnight, in every process that renders prompts, and after a resume on another day.
"""

import os
from datetime import datetime
from functools import partial
from typing import Any

VARIABLE = "ROLL_OPD_RUN_BEGAN"  # environment variable of the rendering processes: local time in ISO 8601


def set_date(moment: datetime) -> None:
    """Set the run's date to `moment`, in this process and in processes that inherit its environment."""
    os.environ[VARIABLE] = moment.isoformat()


def variables() -> dict[str, str]:
    """Return the environment variables that carry the run's date to another process."""
    return {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}


def writes_date(tokenizer: Any) -> bool:
    """Whether a chat template of `tokenizer` writes the date."""
    return "strftime_now" in str(getattr(tokenizer, "chat_template", None))


def with_date(tokenizer: Any, moment: datetime | None = None) -> Any:
    """Return `tokenizer` with `moment` as its chat template's date; default: the run's date, else now."""
    if writes_date(tokenizer):
        moment = moment or (datetime.fromisoformat(os.environ[VARIABLE]) if VARIABLE in os.environ else datetime.now())
        tokenizer.apply_chat_template = partial(
            tokenizer.apply_chat_template, strftime_now=partial(datetime.strftime, moment)
        )
    return tokenizer
