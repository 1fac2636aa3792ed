"""A broadcast between two processes on one card: gigabytes per second, or the words with which the backend refuses.

    python benchmarks/gpu/broadcast.py [--backend nccl] [--megabytes 256] [--json OUT]
    python benchmarks/gpu/broadcast.py --backend gloo      # on a CPU

NCCL may refuse two ranks on one device; weights then travel by CUDA handles or shared memory between processes of one
card, and NCCL needs two cards.
"""

import argparse
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROUNDS, SECONDS = 5, 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        context.Process(
            target=rank, args=(number, port, options.backend, options.megabytes, pipes[number][1]), daemon=True
        )
        for number in range(2)
    ]
    for each in ranks:
        each.start()
    deadline = time.monotonic() + SECONDS
    answers = [
        pipe.recv() if pipe.poll(max(0.0, deadline - time.monotonic())) else {"refused": "no answer"}
        for pipe, _ in pipes
    ]
    for each in ranks:
        each.terminate()
    found = {"backend": options.backend, "megabytes": options.megabytes, **answers[0]}
    print(json.dumps(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def rank(number: int, port: int, backend: str, megabytes: int, pipe: Any) -> None:
    """Broadcast a buffer from rank 0 to rank 1, both on the first device; send the figures, or the refusal."""
    import torch
    import torch.distributed as dist

    try:
        os.environ["NCCL_DEBUG"] = "WARN"
        device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
        dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=2)
        buffer = torch.full((megabytes * 10**6,), number, dtype=torch.uint8, device=device)
        seconds = []
        for _ in range(ROUNDS + 1):
            began = time.perf_counter()
            dist.broadcast(buffer, 0)
            if backend == "nccl":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        arrived = int(buffer.max().item()) == 0
        pipe.send({"gigabytes_a_second": megabytes / 1e3 / median(seconds[1:]), "arrived": arrived})
    except Exception as error:  # a refusal is the answer
        pipe.send({"refused": f"{type(error).__name__}: {error}"[-600:]})
    time.sleep(1)  # the other rank may still answer


if __name__ == "__main__":
    sys.exit(main())
