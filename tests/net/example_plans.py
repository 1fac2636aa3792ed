"""The plans of all examples and of the fragments in `configs/`, which are committed in `example_plans.json`.

    python tests/net/example_plans.py

writes this file after an intended change of plans; review the difference.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "config")]

from plan_records import Record, message, plan_record, without_roots  # noqa: E402
from plan_sources import Source, our_sources, planned_in  # noqa: E402
from planner_adapter import plain_machine, planner, problems_of  # noqa: E402

COMMITTED = Path(__file__).with_suffix(".json")


def planned(source: Source, root: Path) -> Record:
    """Return the plan of `roll-opd plan --json` on a machine without GPUs, and the keys of warnings and problems."""
    try:
        with plain_machine(), planned_in(source):
            plan = planner()(str(source.file.parent), source.file.stem, source.overrides, runnable=False)
    except Exception as error:
        if (problems := problems_of(error)) is None:
            raise
        return {"problems": [message("problem", text)["key"] for text in problems]}
    record = plan_record(plan)
    keys = [one["key"] for one in record["messages"]]
    # whether a tracker is installed is no matter of the plan
    found = {**record["plan"], "warnings": [key for key in keys if key != "track_with"]}
    return without_roots(found, [root])


def committed() -> dict[str, Record]:
    """Return the committed plans by the names of their configurations."""
    return json.loads(COMMITTED.read_text(encoding="utf-8"))


def main() -> None:
    """Plan all configurations and write the file, one line for each part of a plan."""
    with tempfile.TemporaryDirectory(prefix="plans-") as scratch:
        plans = {source.name: planned(source, Path(scratch)) for source in our_sources(Path(scratch))}
    lines = []
    for name, plan in sorted(plans.items()):
        parts = [f"  {json.dumps(part)}: {json.dumps(value, sort_keys=True)}" for part, value in sorted(plan.items())]
        lines.append(f"{json.dumps(name)}: {{\n" + ",\n".join(parts) + "\n }")
    COMMITTED.write_text("{\n " + ",\n ".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
