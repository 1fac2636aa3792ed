"""The settings table of the model card. It has the settings of each part of a run, but no settings of the machine."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from roll_opd.extras.cards.origin import cached, model_name
from roll_opd.pipelines.settings_history import CONTENT, RunPart, differences, renamed, text_of

# keys on every card, if they are set; the card adds keys that differ between two parts of the run
ALWAYS = (
    r"(?!critic\.).+\.training_args\.(learning_rate|lr_scheduler_type|warmup_steps|weight_decay)",
    r"critic\.training_args\.learning_rate",
    r".*opd_kl_coef",
    r"(?!validation\.).+\.generating_args\.temperature",
    *("rollout_batch_size", "num_return_sequences_in_group", "response_length", "max_steps"),
    *(r"custom_envs\.[^.]+\.(env_type|max_steps|max_tokens_per_step)", r"train_env_manager\.group_size"),
    *("sequence_length", r"(student|actor)_infer\.generating_args\.max_new_tokens"),  # of environments
)
# keys that depend on the machine
PRIVATE = re.compile(
    r".*(system_envs\.|plugin_dir|endpoint_|base_url|address|host|device_mapping|num_gpus_per_node|num_nodes|_path\b)"
    r".*"
)
MAX_ROWS = 60


def settings_table(parts: Sequence[RunPart]) -> str:
    """Return the table of settings as Markdown, or "" if the table would have no rows.

    The table has a column for each part of the run. It has a row for each setting in `ALWAYS`, and for each setting
    that changed between two parts.
    """
    known = [part.settings for part in parts if part.settings is not None]
    if not known:
        return ""
    parts = [
        part if part.settings is None else replace(part, settings=renamed(part.settings, known[-1])) for part in parts
    ]
    known = [part.settings for part in parts if part.settings is not None]
    keys = [key for key in known[-1] if any(re.fullmatch(pattern, key) for pattern in ALWAYS)]
    for before, now in pairwise(known):
        keys += differences(before, now)
    rows = [row for key in dict.fromkeys(keys) if (row := _row(key, parts))]
    if not rows:
        return ""
    left_out = [f"| and {len(rows) - MAX_ROWS} more |" + " |" * len(parts)] if len(rows) > MAX_ROWS else []
    head = ["", *(steps_text(part.first, part.last) for part in parts)]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows[:MAX_ROWS], *left_out])


def steps_text(first: int, last: int | None) -> str:
    """Return a range of consecutive steps as text."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _row(key: str, parts: Sequence[RunPart]) -> str | None:
    cells = ["unknown" if part.settings is None else _cell(key, part.settings.get(key)) for part in parts]
    if not any(cell for cell in cells if cell != "unknown"):
        return None
    return " | ".join([f"| `{key}`", *(cell or "–" for cell in cells)]) + " |"


def _cell(key: str, value: Any) -> str:
    """Return a value as text for the model card. Private and missing values give an empty text."""
    model = key.endswith("model_name_or_path")
    if value is None or (PRIVATE.fullmatch(key) and not model and CONTENT not in key):
        return ""
    items = [public(item) for item in (value if isinstance(value, list) else [value])]
    return ", ".join(items).replace("|", "\\|")


def public(value: Any) -> str:
    """Return a value as text that may be published.

    A path is replaced by its hub name or by its last part. An address is replaced by a placeholder.
    """
    if isinstance(value, str):
        if "://" in value:
            return "an address"
        if "/" in value or "\\" in value or value.startswith("~"):
            value = cached(value, "datasets") or model_name(value)
    return text_of(value)
