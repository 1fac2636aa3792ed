"""The first process inside a sandbox: runs one test case after another, each in a forked child, and tells what came
out.

It stands alone (the sandbox has nothing but an interpreter), and it judges nothing: it is given a program, its input
and a check whose expected values have been taken out, and gives back output, exit status and what the check saw. It
keeps no secret, and the child holds neither of its pipes. As the first process of its pid namespace it cannot be
killed from within; it is not dumpable, so that its memory and files cannot be opened through /proc.
"""

import atexit
import collections.abc
import ctypes
import decimal
import gc
import json
import numbers
import os
import random
import resource
import select
import shutil
import signal
import struct
import sys
import threading
import time
import types
from contextlib import suppress

TICK = 0.01  # s between looks at the number of processes and their memory
REPORT_BYTES = 4 << 20
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
IS_INIT = os.getpid() == 1  # in a pid namespace of its own; without one, in unsafe mode
READY = b"ready"
PAGE = resource.getpagesize()
# names that ROLL gives to every program, in its order
STARS = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
PRELUDE = "".join(f"from {name} import *\n" for name in STARS) + "".join(
    f"import {name}\n" for name in STARS if name not in ("builtins", "typing")
)


class WorkerGone(Exception):
    """Nobody waits for an answer any more."""


def serve(requests, replies, directory):
    """Answer requests until their pipe ends. Cases run in `directory`, and what they leave in it is removed."""
    prelude = compile(PRELUDE, "prelude", "exec")
    exec(prelude, {})  # imports the modules once, before any fork
    gc.freeze()
    write(replies, READY)
    while True:
        head = read(requests, 4)
        if len(head) < 4:
            return
        request = json.loads(read(requests, struct.unpack(">I", head)[0]))
        status, reason, output, report = run(request, prelude, requests, replies)
        write(replies, json.dumps([status, reason]).encode())
        write(replies, output)
        write(replies, report)
        empty(directory)


def run(request, prelude, requests, replies):
    """One case: (wait status or None where it was killed, why, standard output, report)."""
    limits = request["limits"]
    stdin = request["stdin"].encode("utf-8", "surrogatepass")
    (input_end, feed), (out, output_end), (seen, report_end) = os.pipe(), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(input_end, 0)
            os.dup2(output_end, 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            report_end = os.dup2(report_end, 3, inheritable=False)
            os.closerange(4, 1024)
            os.setsid()
            confine(limits)
            play(request["program"], request["check"], prelude, report_end)
        finally:
            os._exit(1)
    for end in (input_end, output_end, report_end):
        os.close(end)
    for end in (feed, out, seen):
        os.set_blocking(end, False)
    try:
        return watch(child, limits, stdin, feed, out, seen, requests)
    finally:
        for end in (feed, out, seen):
            close(end)


def watch(child, limits, stdin, feed, out, seen, requests):
    """Feed and drain the child until it ends or breaks a limit; then everything that it started ends as well."""
    deadline = time.monotonic() + limits["wall_seconds"]
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
    looked = 0.0
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
        if now > deadline:
            reason = "time limit"
        elif any(len(got[end]) > room[end] for end in got):
            reason = "output limit"
        elif now - looked > TICK:
            looked = now
            reason = too_much(limits)
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


def feed_some(feed, stdin):
    """Write what the pipe takes; the rest of the input, empty where nobody reads."""
    try:
        return stdin[os.write(feed, stdin[:65536]) :]
    except BlockingIOError:
        return stdin
    except OSError:
        return b""


def drain(end, into, room):
    """Read what is there; False at the end of the pipe. One byte above `room` tells that there was more."""
    while len(into) <= room:
        try:
            part = os.read(end, min(1 << 16, room + 1 - len(into)))
        except BlockingIOError:
            return True
        if not part:
            return False
        into += part
    return True


def too_much(limits):
    """Which limit all processes together break. RLIMIT_NPROC does not hold for root's own, so they are counted."""
    if not IS_INIT:
        return None
    others, pages, own = 0, 0, resident("1")
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            others += 1
            pages += max(0, resident(name) - own)
    if others > limits["processes"]:
        return "process limit"
    return "memory limit" if pages * PAGE > limits["memory_mb"] << 20 else None


def resident(pid):
    try:
        with open("/proc/" + pid + "/statm", "rb") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError):
        return 0


