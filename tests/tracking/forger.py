"""A forger of ledgers: changes the rows of a run's ledger, and computes all checksums again.

It is written from the description of the ledger, without the code of the package: the checksum of a row is the CRC-32
of the JSON list of its step, the draws of each fate, its versions and the id of the run, continued from the row before.
"""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
KEYS = ("trained", "filtered", "failed", "versions", "run")


def rows_of(run: Path) -> Rows:
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]


def write(run: Path, rows: Rows) -> None:
    """Write rows with right checksums."""
    last, lines = 0, []
    for row in rows:
        content = [row["step"], *(row[key] for key in KEYS if key in row)]
        last = zlib.crc32(json.dumps(content).encode(), last)
        lines.append(json.dumps({**row, "checksum": last}) + "\n")
    (run / "ledger.jsonl").write_text("".join(lines))


def _largest(rows: Rows) -> int:
    return max(draw for row in rows for fate in ("trained", "filtered") for draw in row[fate])


def without_last(rows: Rows) -> Rows:
    return rows[:-1]


def without_first(rows: Rows) -> Rows:
    return [{**rows[1], "run": rows[0].get("run")}, *rows[2:]]


def without_a_step(rows: Rows) -> Rows:
    """Leave out a row, and give the later rows its step."""
    return [*rows[:2], *({**row, "step": row["step"] - 1} for row in rows[3:])]


def with_a_hole(rows: Rows) -> Rows:
    """Shift the draws from a step on by those of a whole step, so that all steps are there."""
    width = len(rows[2]["trained"]) + len(rows[2]["filtered"])
    shifted = [
        {**row, **{fate: [draw + width for draw in row[fate]] for fate in ("trained", "filtered")}} for row in rows[2:]
    ]
    return [*rows[:2], *shifted]


def with_a_hole_at_the_end(rows: Rows) -> Rows:
    later = _largest(rows) + 5
    return [*rows[:-1], {**rows[-1], "trained": [later + place for place in range(len(rows[-1]["trained"]))]}]


def with_a_further_row(rows: Rows) -> Rows:
    first = _largest(rows) + 1
    trained = [first + place for place in range(len(rows[-1]["trained"]))]
    row = {key: value for key, value in rows[-1].items() if key != "run"}
    return [*rows, {**row, "step": row["step"] + 1, "trained": trained, "filtered": []}]


def with_a_draw_twice(rows: Rows) -> Rows:
    return [*rows[:2], {**rows[2], "trained": [rows[0]["trained"][0], *rows[2]["trained"][1:]]}, *rows[3:]]


def with_exchanged_draws(rows: Rows) -> Rows:
    one, other = rows[1]["trained"][-1], rows[3]["trained"][-1]
    changed = {1: [*rows[1]["trained"][:-1], other], 3: [*rows[3]["trained"][:-1], one]}
    return [{**row, "trained": changed.get(place, row["trained"])} for place, row in enumerate(rows)]


def with_exchanged_rows(rows: Rows) -> Rows:
    return [*rows[:2], {**rows[3], "step": rows[2]["step"]}, {**rows[2], "step": rows[3]["step"]}, *rows[4:]]


def without_a_trained_draw(rows: Rows) -> Rows:
    row = {**rows[2], "trained": rows[2]["trained"][1:]}
    return [*rows[:2], row | ({"versions": row["versions"][1:]} if "versions" in row else {}), *rows[3:]]


def with_another_fate(rows: Rows) -> Rows:
    """Declare a trained draw filtered."""
    row = without_a_trained_draw(rows)[2]
    return [*rows[:2], {**row, "filtered": [*row["filtered"], rows[2]["trained"][0]]}, *rows[3:]]


def with_exchanged_fates(rows: Rows) -> Rows:
    """Declare a filtered draw trained, and a trained one filtered: all counts stay the same."""
    (place, row), *_ = [(place, row) for place, row in enumerate(rows) if row["filtered"]]
    one, other = row["trained"][0], row["filtered"][0]
    forged = {**row, "trained": [other, *row["trained"][1:]], "filtered": [one, *row["filtered"][1:]]}
    return [*rows[:place], forged, *rows[place + 1 :]]


def without_filtered(rows: Rows) -> Rows:
    return [{**row, "filtered": []} for row in rows]


def with_an_invented_draw(rows: Rows) -> Rows:
    return [*rows[:-1], {**rows[-1], "filtered": [*rows[-1]["filtered"], _largest(rows) + 1]}]


def of_another_name(rows: Rows) -> Rows:
    return [{**rows[0], "run": "20200101-000000-000000"}, *rows[1:]]


def with_huge_draws(rows: Rows) -> Rows:
    return [*rows[:-1], {**rows[-1], "trained": [10**12 + draw for draw in rows[-1]["trained"]]}]


def _with_versions(change: Callable[[int, list[int]], list[int]]) -> Callable[[Rows], Rows]:
    def forged(rows: Rows) -> Rows:
        return [{**row, "versions": [change(row["step"] - 1, pair) for pair in row["versions"]]} for row in rows]

    return forged


def without_versions(rows: Rows) -> Rows:
    return [{key: value for key, value in row.items() if key != "versions"} for row in rows]


KINDS: dict[str, Callable[[Rows], Rows]] = {
    "empty": lambda rows: [],
    **{
        forge.__name__: forge
        for forge in (
            without_last,
            without_first,
            without_a_step,
            with_a_hole,
            with_a_hole_at_the_end,
            with_a_further_row,
            with_a_draw_twice,
            with_exchanged_draws,
            with_exchanged_rows,
            without_a_trained_draw,
            with_another_fate,
            with_exchanged_fates,
            without_filtered,
            with_an_invented_draw,
            of_another_name,
            with_huge_draws,
        )
    },
}
KINDS_OF_VERSIONS: dict[str, Callable[[Rows], Rows]] = {
    "older than the bound": _with_versions(lambda version, pair: [max(0, version - 4), pair[1]]),
    "younger": _with_versions(lambda version, pair: [version, version]),
    "of a later step": _with_versions(lambda version, pair: [pair[0], version + 1]),
    "in the wrong order": _with_versions(lambda version, pair: [pair[1], pair[0] - 1]),
    "without versions": without_versions,
}
