"""Four ranks that execute the jobs of `megatron_jobs` when tests request them, and write the results.

    megatron_worker.py ROOT

Megatron's engine patches torch on a CPU when it starts, so this never runs inside the test process.
"""

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path

import megatron_layouts as layouts
from megatron_ranks import Job, meet_anew
from megatron_registry import OPERATIONS, load_modules

from roll_opd.megatron import parallel

PR_SET_PDEATHSIG = 1  # of prctl(2)


def serve(process: int, requests: Connection, root: Path) -> None:
    """Execute the jobs of one rank until one fails; answer each with None or its traceback."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    while (job := requests.recv()) is not None:
        world = layouts.LAYOUTS[job["layout"]].world_size
        os.environ.update(RANK=str(process), WORLD_SIZE=str(world))
        try:
            meet_anew(root / f"port-of-{job['name']}")
            OPERATIONS[job["op"]](job, root)
            parallel.shutdown()
        except BaseException:
            requests.send(traceback.format_exc())
            raise
        requests.send(None)


class Ranks:
    """Four forks of this process, which has imported all necessary modules."""

    def __init__(self, root: Path) -> None:
        context = multiprocessing.get_context("fork")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(layouts.RANKS):
            here, there = context.Pipe()
            self.pipes.append(here)
            self.processes.append(context.Process(target=serve, args=(rank, there, root), daemon=True))
            self.processes[-1].start()
            there.close()

    def do(self, job: Job) -> str | None:
        """Execute a job; return None, or the reason of its failure."""
        waiting = dict(enumerate(self.pipes[: layouts.LAYOUTS[job["layout"]].world_size]))
        for pipe in waiting.values():
            pipe.send(job)
        errors: list[str] = []
        while waiting:  # where one rank fails, those that it has left waiting never answer
            ready = wait(list(waiting.values()), timeout=2 if errors else None)
            if not ready:
                break
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    answer = waiting.pop(rank).recv()
                except EOFError:
                    answer = "the process died"
                errors += [] if answer is None else [f"rank {rank}: {answer}"]
        return "\n".join(errors) or None

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def main() -> None:
    """Read jobs from standard input, one per line; write each result as JSON to standard output."""
    answers, root = os.fdopen(os.dup(1), "w"), Path(sys.argv[1])
    os.dup2(2, 1)  # what is printed goes to the log
    load_modules()
    ranks = Ranks(root)
    for line in sys.stdin:
        error = ranks.do(json.loads(line))
        if error:
            ranks.end()
            ranks = Ranks(root)
        print(json.dumps(error), file=answers, flush=True)
    ranks.end()


if __name__ == "__main__":
    main()
