"""Code sandboxes that the tests of a file share."""

import os
from collections.abc import Iterator

import pytest
from sandboxes import LIMITS, processes_of, wait_until

from roll_opd.rewards.code_sandbox import CodeSandbox


@pytest.fixture(scope="module")
def strangers() -> set[int]:
    """Descendants of this process that were here before any sandbox: what other rooms have started."""
    return processes_of(os.getpid())


@pytest.fixture(scope="module")
def rewards(strangers: set[int]) -> Iterator[dict[bool, CodeSandbox]]:
    """By `partial`. Their processes are gone after them."""
    os.environ["SECRET"] = "of the worker"
    made = {partial: CodeSandbox(partial=partial, workers=4, **LIMITS) for partial in (False, True)}
    yield made
    for reward in made.values():
        reward.close()
    del os.environ["SECRET"]
    assert wait_until(lambda: processes_of(os.getpid()) <= strangers)
