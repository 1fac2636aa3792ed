"""Supervisor, the first process in a sandbox: it runs test cases in forked children and reports their outcome.

The supervisor does not grade. Its input is a program, the input of the program, and a check without expected values. It
returns the output, the exit status, and the values that the check recorded.

The supervisor has no secrets, and its two pipes are not open in a child. It is the first process of its pid namespace,
so other processes of the namespace cannot kill it. It is not dumpable, so its memory and its files cannot be opened
through /proc.
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
from .cleaning import IS_INIT, close, empty, kill_all, read_exactly, write_all
from .watch import WorkerGone, watch

READY = b"ready"
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


def main(directory: str, *packages: str) -> None:
    """Serve requests on stdin and stdout until these are closed.

    Args:
        directory: the work directory.
        packages: directories from which programs may import.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a handler would make the first process killable
    libc = ctypes.CDLL(None)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        sys.exit("prctl(PR_SET_DUMPABLE) failed")
    if not IS_INIT:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    sys.path[:1] = []  # remove this package's directory
    sys.path += packages
    with suppress(WorkerGone, OSError):
        serve(os.dup(0), os.dup(1), directory)  # the children's pipes replace descriptors 0 and 1
    kill_all()
    if not IS_INIT:
        with suppress(OSError):
            empty(directory)
            os.rmdir(directory)
    os._exit(0)


def serve(requests: int, replies: int, directory: str) -> None:
    """Run the requested cases in a directory until the pipe is closed.

    The files of each case are removed after the case.
    """
    module = load_module()
    gc.freeze()  # keeps garbage collection in a child from copying pages
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
    """Run one case; return (wait status, reason, stdout, report).

    The wait status is None if the child was killed.
    """
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
