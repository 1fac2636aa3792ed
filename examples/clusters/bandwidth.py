"""Measure the bandwidth of all-reduces over the hosts of a run, with the run's network and environment variables.

    torchrun --nnodes 2 --node_rank R --master_addr A --nproc_per_node 8 examples/clusters/bandwidth.py [--mib N]

Uses NCCL on GPUs, else gloo. Bus bandwidth is defined as in nccl-tests: 2 (n - 1) / n times the bytes of the buffer,
divided by the seconds of one all-reduce over n ranks. Compare it with the speed of the slowest link.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist

WARM_UP = 3  # not timed, as the first calls set up connections


def bus_gigabytes(mebibytes: int, repeats: int) -> float:
    """Return the bus bandwidth of all-reduces of a buffer, in 10^9 bytes per second. Collective."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    buffer = torch.ones(mebibytes * 2**20 // 4, dtype=torch.float32, device=device)
    for _ in range(WARM_UP):
        dist.all_reduce(buffer, op=dist.ReduceOp.MAX)
    _wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(buffer, op=dist.ReduceOp.MAX)
    _wait(device)
    seconds = (time.perf_counter() - began) / repeats
    ranks = dist.get_world_size()
    return 2 * (ranks - 1) / ranks * buffer.nbytes / seconds / 1e9


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description="bus bandwidth of an all-reduce over all ranks")
    parser.add_argument("--mib", type=int, default=1024, help="size of the buffer, about the size of gradients")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    speed = bus_gigabytes(options.mib, options.repeats)
    if dist.get_rank() == 0:
        name = f"{dist.get_world_size()} ranks, {dist.get_backend()}, {options.mib} MiB"
        print(f"{name}: {speed:.2f} GB/s bus bandwidth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
