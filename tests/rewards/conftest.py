"""Code sandboxes that the tests of a file share, and servers with scripted behaviour."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sandboxes import LIMITS, processes_of, wait_until
from scripted_server import ScriptedServer

from roll_opd.rewards.builtin.code_sandbox import CodeSandbox


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


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ScriptedServer]]:
    """Start a server; it ends with the test."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    servers: list[ScriptedServer] = []

    def started(*args: Any, **settings: Any) -> ScriptedServer:
        servers.append(ScriptedServer(*args, **settings))
        return servers[-1]

    yield started
    for server in servers:
        server.die()
