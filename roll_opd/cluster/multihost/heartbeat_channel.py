"""A connection between two hosts, on which each says JSON objects, a line each, and beats while it has nothing to say.

A host that is gone without a word, by a power cut or a cable, is told by its silence. Packets that are lost for 20 s
are no such silence: TCP sends them again, after 26 s at the latest.
"""

import json
import queue
import socket
import threading
import time
from contextlib import suppress
from typing import Any

BEAT_SECONDS = 5.0
SILENCE_SECONDS = 40.0  # until the other host is given up
LONGEST = 2**24  # bytes of a line


class HeartbeatChannel:
    """One end. What the other one says comes into `inbox` as (this, message), and None as the message at its end."""

    def __init__(
        self, connection: socket.socket, inbox: "queue.Queue[tuple[HeartbeatChannel, dict[str, Any] | None]]"
    ) -> None:
        self._connection, self._inbox = connection, inbox
        self._lock = threading.Lock()
        connection.settimeout(SILENCE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.here, self.there = connection.getsockname()[0], connection.getpeername()[0]
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def say(self, **message: Any) -> bool:
        """Send `message`. False where the connection is broken, of which the inbox tells as well."""
        with self._lock:
            try:
                self._connection.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                return False
        return True

    def close(self) -> None:
        """End the connection, after what was said."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self) -> None:
        with suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            while text := lines.readline(LONGEST):
                message = json.loads(text)
                if not isinstance(message, dict):
                    break
                if message:
                    self._inbox.put((self, message))
        self._inbox.put((self, None))

    def _beat(self) -> None:
        while self.say():
            time.sleep(BEAT_SECONDS)
