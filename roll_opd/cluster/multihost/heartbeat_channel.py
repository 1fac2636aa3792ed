"""Connection between two hosts. It transfers JSON objects, one per line, and heartbeats.

If heartbeats are missing, the host was lost by a power failure or a network failure. A packet loss of 20 s is not
treated as a failure, because TCP sends the lost packets again after at most 26 s. The timeout is longer than these 26
s.
"""

import json
import queue
import socket
import threading
import time
from contextlib import suppress
from typing import Any

HEARTBEAT_INTERVAL_S = 5.0
HEARTBEAT_TIMEOUT_S = 40.0
MAX_MESSAGE = 2**24  # bytes


class HeartbeatChannel:
    """One end of a connection.

    For each message that arrives, (channel, message) is put into `inbox`. When the connection ends, (channel, None) is
    put into `inbox`.
    """

    def __init__(
        self, connection: socket.socket, inbox: "queue.Queue[tuple[HeartbeatChannel, dict[str, Any] | None]]"
    ) -> None:
        self._connection, self._inbox = connection, inbox
        self._lock = threading.Lock()
        connection.settimeout(HEARTBEAT_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.here, self.there = connection.getsockname()[0], connection.getpeername()[0]
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def send(self, **message: Any) -> bool:
        """Send a message; return False if the connection is broken.

        In this case, (channel, None) is also put into `inbox`.
        """
        with self._lock:
            try:
                self._connection.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                return False
        return True

    def close(self) -> None:
        """Close the connection after all messages have been sent."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self) -> None:
        with suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            while text := lines.readline(MAX_MESSAGE):
                message = json.loads(text)
                if not isinstance(message, dict):
                    break
                if message:
                    self._inbox.put((self, message))
        self._inbox.put((self, None))

    def _beat(self) -> None:
        while self.send():
            time.sleep(HEARTBEAT_INTERVAL_S)
