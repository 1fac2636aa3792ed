"""Peak memory and time of token log-probs and their backward pass: chunked against eager log_softmax + gather.

    python benchmarks/logprob_memory.py [--tokens 4096] [--hidden 1024] [--vocab 151936] [--rounds 3] [--json OUT]

Each measurement runs in a separate process on one rank, in f32. Extra memory is the peak memory minus the memory
before. The inputs (hidden states, output embedding) and the gradient buffers of both computations already exist then,
as in training. On a CPU extra memory is the growth of the peak resident size, on a GPU of the allocator's peak.
Exit code 1 if the chunked computation needs more than 1/15 of the memory or more than 1.5 x the time (see --unbounded).
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

MOST_TIME = 1.5
LEAST_SAVING = 15.0
MIB = 2**20


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=3, help="processes for each computation; the median counts")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--unbounded", action="store_true", help="do not fail if a bound is exceeded")
    parser.add_argument("--way", choices=("eager", "chunked"), help=argparse.SUPPRESS)  # for a process that measures
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Run one computation once, in this process; return seconds, bytes and results."""
    import torch
    import torch.distributed as dist

    from roll_opd.megatron.logprobs_and_topk import vocab_parallel_logprobs
    from roll_opd.megatron.vocabulary import VocabShard

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    generator = torch.Generator().manual_seed(0)
    hidden_NE = torch.randn(options.tokens, options.hidden, generator=generator).to(device).requires_grad_()
    weight_VE = (0.05 * torch.randn(options.vocab, options.hidden, generator=generator)).to(device).requires_grad_()
    targets_N = torch.randint(options.vocab, (options.tokens,), generator=generator).to(device)
    incoming_N = torch.randn(options.tokens, generator=generator).to(device)
    # written once, so that the kernel has allocated their pages before the measurement
    hidden_NE.grad = torch.full_like(hidden_NE, 0.0).add_(0.0)
    weight_VE.grad = torch.full_like(weight_VE, 0.0).add_(0.0)
    torch.randn(64, 64, device=device).matmul(torch.randn(64, 64, device=device))  # the library's own start

    peak = _CudaPeak() if cuda else _ResidentPeak()
    with peak:
        start = time.perf_counter()
        if options.way == "eager":
            logits_NV = hidden_NE @ weight_VE.T
            logprobs_N = logits_NV.log_softmax(-1).gather(1, targets_N[:, None])[:, 0]
            del logits_NV  # favours the eager computation: in training, other code may keep the logits
        else:
            assert dist.group.WORLD is not None
            vocab = VocabShard(weight_VE, 1.0, options.vocab, dist.group.WORLD, weight_grad_VE=weight_VE.grad)
            logprobs_N = vocab_parallel_logprobs(hidden_NE, vocab, targets_N)
        logprobs_N.backward(incoming_N)
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    dist.destroy_process_group()
    return {
        "seconds": seconds,
        "extra_bytes": peak.extra_bytes,
        "logprobs": float(logprobs_N.double().sum()),
        "hidden_grad": float(hidden_NE.grad.double().norm()),
        "weight_grad": float(weight_VE.grad.double().norm()),
    }


class _ResidentPeak:
    """Growth of the peak resident memory of this process; read from the kernel, or sampled if the kernel does not
    report it."""

    extra_bytes: int

    def __enter__(self) -> "_ResidentPeak":
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the recorded peak
            self._watcher = None
        except OSError:
            self._highest, self._over = 0, threading.Event()
            self._watcher = threading.Thread(target=self._watch)
            self._watcher.start()
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if self._watcher:
            self._over.set()
            self._watcher.join()
        self.extra_bytes = (self._highest if self._watcher else _status("VmHWM")) - self._before

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self._highest = max(self._highest, _status("VmRSS"))


class _CudaPeak:
    """Growth of the CUDA allocator's peak."""

    extra_bytes: int

    def __enter__(self) -> "_CudaPeak":
        import torch

        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        self.extra_bytes = torch.cuda.max_memory_allocated() - self._before


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def compare(rounds: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Return the medians of both computations and their ratios. ValueError if their results differ."""
    eager, chunked = (
        {key: statistics.median(one[key] for one in rounds[way]) for key in rounds[way][0]}
        for way in ("eager", "chunked")
    )
    for key in ("logprobs", "hidden_grad", "weight_grad"):
        if abs(eager[key] - chunked[key]) > 1e-5 * abs(eager[key]):
            raise ValueError(f"{key}: {eager[key]} against {chunked[key]}; the two computations differ")
    return {
        "eager_seconds": eager["seconds"],
        "chunked_seconds": chunked["seconds"],
        "time_ratio": chunked["seconds"] / eager["seconds"],
        "eager_bytes": eager["extra_bytes"],
        "chunked_bytes": chunked["extra_bytes"],
        "memory_saving": eager["extra_bytes"] / chunked["extra_bytes"],
    }


def report(result: dict[str, float]) -> str:
    """Return a table of both computations, with the bounds."""
    lines = [f"{'':8}  {'extra memory':>14}  {'seconds':>8}"]
    for way in ("eager", "chunked"):
        lines.append(f"{way:8}  {result[f'{way}_bytes'] / MIB:>10.1f} MiB  {result[f'{way}_seconds']:>8.2f}")
    lines.append(f"memory 1/{result['memory_saving']:.1f} of eager (at most 1/{LEAST_SAVING:.0f})")
    lines.append(f"time {result['time_ratio']:.2f} x eager (at most {MOST_TIME})")
    return "\n".join(lines)


def main() -> int:
    """Measure both computations alternately and compare them."""
    options = parse()
    if options.way:
        print(json.dumps(measure(options)))
        return 0
    rounds: dict[str, list[dict[str, float]]] = {"eager": [], "chunked": []}
    sizes = [f"--{name}={getattr(options, name)}" for name in ("tokens", "hidden", "vocab")]
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    for _ in range(options.rounds):
        for way, found in rounds.items():
            command = [sys.executable, __file__, *sizes, "--way", way]
            answer = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
            if answer.returncode:
                print(answer.stderr[-4000:], file=sys.stderr)
                return 1
            found.append(json.loads(answer.stdout.splitlines()[-1]))
    result = compare(rounds)
    print(report(result))
    if options.json:
        setting = {name: getattr(options, name) for name in ("tokens", "hidden", "vocab", "rounds")}
        machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        text = json.dumps({**result, "settings": setting, "machine": machine, "rounds": rounds}, indent=2)
        options.json.write_text(text + "\n")
    missed = result["memory_saving"] < LEAST_SAVING or result["time_ratio"] > MOST_TIME
    return int(missed and not options.unbounded)


if __name__ == "__main__":
    sys.exit(main())