def kill_all(child=None):
    """End and reap everything but this process."""
    if IS_INIT:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        return
    for _ in range(1000):  # without a pid namespace: whatever has become a child of this subreaper, again and again
        try:
            with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
                pids = [int(pid) for pid in file.read().split()]
        except OSError:
            pids = [child] if child else []
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def empty(directory):
    """Remove what a case left, so that the next finds the directory as this one did. What cannot be removed (a tree
    that is too deep) stays until the sandbox ends.
    """
    with suppress(OSError, RecursionError):
        os.chmod(directory, 0o700)
        for entry in os.scandir(directory):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)


def confine(limits):
    """The limits of the child and of what it starts."""
    memory, disk, cpu = limits["memory_mb"] << 20, limits["disk_mb"] << 20, limits["cpu_seconds"]
    for what, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_FSIZE, disk, disk),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_NPROC, limits["processes"] + 1, limits["processes"] + 1),
    ):
        if what == resource.RLIMIT_NPROC and not IS_INIT:
            continue  # outside a user namespace it would count the user's own processes
        resource.setrlimit(what, (soft, hard))
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def play(program, check, prelude, report_end, exit=os._exit, write=os.write):
    """The child: the program, then the check; never returns. Where there is a check the program is a module that
    somebody imports, so that what stands under `__name__ == "__main__"` does not wait for an input.
    """
    random.seed(0)
    sys.setrecursionlimit(600_000)  # as ROLL does; memory is the limit
    module = types.ModuleType("__main__" if check is None else "program")
    sys.modules[module.__name__] = module
    space = module.__dict__
    seen = []
    code = 1
    report = {}
    try:
        exec(prelude, space)
        space.update(exit=sys.exit, quit=sys.exit)
        exec(compile(program, "program.py", "exec", dont_inherit=True), space)
        if check is not None:
            space["_seen"] = lambda key, value: seen.append([key, plain(value)])
            exec(compile(check, "check.py", "exec", dont_inherit=True), space)
            report = {"seen": seen}
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        report = {"error": "SystemExit"}
    except BaseException as error:
        report = {"error": type(error).__name__}
    try:
        if check is not None:
            write_all(report_end, json.dumps(report).encode(), write)
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:
        report, code = {"error": type(error).__name__}, 1
    if check is None:
        write_all(report_end, json.dumps(report).encode(), write)
    exit(code & 255)


def plain(value, depth=0):
    """A value as JSON that keeps its type's family; [] for what cannot be told. The other half is values.py."""
    if depth > 100:
        return []
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else ["s", str(value)]
    if isinstance(value, int):
        return ["i", hex(value)]
    if isinstance(value, float):
        return ["f", float(value).hex()]
    if isinstance(value, complex):
        return ["c", value.real.hex(), value.imag.hex()]
    if isinstance(value, bytes | bytearray):
        return ["b", value.hex()]
    if isinstance(value, decimal.Decimal):
        return ["d", str(value)]
    if isinstance(value, numbers.Rational):
        return ["q", hex(value.numerator), hex(value.denominator)]
    if isinstance(value, collections.abc.Mapping):
        return ["m", [[plain(key, depth + 1), plain(item, depth + 1)] for key, item in value.items()]]
    for kind, family in (("l", list), ("t", tuple), ("e", collections.abc.Set)):
        if isinstance(value, family):
            return [kind, [plain(item, depth + 1) for item in value]]
    return []


def read(end, count):
    parts = bytearray()
    while len(parts) < count:
        part = os.read(end, min(count - len(parts), 1 << 20))
        if not part:
            break
        parts += part
    return bytes(parts)


def write(end, data):
    write_all(end, struct.pack(">I", len(data)) + data, os.write)


def write_all(end, data, write):
    while data:
        data = data[write(end, data) :]


def close(end):
    """A pipe that may be closed already."""
    with suppress(OSError):
        os.close(end)


def main():
    directory = sys.argv[1]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its handler would make even the first process killable
    sys.path.pop(0)  # the directory of this file
    libc = ctypes.CDLL(None)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        sys.exit("prctl(PR_SET_DUMPABLE) failed")
    if not IS_INIT:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with suppress(WorkerGone, BrokenPipeError):
        serve(os.dup(0), os.dup(1), directory)  # 0 and 1 become the children's own pipes
    kill_all()
    empty(directory)
    if not IS_INIT:
        os.rmdir(directory)
    os._exit(0)


if __name__ == "__main__":
    main()
