"""The best rates of this machine: products of large matrices, and memory copies.

    python benchmarks/machine_rates.py [--threads N] [--dtype fp32]

Measured on the first GPU if there is one, else on this number of threads. Prints the best of several rounds as JSON:
`flops` and `bytes` per second; bytes count reads and writes.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

ROUNDS = 5
SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}  # sizes of square matrices; the better rate counts
BUFFER_BYTES = {"cpu": 2**28, "cuda": 2**30}  # beyond any cache
CALLS = {"cpu": 1, "cuda": 20}  # a round
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def rates(threads: int, dtype: str) -> dict[str, float]:
    """Measure in a separate process; return `flops` and `bytes` per second, and `on_gpu`."""
    command = [sys.executable, __file__, "--threads", str(threads), "--dtype", dtype]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(answer.stdout)


def measure(threads: int, dtype: str) -> dict[str, float]:
    """Measure in this process."""
    import torch

    torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def fastest(call: Callable[[], object]) -> float:
        seconds = []
        for _ in range(ROUNDS + 1):  # the first round is a warm-up
            began = time.perf_counter()
            for _ in range(CALLS[device]):
                call()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append((time.perf_counter() - began) / CALLS[device])
        return min(seconds[1:])

    flops = 0.0
    for size in SIZES[device]:
        a, b = (torch.randn(size, size, device=device).to(getattr(torch, DTYPES[dtype])) for _ in range(2))
        out = torch.empty_like(a)
        flops = max(flops, 2 * size**3 / fastest(lambda a=a, b=b, out=out: torch.mm(a, b, out=out)))  # type: ignore[misc]
    x, y, z = (torch.ones(BUFFER_BYTES[device] // 4, device=device) for _ in range(3))
    copied = 2 * x.nbytes / fastest(lambda: x.copy_(y))
    triad = 3 * x.nbytes / fastest(lambda: torch.add(y, z, alpha=2.0, out=x))
    return {"flops": flops, "bytes": max(copied, triad), "on_gpu": device == "cuda"}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    options = parser.parse_args()
    print(json.dumps(measure(options.threads, options.dtype)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
