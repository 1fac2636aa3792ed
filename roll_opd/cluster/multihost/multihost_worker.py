"""Program of the hosts other than host 0. It runs a Ray node of a run, or the host's ranks of `roll-opd score`."""

import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from roll_opd.base.command_line import FAILED
from roll_opd.cluster.multihost import host_facts
from roll_opd.cluster.multihost.host_facts import LaunchedHost
from roll_opd.cluster.multihost.hosts import HeartbeatChannel

FIRST_CONNECT_S = 600.0  # seconds to connect to the first driver, which sends the limit for later drivers
RETRY_INTERVAL_S = 0.5
EXIT_GRACE_S = 10.0  # seconds for the Ray node to exit without a signal


def serve(host: LaunchedHost, say: Callable[[str], None]) -> int:
    """Serve the drivers of a run, and return the exit code of the last driver.

    A run can have several drivers, one after the other, because a driver is restarted after a failure.
    """
    return _Worker(host, say).serve()


class _Worker:
    def __init__(self, host: LaunchedHost, say: Callable[[str], None]) -> None:
        self._host, self._say = host, say
        self._signals: list[int] = []
        self._again = FIRST_CONNECT_S  # seconds to wait for a driver; 0: no restart is expected
        self._run = ""  # the driver's id of the run

    def serve(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        facts = host_facts.facts()
        code: int | None = None
        while code is None:
            inbox: queue.Queue[Any] = queue.Queue()
            channel = self._connected(inbox)
            if channel is None:
                return self._failed()
            channel.send(rank=self._host.rank, size=self._host.size, run=self._run, **facts)
            node = _Node(inbox)
            try:
                code = self._serve_one(channel, inbox, node)
            finally:
                node.end()
                channel.close()
        return code

    def _serve_one(self, channel: HeartbeatChannel, inbox: "queue.Queue[Any]", node: "_Node") -> int | None:
        """Serve one driver. Return its exit code, or None if the driver will be restarted."""
        forwarded = 0
        while True:
            for number in self._signals[forwarded:]:
                channel.send(signal=number)
                if forwarded:  # a second signal
                    return 128 + number
                forwarded += 1
            try:
                source, message = inbox.get(timeout=RETRY_INTERVAL_S)
            except queue.Empty:
                continue
            if source is node and message is not None:
                channel.send(**message)  # started, or the failure
            elif source is channel and message is None:
                self._say(f"roll-opd: host {self._host.rank}: the driver on {self._host.address} is lost")
                return None if self._again and not self._signals else self._failed()
            elif source is not channel:
                continue
            elif "again" in message and "end" not in message:
                self._again, self._run = message["again"], message["run"]
            elif "check" in message:
                channel.send(**host_facts.look(**message["check"]))
            elif "download" in message:
                arguments = (inbox, node, message["download"])
                threading.Thread(target=self._download, args=arguments, daemon=True).start()
            elif "join" in message:
                node.start("ray_node", {**message["join"], "here": channel.here})
            elif "ranks" in message:
                node.start("torch_ranks", {**message["ranks"], "here": channel.here})
            elif "end" in message:
                if message["again"] and not self._signals:
                    return None
                if message["end"]:
                    self._say(f"roll-opd: host {self._host.rank}: the run has ended; see host 0 for the reason")
                return int(message["end"])

    def _download(self, inbox: "queue.Queue[Any]", node: "_Node", request: dict[str, Any]) -> None:
        """Download models, and put the problems into the inbox as a message of the node."""
        from roll_opd.models.hub_models import complete  # only a run with names needs it

        try:
            problems = complete(**request, say=self._say)
        except OSError as error:
            problems = [str(error)]
        inbox.put((node, {"problems": problems}))

    def _connected(self, inbox: "queue.Queue[Any]") -> HeartbeatChannel | None:
        """Connect to the driver and return the connection; None after a timeout or a signal."""
        deadline = time.monotonic() + self._again
        why = ""
        while not self._signals:
            try:
                connection = socket.create_connection(
                    (self._host.address, self._host.port), timeout=RETRY_INTERVAL_S * 10
                )
                return HeartbeatChannel(connection, inbox)
            except OSError as error:
                why = error.strerror or str(error)
            if time.monotonic() > deadline:
                at = f"{self._host.address}:{self._host.port}"
                self._say(
                    f"roll-opd: host {self._host.rank}: no connection to host 0 at {at} within {self._again:g} s"
                    f" ({why}); start the same command on host 0, as rank 0"
                )
                return None
            time.sleep(RETRY_INTERVAL_S)
        return None

    def _failed(self) -> int:
        return 128 + self._signals[0] if self._signals else FAILED

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)


class _Node:
    """The child process that runs this host's part of a run.

    It is a separate process because Ray reads its token only once per process.
    """

    def __init__(self, inbox: "queue.Queue[Any]") -> None:
        self._inbox = inbox
        self._process: subprocess.Popen[str] | None = None

    def start(self, program: str, request: dict[str, Any]) -> None:
        """Start a program of this package as the child process.

        The JSON of `request` is written to the program's standard input. The lines that it prints are put into the
        inbox.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.{program}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # not interrupted by Ctrl-C in the terminal
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        threading.Thread(target=self._read, args=(self._process, program), daemon=True).start()

    def end(self) -> None:
        """Stop the process and its descendants."""
        if self._process is None or self._process.stdin is None:
            return
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its reaper kills the descendants
            self._process.wait()

    def _read(self, process: "subprocess.Popen[str]", program: str) -> None:
        assert process.stdout is not None
        for text in process.stdout:
            with suppress(ValueError, TypeError):  # other output of a library
                self._inbox.put((self, json.loads(text) | {"node": True}))
        part = "part of Ray" if program == "ray_node" else "share of the ranks"
        self._inbox.put((self, {"failed": f"its {part} has ended (exit code {process.wait()})"}))
