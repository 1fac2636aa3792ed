"""The number of files that one step of pure distillation executes, over all of its processes."""

import json

import pytest
from traced_step import COMMITTED, all_files, traced

# as many are in traced_step.json
MOST_FILES = 126


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_step_executes_few_files() -> None:
    found = traced()
    assert found.keys() == json.loads(COMMITTED.read_text()).keys()  # every kind of process was traced
    files = all_files(found)
    assert len(files) <= MOST_FILES, "\n".join(files)
