"""The table of the peers, from the rows of their runs."""

from statistics import median
from typing import Any

Runs = list[dict[str, Any]]  # runs of one side, each with `rows` of `step`, `seconds`, `tokens`, `at` and `accuracy`
TARGET = 0.8  # accuracy
HEADINGS = {"trl": "TRL", "hf": "HF loop", "ours": "ours"}
UNITS = {"s": 2, "GiB": 2, "": 0}  # unit -> number of printed decimals


def step_seconds(runs: Runs) -> float | None:
    """Return the median seconds of a step, without the first steps of each round."""
    return middle([row["seconds"] for run in runs for row in run["rows"] if row["step"] > run["warmup"]])


def tokens(runs: Runs) -> float | None:
    """Return the median number of generated tokens of a step."""
    return middle([row["tokens"] for run in runs for row in run["rows"] if row["step"] > run["warmup"]])


def first_step_end(runs: Runs) -> float | None:
    """Return the seconds from the start of the process to the end of its first step."""
    return middle([row["at"] for run in runs for row in run["rows"] if row["step"] == 1])


def reached(runs: Runs) -> float | None:
    """Return the seconds from the start of the process to an accuracy of `TARGET`; None if a round did not reach it."""
    ends = [next((r["at"] for r in run["rows"] if (r["accuracy"] or 0.0) >= TARGET), None) for run in runs]
    return middle([end for end in ends if end is not None]) if None not in ends else None


def steps_to_target(runs: Runs) -> float | None:
    """Return the number of steps to an accuracy of `TARGET`."""
    ends = [next((r["step"] for r in run["rows"] if (r["accuracy"] or 0.0) >= TARGET), None) for run in runs]
    return middle([float(end) for end in ends if end is not None]) if None not in ends else None


def trainer_memory(runs: Runs) -> float | None:
    """Return the high-water mark of the training process."""
    return max((run["trainer_gib"] for run in runs), default=None)


def all_memory(runs: Runs) -> float | None:
    """Return the largest sampled memory of all processes of a run."""
    return max((run["all_gib"] for run in runs), default=None)


def middle(values: list[float]) -> float | None:
    return median(values) if values else None


ROWS = (  # (title, unit, work, function that computes the figure from a side's runs)
    ("demo: a step", "s", "demo", step_seconds),
    ("demo: tokens of a step", "", "demo", tokens),
    ("demo: process start to the end of step 1", "s", "demo", first_step_end),
    ("20 M student, 80 M teacher: a step", "s", "larger", step_seconds),
    ("20 M student, 80 M teacher: tokens of a step", "", "larger", tokens),
    ("demo: process start to accuracy 0.8", "s", "learn", reached),
    ("demo: steps to accuracy 0.8", "", "learn", steps_to_target),
    ("vocabulary 151,936: peak of the training process", "GiB", "vocabulary", trainer_memory),
    ("vocabulary 151,936: peak of all processes", "GiB", "vocabulary", all_memory),
    ("vocabulary 151,936: tokens of a step", "", "vocabulary", tokens),
)


def figures(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the table with at least one measurement: title, unit, and a figure for each side."""
    measured = [
        {"row": title, "unit": unit, **{side: figure(runs) for side, runs in result["works"].get(work, {}).items()}}
        for title, unit, work, figure in ROWS
    ]
    return [row for row in measured if len(row) > 2]


def text(result: dict[str, Any]) -> str:
    """Return the table as text; a figure that was not measured or not reached is a dash."""
    rows = figures(result)
    sides = list(HEADINGS) + sorted({side for row in rows for side in row} - {"row", "unit", *HEADINGS})
    lines = ["", f"{'':<52}" + "".join(f"{HEADINGS.get(side, side):>12}" for side in sides)]
    lines.append("-" * len(lines[-1]))
    for row in rows:
        cells = [row.get(side) for side in sides]
        shown = ["-" if cell is None else f"{cell:.{UNITS[row['unit']]}f}" for cell in cells]
        title = f"{row['row']}, {row['unit']}" if row["unit"] else row["row"]
        lines.append(f"{title:<52}" + "".join(f"{cell:>12}" for cell in shown))
    counts = [len(runs) for work in result["works"].values() for runs in work.values()]
    lines.append(f"\nMedians of {min(counts)} to {max(counts)} rounds a side; of memory, the largest.")
    return "\n".join(lines)
