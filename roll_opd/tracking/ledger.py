"""The ledger of a run: one row per step, with the fate of each draw that the step used up.

A draw is a position in the run's sequence of prompts, counted over all epochs. A prompt that is read in two epochs has
two draws. Each draw occurs in at most one row, with one of three fates. Draws that are not yet in any row are in
flight.

The keys of a row:

- `step`: number of the step, from 1.
- `trained`: draws that the step trained on.
- `filtered`: draws whose group a filter rejected, or whose runs returned no sample on purpose.
- `failed`: draws that were not trained on because runs or rewards of their group failed. Either no sample is left, or
  the failure makes the group unusable (`replace`), or a filter rejected the rest of the group.
- `versions`: [oldest, newest] weight version of each draw in `trained`, in the order of `trained`. With these
  versions, the run can be repeated in the same order.
- `run`: id of the run, as in `run.json`; only in the first row.
- `checksum`: see `ledger_checksum`.

The rows form a checksum chain: the checksum of a row covers this row and the checksum of the previous row. Therefore a
changed, missing or reordered row breaks the chain. A resume removes the rows after the checkpoint, and the resumed run
writes these rows again.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from roll_opd.tracking.run_directory import LEDGER, RunDirectory, read_jsonl

FATES = ("trained", "filtered", "failed")  # outcomes of a draw in the ledger
VERSIONS = "versions"  # in the ledger: oldest and newest version of the weights that sampled each trained draw


class Ledger:
    """Appends rows to the ledger of a run. A resumed run continues the checksum chain.

    The first row has the id of the run. `rows` is the number of rows, and `checksum` that of the last row.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        rows = read_jsonl(run.path / LEDGER)
        self.rows, self.checksum = len(rows), rows[-1]["checksum"] if rows else 0

    def append(
        self,
        step: int,
        trained: Sequence[int],
        filtered: Sequence[int],
        versions: Sequence[Sequence[int]] = (),
        failed: Sequence[int] = (),
    ) -> None:
        """Append the row of a step.

        Raises OSError if the row cannot be written (see `RunDirectory.append_jsonl`).

        Args:
            trained: draws that the step trained on.
            filtered: draws that were filtered out.
            versions: (oldest, newest) weight version that sampled each trained draw.
            failed: draws that were left out because runs or rewards failed.
        """
        row: dict[str, Any] = {"step": step, **dict(zip(FATES, map(list, (trained, filtered, failed)), strict=True))}
        row |= {VERSIONS: [list(pair) for pair in versions]} if versions else {}
        if not self.rows and (run := self._run.id):
            row["run"] = run
        self.checksum = ledger_checksum(row, self.checksum)
        self._run.append_jsonl(LEDGER, [{**row, "checksum": self.checksum}])
        self.rows += 1


def ledger_checksum(row: Mapping[str, Any], before: int) -> int:
    """Return the CRC-32 of a row of the ledger. `before` is the checksum of the previous row.

    It covers the step, the draws of each fate, the versions and the id of the run.
    """
    content = [row["step"], *(row[field] for field in (*FATES, VERSIONS, "run") if field in row)]
    return zlib.crc32(json.dumps(content).encode(), before)
