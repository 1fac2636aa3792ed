"""Monitor of one case: it feeds the input, reads the output and enforces the limits."""

import os
import select
import time

from .cleaning import IS_INIT, SHARED_MEMORY, close, drain, feed_some, kill_all

TICK = 0.01  # seconds between checks of the limits
REPORT_BYTES = 4 << 20
PATIENCE = 3  # maximum multiple of the wall time on a busy machine
PAGE = os.sysconf("SC_PAGESIZE")
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")  # clock ticks per second of CPU time


class WorkerGone(Exception):
    """The worker that sent the request has closed its pipe."""


def watch(
    child: int, limits: dict[str, int], directory: str, stdin: bytes, feed: int, out: int, seen: int, requests: int
) -> tuple[int | None, str, bytes, bytes]:
    """Wait until the child ends or exceeds a limit, and then kill all processes of the case.

    Until then, the child gets its input, and its output is read. Returns (wait status, reason, stdout, report). The
    wait status is None if the child was killed.
    """
    started = time.monotonic()
    room = {out: limits["output_mb"] << 20, seen: REPORT_BYTES}
    got = {out: bytearray(), seen: bytearray()}
    poll = select.poll()
    for end in got:
        poll.register(end, select.POLLIN)
    poll.register(requests, select.POLLHUP)
    pidfd = os.pidfd_open(child)
    poll.register(pidfd, select.POLLIN)
    if stdin:
        poll.register(feed, select.POLLOUT)
    else:
        close(feed)
    status = reason = None
    checked = started
    while reason is None:
        for end, _ in poll.poll(TICK * 1000):
            if end == requests:
                raise WorkerGone
            elif end == feed:
                stdin = feed_some(feed, stdin)
                if not stdin:
                    poll.unregister(feed)
                    close(feed)
            elif end in got and not drain(end, got[end], room[end]):
                poll.unregister(end)
        now = time.monotonic()
        if any(len(got[end]) > room[end] for end in got):
            reason = "output limit"
        elif now - checked > TICK:
            checked = now
            reason = broken_limit(limits, directory)
            if reason is None and is_late(child, now - started, limits["wall_seconds"]):
                reason = "time limit"
        if reason is None:
            ended, ended_status = os.waitpid(child, os.WNOHANG)
            if ended:
                status, reason = ended_status, "ended"
    kill_all(child if status is None else None)
    os.close(pidfd)
    for end in got:
        drain(end, got[end], room[end])
        if len(got[end]) > room[end]:
            reason = "output limit"
    return status, reason, bytes(got[out][: room[out]]), bytes(got[seen][: room[seen]])


def is_late(child: int, seconds: float, wall_seconds: float) -> bool:
    """Return whether a case has exceeded its wall time.

    The time in which the child waits for a CPU does not count. However, the total time must not exceed `PATIENCE` times
    the wall time.
    """
    if seconds <= wall_seconds:
        return False
    try:
        with open(f"/proc/{child}/schedstat", "rb") as file:
            waited = int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):  # not supported by the kernel
        waited = 0.0
    return seconds - waited > wall_seconds or seconds > PATIENCE * wall_seconds


def broken_limit(limits: dict[str, int], directory: str) -> str | None:
    """Return the limit that all processes of the case together exceed, or None.

    This is checked here, because the kernel does not enforce such limits. Its limits apply per process, RLIMIT_NPROC
    does not apply to root, and no limit bounds the number of files.
    """
    if not IS_INIT:
        return None
    tasks, pages, ticks, own = 0, 0, 0, usage("1")[1]
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            threads, resident, used = usage(name)
            tasks += threads
            pages += max(0, resident - own)  # without pages shared with this process
            ticks += used
    if tasks > limits["processes"]:
        return "process limit"
    if pages * PAGE > limits["memory_mb"] << 20:
        return "memory limit"
    if ticks > (limits["cpu_seconds"] + 1) * CLOCK_TICKS:  # a single process hits its own limit one second earlier
        return "time limit"
    for place in (directory, SHARED_MEMORY):
        disk = os.statvfs(place)
        if disk.f_files - disk.f_ffree > limits["files"]:
            return "disk limit"
    return None


def usage(pid: str) -> tuple[int, int, int]:
    """Return (threads, resident pages, CPU ticks) of a process.

    The CPU ticks include those of its reaped children.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # from field 3 of proc_pid_stat(5)
    except OSError:
        return 0, 0, 0
    return int(fields[17]), int(fields[21]), sum(map(int, fields[11:15]))
