"""Coordinate the hosts of a run from host 0.

Host 0 waits for the other hosts, checks them, and starts their Ray nodes. A connection to each host transfers JSON
objects, one per line, and heartbeats. If heartbeats are missing, the host was lost by a power failure or a network
failure. A packet loss of 20 s is not treated as a failure, because TCP sends the lost packets again after at most 26 s.
The timeout is longer than these 26 s.
"""

import json
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from roll_opd.base import hub
from roll_opd.base.command_line import RUN_ID
from roll_opd.cluster.lost_processes import ClusterError
from roll_opd.cluster.multihost import host_facts
from roll_opd.cluster.multihost.host_facts import LaunchedHost, LaunchError
from roll_opd.cluster.ray_environment import token_variables
from roll_opd.cluster.startup_progress import StartupProgress

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


DOWNLOAD_TIMEOUT_S = 86400.0  # seconds for a host to download models; a lost host is noticed earlier
CHECK_TIMEOUT_S = 60.0  # seconds for a host to report its files
JOIN_GRACE_S = 10.0  # seconds to wait for hosts that have not joined, to report a failed start to them


class Hosts:
    """All hosts of a run, managed from host 0."""

    def __init__(self, host: LaunchedHost, again: float = 0.0) -> None:
        """Listen for the other hosts.

        Args:
            again: number of seconds for which the other hosts wait for a restarted driver; 0: the run is not restarted.

        Raises:
            LaunchError: if the port is in use.
        """
        self._host, self._again = host, again
        self._run = os.environ.get(RUN_ID, "") or uuid.uuid4().hex
        self._late = JOIN_GRACE_S  # seconds for which `end` waits for missing hosts
        self.warm: dict[str, Any] = {}  # request for the `ForkServer` of each other host
        self._inbox: queue.Queue[tuple[HeartbeatChannel, dict[str, Any] | None]] = queue.Queue()
        self._channels: dict[int, HeartbeatChannel] = {}
        self._facts: dict[int, dict[str, Any]] = {0: host_facts.facts()}
        self._refused: list[str] = []
        try:
            self._listener = socket.create_server(("", host.port))
        except OSError as error:
            raise LaunchError(
                [f"cannot listen on port {host.port} (MASTER_PORT + 1): {error.strerror}; use another MASTER_PORT"]
            ) from error
        threading.Thread(target=self._accept, daemon=True).start()

    def gather(self, seconds: float, say: Callable[[str], None]) -> None:
        """Wait at most `seconds` until all hosts have joined.

        Raises:
            LaunchError: if a host is missing or was refused. The message names the hosts.
        """
        self._late = 0.0
        with StartupProgress(say=say).waiting_for("the other hosts"):
            self._await_all(time.monotonic() + seconds)
        at = f"{self._host.address}:{self._host.port}"
        problems = [
            f"host {rank} of {self._host.size} has not joined within {seconds:g} s (host_timeout_s); start the same"
            f" command on this host, as rank {rank}, and check that the host can connect to {at}"
            for rank in range(1, self._host.size)
            if rank not in self._channels
        ]
        if problems or self._refused:
            raise LaunchError([*problems, *self._refused])

    def download(self, models: Sequence[str]) -> None:
        """Let each other host download those of `models` that are in this host's cache of a hub; raise LaunchError.

        A host with a complete copy, or that shares the cache, downloads nothing.
        """
        named = [path for path in models if hub.commit_of(Path(path))]
        if not named:
            return
        found = self._request(DOWNLOAD_TIMEOUT_S, download={"paths": named, "variables": hub.settings()})
        problems = [f"{self.name(rank)}: {one}" for rank, answer in found.items() for one in answer["problems"]]
        if problems:
            raise LaunchError(problems)

    def check(self, models: Sequence[str], directory: str | None, devices: int) -> None:
        """Check all hosts; raise a LaunchError that lists all problems.

        Each host must have the same versions and the same files of `models` as host 0, and enough GPUs.

        Args:
            directory: directory that all hosts must share; None: this is not checked.
            devices: number of GPUs that each host needs, if the hosts have GPUs.
        """
        own, problems = self._facts[0], list(self._refused)
        mine = {path: host_facts.model_files(path) for path in models}
        with _nonce(Path(directory)) if directory else nullcontext(("", Path)) as (nonce, cleared):
            request = {"models": list(models), "directory": directory, "nonce": nonce}
            found = self._request(CHECK_TIMEOUT_S, check=request)
            for rank in range(1, self._host.size):
                different = host_facts.differences(own, self._facts[rank], devices)
                problems += [f"{self.name(rank)} {what}" for what in different]
                seen = found.get(rank)
                if seen is None:
                    problems.append(f"{self.name(rank)} has not reported its files within {CHECK_TIMEOUT_S:g} s")
                    continue
                problems += [f"{self.name(rank)} {what}" for what in host_facts.model_problems(mine, seen["models"])]
                if directory and not (seen["answer"] and host_facts.wait_for_file(cleared(seen["answer"]))):
                    problems.append(
                        f"{self.name(rank)} does not share {directory}: files that one host writes are missing on the"
                        " other; set output_dir to a directory of a file system that all hosts share and can write to"
                    )
        if problems:
            raise LaunchError(problems)

    def join(self, address: str, slots: int, seconds: float) -> None:
        """Start a Ray node on all other hosts. The nodes join the cluster at `address`.

        Args:
            slots: number of device slots of each node.
            seconds: time limit for all hosts together.

        Raises:
            ClusterError: if a host fails or does not finish in time. The message names these hosts.
        """
        request = {"address": address, "slots": slots, "warm": self.warm, "environment": token_variables()}
        found = self._request(seconds, join=request)
        late = [rank for rank in self._channels if rank not in found]
        if late:
            names = ", ".join(map(self.name, sorted(late)))
            raise ClusterError(f"Ray has not started within {seconds:g} s (startup_timeout_s) on {names}")
        failed = [
            f"{self.name(rank)}: {answer['failed']}" for rank, answer in sorted(found.items()) if "failed" in answer
        ]
        if failed:
            raise ClusterError("\n".join(failed))

    def start_ranks(self, command: Mapping[str, Any]) -> None:
        """Start the ranks of a program on all other hosts; see `torch_ranks`."""
        for rank, channel in self._channels.items():
            channel.send(ranks={**command, "host": rank})

    def watch(self, lost: Callable[[str], None]) -> None:
        """Watch the other hosts in a thread.

        If a host fails or is lost, the thread calls `lost` with a message.
        """

        def run() -> None:
            while True:
                rank, message = self._take(None) or (0, None)
                if message is None:
                    lost(f"{self.name(rank)} is lost: its process has ended, or its heartbeats are missing")
                elif "failed" in message:
                    lost(f"{self.name(rank)}: {message['failed']}")

        threading.Thread(target=run, daemon=True).start()

    def end(self, code: int, *, again: bool = False) -> None:
        """Make the other hosts exit with the exit code `code`.

        If `again` is true, they do not exit, but wait for a restarted driver.
        """
        self._await_all(time.monotonic() + self._late)
        for channel in self._channels.values():
            channel.send(end=code, again=again)
            channel.close()
        self._listener.close()

    @property
    def addresses(self) -> list[str]:
        """Return the addresses of the hosts, in the order of their ranks."""
        first = next(channel.here for channel in self._channels.values())
        return [first, *(self._channels[rank].there for rank in range(1, self._host.size))]

    def name(self, rank: int) -> str:
        """Return the name of a host for messages."""
        where = self._channels[rank].there if rank in self._channels else self._host.address
        return f"host {rank} ({self._facts[rank]['name']}, {where})" if rank in self._facts else f"host {rank}"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            HeartbeatChannel(connection, self._inbox)

    def _await_all(self, deadline: float) -> None:
        while len(self._channels) < self._host.size - 1:
            received = self._take(deadline)
            if received is None:
                return
            rank, message = received
            if message is None:
                del self._channels[rank]  # it may reconnect

    def _request(self, seconds: float, **message: Any) -> dict[int, dict[str, Any]]:
        """Send `message` to all other hosts; return a dict from each host's rank to its answer.

        Hosts that do not answer within `seconds` are not in the dict.

        Raises:
            ClusterError: if a host is lost.
        """
        for channel in self._channels.values():
            channel.send(**message)
        deadline = time.monotonic() + seconds
        found: dict[int, dict[str, Any]] = {}
        while len(found) < len(self._channels):
            received = self._take(deadline)
            if received is None:
                break
            rank, answer = received
            if answer is None:
                raise ClusterError(f"{self.name(rank)} is lost: its process has ended, or its heartbeats are missing")
            found[rank] = answer
        return found

    def _take(self, deadline: float | None) -> tuple[int, dict[str, Any] | None] | None:
        """Wait for the next message of a host; return (rank, message).

        If a host's channel is closed, return (rank, None). If no message arrives before `deadline`, return None. Hosts
        that join in the meantime are added. If a host reports that it has received a signal, the signal is sent to this
        process.
        """
        while True:
            try:
                channel, message = self._inbox.get(
                    timeout=None if deadline is None else max(0.0, deadline - time.monotonic())
                )
            except queue.Empty:
                return None
            known = next((rank for rank, there in self._channels.items() if there is channel), None)
            if message is not None and known is None:
                if self._add_host(channel, message):
                    return message["rank"], message
            elif message is not None and "signal" in message:
                os.kill(os.getpid(), message["signal"])
            elif known is not None:
                if message is None:
                    channel.close()
                return known, message

    def _add_host(self, channel: HeartbeatChannel, message: dict[str, Any]) -> bool:
        if not {"rank", "size", "name", "gpus", "versions"} <= message.keys():  # not from a host
            channel.close()
            return False
        rank, there = message["rank"], self._channels.get(message["rank"])
        is_another = bool(there) and message.get("run") != self._run
        if not 0 < rank < self._host.size or message["size"] != self._host.size or is_another:
            who = f"{message['name']} ({channel.there}) reports rank {rank} of {message['size']}"
            why = f"as {there.there} does" if there and is_another else f"but the run has {self._host.size} hosts"
            self._refused.append(f"{who}, {why}; give each host its own rank and each run its own MASTER_PORT")
            channel.send(end=2, again=False)
            return False
        self._channels[rank], self._facts[rank] = channel, message
        channel.send(again=self._again, run=self._run)
        return True


def dismiss(host: LaunchedHost, code: int) -> None:
    """Make the waiting hosts exit with the exit code `code`, because the run cannot start."""
    with suppress(LaunchError):
        Hosts(host).end(code)


@contextmanager
def _nonce(directory: Path) -> Iterator[tuple[str, Callable[[str], Path]]]:
    """Create a file in `directory`; yield (name of the file, function).

    The function takes the name of another file in `directory`, and returns the path of that file. When the block ends,
    the created file and the files that were passed to the function are removed. If `directory` did not exist before, it
    is removed too.
    """
    made = [each for each in (directory, *directory.parents) if not each.exists()]
    name = f".hosts_{uuid.uuid4().hex}"
    files = [directory / name]

    def cleared(other: str) -> Path:
        files.append(directory / Path(other).name)
        return files[-1]

    try:
        directory.mkdir(parents=True, exist_ok=True)
        files[0].touch()
        yield name, cleared
    finally:
        for file in files:
            file.unlink(missing_ok=True)
        for each in made:
            try:
                each.rmdir()
            except OSError:
                break
