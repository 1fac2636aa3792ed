"""Hosts on one machine: network namespaces with separate addresses, each in separate PID, mount and UTS namespaces.

Each host has a separate /tmp, /dev/shm and home directory. The code is the machine's, and one directory can be shared.
If the first process of a host is killed, all its processes end, as after a power cut.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from runs import REPOSITORY

# The shell is the first process of its namespace, and takes in those that lose their parents. What the command has left
# running after 10 s is reported. There is no program in the loop but sleep, which is another process while it looks.
AND_THEN = """{ "$@"; code=$?; }
for look in $(seq 100); do
  set -- /proc/[0-9]*; [ $# -eq 1 ] && exit $code; sleep 0.1
done
for each; do [ $each = /proc/1 ] || echo "left running: $(tr '\\0' ' ' < $each/cmdline)"; done
exit $code"""
LEFT = "left running: "
TOOLS = ("ip", "unshare", "mount", "taskset", "hostname")


def why_not() -> str | None:
    """Return the reason why such hosts cannot be made here, or None."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: apt-get install iproute2 util-linux)"
    if os.getuid():
        return "needs root, for network namespaces"
    if any(Path("/tmp") in place.parents for place in (REPOSITORY, Path(sys.prefix))):
        return "the code is below /tmp, which each host has for itself"
    name = f"try{os.getpid()}"
    tried = (["ip", "netns", "add", name], ["ip", "link", "add", name, "type", "bridge"])
    tried = (*tried, ["unshare", "--mount", "--pid", "--uts", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/mnt"])
    done = [subprocess.run(command, capture_output=True, text=True) for command in tried]
    subprocess.run(["ip", "link", "del", name], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return next((f"hosts cannot be made: {one.stderr.strip()}" for one in done if one.returncode), None)


WHY_NOT = why_not()
needs_hosts = pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))


@dataclass
class Process:
    """A command on a host."""

    host: "NetworkHost"
    popen: "subprocess.Popen[bytes]"
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float) -> int:
        """Return its exit code. AssertionError with its output if it does not end in time."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.host.name}: no end after {seconds} s:\n{self.output[-6000:]}") from None

    @property
    def first(self) -> psutil.Process:
        """The first process of its PID namespace, with its id outside the namespace."""
        return psutil.Process(self.popen.pid).children()[0]

    def processes(self) -> list[psutil.Process]:
        """All processes of the host."""
        try:
            return [self.first, *self.first.children(recursive=True)]
        except (IndexError, psutil.NoSuchProcess):
            return []


@dataclass
class NetworkHost:
    name: str
    address: str
    core: int  # of the machine, the only one that the host has
    place: Path  # of logs
    shared: Path | None
    hidden: Sequence[Path] = ()  # directories that are empty here
    replaced: dict[Path, Path] = field(default_factory=dict)  # files that are others here
    started: list[Process] = field(default_factory=list)

    def start(self, command: Sequence[str], **environment: str) -> Process:
        """Run `command` in separate namespaces, in the repository's directory."""
        number = len(self.started)
        log = self.place / f"{self.name}-{number}.log"
        home, quoted = "/tmp/home", shlex.quote
        mounts = [f"hostname {self.name}"]
        if self.shared:
            mounts.append(f"mount --bind {quoted(str(self.shared))} /mnt")
        mounts += [f"mount -t tmpfs tmpfs {each}" for each in ("/tmp", "/dev/shm")]
        mounts.append(f"mkdir {home}")
        if self.shared:
            mounts += [f"mkdir -p {quoted(str(self.shared))}", f"mount --move /mnt {quoted(str(self.shared))}"]
        mounts += [f"mount -t tmpfs tmpfs {quoted(str(each))}" for each in self.hidden]
        mounts += [f"mount --bind {quoted(str(new))} {quoted(str(old))}" for old, new in self.replaced.items()]
        script = " && ".join([*mounts, AND_THEN])
        inside = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
        with log.open("wb") as sink:
            popen = subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    self.name,
                    "taskset",
                    "-c",
                    str(self.core),
                    *inside,
                    "bash",
                    "-c",
                    script,
                    "bash",
                    *command,
                ],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, "COLUMNS": "1000", "HOME": home, **environment},
                start_new_session=True,
            )
        self.started.append(Process(self, popen, log))
        return self.started[-1]

    def plug(self, *, is_in: bool) -> None:
        """Connect or disconnect the host's network cable."""
        ip("-n", self.name, "link", "set", "eth0", "up" if is_in else "down")

    def end(self) -> None:
        """Kill all that runs here."""
        for process in self.started:
            for each in process.processes():
                try:
                    each.kill()
                except psutil.NoSuchProcess:
                    continue
            process.popen.kill()
            process.popen.wait()


@contextmanager
def network(count: int, place: Path, shared: Path | None) -> Iterator[list[NetworkHost]]:
    """Make `count` hosts on a bridge that share the directory `shared`, for the block."""
    tag = f"{os.getpid() % 10000}{time.monotonic_ns() % 1000:03d}"
    bridge, net = f"br{tag}", f"10.{77 + os.getpid() % 100}.{time.monotonic_ns() % 250}"
    hosts, cores = [], sorted(os.sched_getaffinity(0))
    place.mkdir(parents=True, exist_ok=True)
    ip("link", "add", bridge, "type", "bridge")
    try:
        ip("link", "set", bridge, "up")
        for number in range(count):
            name, cable = f"h{tag}n{number}", f"v{tag}n{number}"
            ip("netns", "add", name)
            core = cores[number % len(cores)]
            hosts.append(NetworkHost(name, f"{net}.{number + 1}", core, place, shared))
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", cable, "master", bridge, "up")
            ip("-n", name, "addr", "add", f"{net}.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
        yield hosts
    finally:
        for host in hosts:
            host.end()
            ip("netns", "del", host.name)
        ip("link", "del", bridge)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def torchrun(hosts: Sequence[NetworkHost], rank: int, *command: str, port: int = 29500) -> list[str]:
    """Return the command line that starts `command` with torchrun on the host of `rank`."""
    words = f"--nnodes {len(hosts)} --node_rank {rank} --master_addr {hosts[0].address} --master_port {port}"
    return [sys.executable, "-m", "torch.distributed.run", *words.split(), "--nproc_per_node", "1", *command]


def plainly(hosts: Sequence[NetworkHost], rank: int) -> dict[str, str]:
    """Return the environment variables of torchrun, as other launchers set them."""
    return {"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}


def kill(process: psutil.Process, number: int = signal.SIGKILL) -> None:
    process.send_signal(number)
