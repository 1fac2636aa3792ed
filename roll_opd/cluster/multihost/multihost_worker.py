"""A host that serves a run whose driver is on host 0: a node of the run's Ray cluster, until that has ended.

Or it has a share of the ranks of `roll-opd score`.
"""

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
from roll_opd.cluster.multihost.heartbeat_channel import HeartbeatChannel
from roll_opd.cluster.multihost.launcher_env import Host

FIRST_SECONDS = 600.0  # for which the driver is looked for at first; it says for how long later
RETRY_SECONDS = 0.5
LEAVING_SECONDS = 10.0  # for the Ray node to end by itself


def serve(host: Host, say: Callable[[str], None]) -> int:
    """Serve the run, through all its drivers where it is restarted; return the exit code of the last one."""
    return _Member(host, say).serve()


class _Member:
    def __init__(self, host: Host, say: Callable[[str], None]) -> None:
        self._host, self._say = host, say
        self._signals: list[int] = []
        self._again = FIRST_SECONDS  # seconds for which a driver is looked for; 0: it has had its only one
        self._run = ""  # by what the driver knows the run

    def serve(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._asked)
        facts = host_facts.facts()
        code: int | None = None
        while code is None:
            inbox: queue.Queue[Any] = queue.Queue()
            line = self._connected(inbox)
            if line is None:
                return self._failed()
            line.say(rank=self._host.rank, size=self._host.size, run=self._run, **facts)
            node = _Node(inbox)
            try:
                code = self._serve_one(line, inbox, node)
            finally:
                node.end()
                line.close()
        return code

    def _serve_one(self, line: HeartbeatChannel, inbox: "queue.Queue[Any]", node: "_Node") -> int | None:
        """Serve one driver; return the exit code, None where another driver is to come."""
        told = 0
        while True:
            for number in self._signals[told:]:
                line.say(signal=number)
                if told:  # asked for more than once
                    return 128 + number
                told += 1
            try:
                source, message = inbox.get(timeout=RETRY_SECONDS)
            except queue.Empty:
                continue
            if source is node and message is not None:
                line.say(**message)  # up, or what has failed
            elif source is line and message is None:
                self._say(f"roll-opd: host {self._host.rank}: the driver on {self._host.address} is gone")
                return None if self._again and not self._signals else self._failed()
            elif source is not line:
                continue
            elif "again" in message and "end" not in message:
                self._again, self._run = message["again"], message["run"]
            elif "check" in message:
                line.say(**host_facts.look(**message["check"]))
            elif "join" in message:
                node.start("ray_node", {**message["join"], "here": line.here})
            elif "ranks" in message:
                node.start("torch_ranks", {**message["ranks"], "here": line.here})
            elif "end" in message:
                if message["again"] and not self._signals:
                    return None
                if message["end"]:
                    self._say(f"roll-opd: host {self._host.rank}: the run has ended; host 0 says why")
                return int(message["end"])

    def _connected(self, inbox: "queue.Queue[Any]") -> HeartbeatChannel | None:
        """Return a connection to the driver, None where there is none in time, or this command is to end."""
        deadline = time.monotonic() + self._again
        why = ""
        while not self._signals:
            try:
                connection = socket.create_connection((self._host.address, self._host.port), timeout=RETRY_SECONDS * 10)
                return HeartbeatChannel(connection, inbox)
            except OSError as error:
                why = error.strerror or str(error)
            if time.monotonic() > deadline:
                at = f"{self._host.address}:{self._host.port}"
                self._say(
                    f"roll-opd: host {self._host.rank}: host 0 has not answered at {at} for {self._again:g} s ({why});"
                    " start the same command there, as rank 0"
                )
                return None
            time.sleep(RETRY_SECONDS)
        return None

    def _failed(self) -> int:
        return 128 + self._signals[0] if self._signals else FAILED

    def _asked(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)


class _Node:
    """This host's part of what the driver runs, a process of its own, for a process reads Ray's token only once."""

    def __init__(self, inbox: "queue.Queue[Any]") -> None:
        self._inbox = inbox
        self._process: subprocess.Popen[str] | None = None

    def start(self, program: str, told: dict[str, Any]) -> None:
        """Start a program of this package; what it says comes into the inbox."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.{program}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C in the terminal is not meant for it
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(told) + "\n")
            self._process.stdin.flush()
        threading.Thread(target=self._read, args=(self._process, program), daemon=True).start()

    def end(self) -> None:
        """End it, with all that it has started."""
        if self._process is None or self._process.stdin is None:
            return
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(LEAVING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its reaper ends the rest
            self._process.wait()

    def _read(self, process: "subprocess.Popen[str]", program: str) -> None:
        assert process.stdout is not None
        for text in process.stdout:
            with suppress(ValueError, TypeError):  # a library's own words
                self._inbox.put((self, json.loads(text) | {"node": True}))
        part = "part of Ray" if program == "ray_node" else "share of the ranks"
        self._inbox.put((self, {"failed": f"its {part} has ended (exit code {process.wait()})"}))
