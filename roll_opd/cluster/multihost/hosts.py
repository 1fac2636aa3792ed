"""The other hosts of a run, as the one of the driver sees them: who is there, whether they fit, their part of Ray."""

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

from roll_opd.cluster.multihost import host_facts
from roll_opd.cluster.multihost.heartbeat_channel import HeartbeatChannel
from roll_opd.cluster.multihost.launcher_env import Host, LaunchError
from roll_opd.cluster.ray_environment import token_variables
from roll_opd.cluster.startup_progress import ClusterError, StartUp

ANSWER_SECONDS = 60.0  # for a host to look at its files
JOIN_GRACE_S = 10.0  # that a run which cannot be waits for the hosts, to tell them
RUN = "ROLL_OPD_RUN"  # in the environment of the attempts of one run: what its hosts know it by


class Hosts:
    """All hosts of a run, of which this is the first."""

    def __init__(self, host: Host, again: float = 0.0) -> None:
        """Await the others. LaunchError where another process has the port.

        `again`: seconds for which the others look for a driver that comes after this one; 0: none does.
        """
        self._host, self._again = host, again
        self._run = os.environ.get(RUN, "") or uuid.uuid4().hex
        self._late = JOIN_GRACE_S  # that `end` waits for those who are not there
        self.warm: dict[str, Any] = {}  # imports of the other hosts' `WarmServer`
        self._inbox: queue.Queue[tuple[HeartbeatChannel, dict[str, Any] | None]] = queue.Queue()
        self._lines: dict[int, HeartbeatChannel] = {}
        self._facts: dict[int, dict[str, Any]] = {0: host_facts.facts()}
        self._refused: list[str] = []
        try:
            self._listener = socket.create_server(("", host.port))
        except OSError as error:
            raise LaunchError(
                [f"port {host.port} (MASTER_PORT + 1), where the hosts meet: {error.strerror}; use another MASTER_PORT"]
            ) from error
        threading.Thread(target=self._accept, daemon=True).start()

    def gather(self, seconds: float, say: Callable[[str], None]) -> None:
        """Wait until all are there, at most `seconds`. LaunchError that names those who are not."""
        self._late = 0.0
        with StartUp(say=say).waiting_for("the other hosts"):
            self._await_all(time.monotonic() + seconds)
        at = f"{self._host.address}:{self._host.port}"
        problems = [
            f"host {rank} of {self._host.size} has not come within {seconds:g} s (host_seconds); start the same command"
            f" there, as rank {rank}, and see that it reaches {at}"
            for rank in range(1, self._host.size)
            if rank not in self._lines
        ]
        if problems or self._refused:
            raise LaunchError([*problems, *self._refused])

    def check(self, models: Sequence[str], directory: str | None, devices: int) -> None:
        """Compare versions, `models` and GPUs, and see that all share `directory`. LaunchError that names who does not.

        `directory` None: nothing need be shared. `devices`: GPUs of a host that the run needs, where there are GPUs.
        """
        own, problems = self._facts[0], list(self._refused)
        mine = {path: host_facts.model_files(path) for path in models}
        with _nonce(Path(directory)) if directory else nullcontext(("", Path)) as (nonce, cleared):
            asked = {"models": list(models), "directory": directory, "nonce": nonce}
            found = self._all_answer(ANSWER_SECONDS, check=asked)
            for rank in range(1, self._host.size):
                different = host_facts.differences(own, self._facts[rank], devices)
                problems += [f"{self.name(rank)} {what}" for what in different]
                seen = found.get(rank)
                if seen is None:
                    problems.append(f"{self.name(rank)} has not said within {ANSWER_SECONDS:g} s what files it has")
                    continue
                problems += [f"{self.name(rank)} {what}" for what in host_facts.model_problems(mine, seen["models"])]
                if directory and not (seen["answer"] and host_facts.appears(cleared(seen["answer"]))):
                    problems.append(
                        f"{self.name(rank)} does not share {directory}: what one host writes there the other does not"
                        " see; make output_dir a directory of a file system that all hosts share, writable on each"
                    )
        if problems:
            raise LaunchError(problems)

    def join(self, address: str, slots: int, seconds: float) -> None:
        """Have each host become a node, with so many slots, of the Ray cluster at `address`.

        ClusterError that names who does not in so many seconds.
        """
        told = {"address": address, "slots": slots, "warm": self.warm, "environment": token_variables()}
        found = self._all_answer(seconds, join=told)
        late = [rank for rank in self._lines if rank not in found]
        if late:
            names = ", ".join(map(self.name, sorted(late)))
            raise ClusterError(f"Ray has not started within {seconds:g} s (startup_seconds) on {names}")
        failed = [f"{self.name(rank)}: {said['failed']}" for rank, said in sorted(found.items()) if "failed" in said]
        if failed:
            raise ClusterError("\n".join(failed))

    def start_ranks(self, command: Mapping[str, Any]) -> None:
        """Have each host start its share of the ranks of a program; see `torch_ranks`."""
        for rank, line in self._lines.items():
            line.say(ranks={**command, "host": rank})

    def watch(self, lost: Callable[[str], None]) -> None:
        """From now on tell of a host that is `lost`."""

        def run() -> None:
            while True:
                rank, message = self._take(None) or (0, None)
                if message is None:
                    lost(f"{self.name(rank)} is gone: its process has ended, or nothing was heard of it")
                elif "failed" in message:
                    lost(f"{self.name(rank)}: {message['failed']}")

        threading.Thread(target=run, daemon=True).start()

    def end(self, code: int, *, again: bool = False) -> None:
        """Have the others end with `code`, or, with `again`, await the driver that comes after this one."""
        self._await_all(time.monotonic() + self._late)
        for line in self._lines.values():
            line.say(end=code, again=again)
            line.close()
        self._listener.close()

    @property
    def addresses(self) -> list[str]:
        """Addresses by rank, as the hosts know each other."""
        first = next(line.here for line in self._lines.values())
        return [first, *(self._lines[rank].there for rank in range(1, self._host.size))]

    def name(self, rank: int) -> str:
        """Return a host's name for people."""
        where = self._lines[rank].there if rank in self._lines else self._host.address
        return f"host {rank} ({self._facts[rank]['name']}, {where})" if rank in self._facts else f"host {rank}"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            HeartbeatChannel(connection, self._inbox)

    def _await_all(self, deadline: float) -> None:
        while len(self._lines) < self._host.size - 1:
            heard = self._take(deadline)
            if heard is None:
                return
            rank, message = heard
            if message is None:
                del self._lines[rank]  # it may come again

    def _all_answer(self, seconds: float, **message: Any) -> dict[int, dict[str, Any]]:
        """Send `message` to all; return what each answers, by rank. ClusterError where one is lost meanwhile."""
        for line in self._lines.values():
            line.say(**message)
        deadline = time.monotonic() + seconds
        found: dict[int, dict[str, Any]] = {}
        while len(found) < len(self._lines):
            heard = self._take(deadline)
            if heard is None:
                break
            rank, answer = heard
            if answer is None:
                raise ClusterError(f"{self.name(rank)} is gone: its process has ended, or nothing was heard of it")
            found[rank] = answer
        return found

    def _take(self, deadline: float | None) -> tuple[int, dict[str, Any] | None] | None:
        """Return the rank of a host and what it says, None for its end; None where nothing comes until `deadline`.

        A host that comes is taken in. A signal that one has got is one that this process gets.
        """
        while True:
            try:
                line, message = self._inbox.get(
                    timeout=None if deadline is None else max(0.0, deadline - time.monotonic())
                )
            except queue.Empty:
                return None
            known = next((rank for rank, there in self._lines.items() if there is line), None)
            if message is not None and known is None:
                if self._is_taken_in(line, message):
                    return message["rank"], message
            elif message is not None and "signal" in message:
                os.kill(os.getpid(), message["signal"])
            elif known is not None:
                if message is None:
                    line.close()
                return known, message

    def _is_taken_in(self, line: HeartbeatChannel, message: dict[str, Any]) -> bool:
        if not {"rank", "size", "name", "gpus", "versions"} <= message.keys():  # of no host
            line.close()
            return False
        rank, there = message["rank"], self._lines.get(message["rank"])
        is_another = bool(there) and message.get("run") != self._run
        if not 0 < rank < self._host.size or message["size"] != self._host.size or is_another:
            who = f"{message['name']} ({line.there}) says that it is host {rank} of {message['size']}"
            why = f"as {there.there} does" if there and is_another else f"and there are {self._host.size}"
            self._refused.append(f"{who}, {why}; give every host a rank of its own, and every run a MASTER_PORT")
            line.say(end=2, again=False)
            return False
        self._lines[rank], self._facts[rank] = line, message
        line.say(again=self._again, run=self._run)
        return True


def dismiss(host: Host, code: int) -> None:
    """End the hosts that await a run which cannot be."""
    with suppress(LaunchError):
        Hosts(host).end(code)


@contextmanager
def _nonce(directory: Path) -> Iterator[tuple[str, Callable[[str], Path]]]:
    """Have a file in `directory`, which is made if need be, inside the block; yields its name, and a function that
    returns the path of another one's name, which is removed as well at the end.
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
