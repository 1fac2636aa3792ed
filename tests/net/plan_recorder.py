"""A plugin for pytest that records every plan that tests make: `-p plan_recorder`, with PLAN_RECORDS naming a file.

It is loaded before the tests, so that every import of the planner gets the recording planner.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from plan_records import Record, recording
from planner_adapter import replace_planner

records: list[Record] = []
replace_planner(lambda planner: recording(planner, records, [Path(os.environ["PLAN_ROOT"])]))
calls: Counter[str] = Counter()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    """Write the plans of the test that has ended."""
    with open(os.environ["PLAN_RECORDS"], "a", encoding="utf-8") as file:
        for record in records:
            calls[nodeid] += 1
            print(json.dumps({"name": f"{nodeid} #{calls[nodeid]}", **record}, ensure_ascii=False), file=file)
    records.clear()
