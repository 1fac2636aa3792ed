"""The scripted server."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_server import ScriptedServer


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
