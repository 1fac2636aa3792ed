"""The first process inside a sandbox: runs one test case after another, each in a forked child, and tells what came
out.

It judges nothing: it is given a program, its input and a check whose expected values have been taken out, and gives
back output, exit status and what the check saw. It keeps no secret, and the child holds neither of its pipes. As the
first process of its pid namespace it cannot be killed from within; it is not dumpable, so that its memory and files
cannot be opened through /proc.
"""

import ctypes
import gc
import json
import os
import signal
import struct
import sys
import types
from contextlib import suppress
from typing import Any

from .child import load_module, play
from .cleaning import IS_INIT, empty, kill_all
from .pipes import close, read_exactly, write_all
from .watch import WorkerGone, watch

READY = b"ready"
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


def main(directory: str, *packages: str) -> None:
    """Serve standard input and output until their other end is closed. `packages`: where programs may import from."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its handler would make even the first process killable
    libc = ctypes.CDLL(None)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        sys.exit("prctl(PR_SET_DUMPABLE) failed")
    if not IS_INIT:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    sys.path[:1] = []  # where this package is
    sys.path += packages
    with suppress(WorkerGone, OSError):
        serve(os.dup(0), os.dup(1), directory)  # 0 and 1 become the children's own pipes
    kill_all()
    if not IS_INIT:
        with suppress(OSError):
            empty(directory)
            os.rmdir(directory)
    os._exit(0)


def serve(requests: int, replies: int, directory: str) -> None:
    """Answer requests until their pipe ends. Cases run in `directory`, and what they leave in it is removed."""
    module = load_module()
    gc.freeze()  # a child that collects garbage copies no page of what is here already
    write_frames(replies, READY)
    while True:
        head = read_exactly(requests, 4)
        if len(head) < 4:
            return
        request = json.loads(read_exactly(requests, struct.unpack(">I", head)[0]))
        status, reason, output, report = run(request, module, directory, requests)
        write_frames(replies, json.dumps([status, reason]).encode(), output, report)
        empty(directory)


def run(request: dict[str, Any], module: types.ModuleType, directory: str, requests: int) -> tuple[Any, ...]:
    """Run one case; return (wait status or None where it was killed, why, standard output, report)."""
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
            play(module, request["before"], request["program"], request["check"], limits, report_end)
        finally:
            os._exit(1)
    for end in (input_end, output_end, report_end):
        os.close(end)
    for end in (feed, out, seen):
        os.set_blocking(end, False)
    try:
        return watch(child, limits, directory, stdin, feed, out, seen, requests)
    finally:
        for end in (feed, out, seen):
            close(end)


def write_frames(end: int, *frames: bytes) -> None:
    write_all(end, b"".join(struct.pack(">I", len(frame)) + frame for frame in frames))
