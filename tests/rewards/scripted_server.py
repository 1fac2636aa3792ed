"""A real HTTP server, in threads, that fails as a script specifies and keeps a log of its failures.

`faults` are the faults for the first requests, one per request in the order of arrival; later requests are answered by
`reply(body)`. A fault is a status ("500", "429 after 1": with a Retry-After), or one of `BROKEN`.
"""

import asyncio
import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from roll_opd.rewards.interface import Failure, RewardSample, Scored, read_scores

STALL_SECONDS = 2.5
BROKEN = {  # what the client must call it, by the script's name
    "cut": "broken_json",  # JSON that ends in the middle
    "alien": "broken_json",  # JSON that is no such answer
    "half": "connect",  # fewer bytes than announced
    "reset": "connect",
    "stall": "timeout",
}


class ScriptedServer:
    def __init__(self, reply: Callable[[Any], Any], faults: Iterable[str | None] = (), seconds: float = 0.0) -> None:
        self.reply, self.seconds = reply, seconds
        self._faults, self._lock = iter(faults), threading.Lock()
        self.wrong: Counter[str] = Counter()  # what it did wrong, by the client's kinds
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []  # when requests came in
        self.at_once = self.most_at_once = 0
        self._connections: set[socket.socket] = set()
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start, or restart on the same port."""
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                script._connections.add(self.connection)

            def finish(self) -> None:
                script._connections.discard(self.connection)
                with contextlib.suppress(OSError):
                    super().finish()

            def do_POST(self) -> None:
                with contextlib.suppress(OSError):
                    script._answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 256

            def handle_error(self, *_: Any) -> None:  # a client that is gone
                pass

        self._server = Server(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def die(self) -> None:
        """Close every connection and refuse new ones."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            self.times.append(time.monotonic())
            self.bodies.append(body)
            self.headers.append(dict(handler.headers))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            fault = next(self._faults, None)
            if fault is not None:
                self.wrong[BROKEN.get(fault, f"http_{fault[:3]}")] += 1
        try:
            time.sleep(STALL_SECONDS if fault == "stall" else self.seconds)
        finally:
            with self._lock:
                self.at_once -= 1
        self._send(handler, fault, json.dumps(self.reply(body)).encode())

    def _send(self, handler: BaseHTTPRequestHandler, fault: str | None, answer: bytes) -> None:
        if fault == "reset":
            _reset(handler.connection)
            handler.close_connection = True
            return
        status, _, pause = (fault or "200").partition(" after ")
        handler.send_response(int(status) if status.isdigit() else 200)
        if pause:
            handler.send_header("Retry-After", pause)
        if status.isdigit() and status != "200":
            answer = f"went wrong, {handler.headers.get('Authorization')}".encode()
        if fault == "cut":
            answer = answer[: len(answer) // 2]
        if fault == "alien":
            answer = b'{"error": "overloaded"}'
        handler.send_header("Content-Length", str(len(answer)))
        handler.end_headers()
        if fault == "half":
            answer, handler.close_connection = answer[: len(answer) // 2], True
        handler.wfile.write(answer)


def _reset(connection: socket.socket) -> None:
    """Close the connection with a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.close(connection.detach())


def scored(reward: Any, samples: Sequence[RewardSample], at_once: int = 1) -> list[Scored]:
    """Return scores requested as in a run: many calls of a few samples (`at_once`) in one event loop."""

    async def gather() -> list[Scored]:
        batches = [samples[start : start + at_once] for start in range(0, len(samples), at_once)]
        answers = await asyncio.gather(*map(reward.score, batches))
        return [
            score
            for answer, batch in zip(answers, batches, strict=True)
            for score in read_scores(answer, batch, "reward")
        ]

    return asyncio.run(gather())


def attempts_failed(scores: Sequence[Scored]) -> Counter[str]:
    """Return every failed attempt that the scores report."""
    total: Counter[str] = Counter()
    for score in scores:
        total.update(score.errors)
        if isinstance(score, Failure):
            total[score.kind] += 1
    return total


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
