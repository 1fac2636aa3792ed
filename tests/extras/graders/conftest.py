"""Code sandboxes that the tests of a file share, and servers with scripted behaviour."""

import os
from collections.abc import Iterator

import pytest
from sandboxes import LIMITS, processes_of, wait_until
from scripted_server import serve  # noqa: F401  # a fixture

from roll_opd.extras.graders.rewards.code_sandbox import CodeSandbox


@pytest.fixture(scope="module")
def strangers() -> set[int]:
    """Descendants of this process that existed before any sandbox: processes started by other rooms."""
    return processes_of(os.getpid())


@pytest.fixture(scope="module")
def rewards(strangers: set[int]) -> Iterator[dict[bool, CodeSandbox]]:
    """Rewards by `partial`; afterwards none of their processes may remain."""
    os.environ["SECRET"] = "of the worker"
    made = {partial: CodeSandbox(partial=partial, workers=4, **LIMITS) for partial in (False, True)}
    yield made
    for reward in made.values():
        reward.close()
    del os.environ["SECRET"]
    assert wait_until(lambda: processes_of(os.getpid()) <= strangers)
