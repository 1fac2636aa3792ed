"""The training engine on one NVIDIA GPU: comparison of its numbers with Hugging Face, and its speed.

    python benchmarks/gpu/measure.py [--shapes 0.6B 1.7B 4B 8B] [--parts numerics train teacher export head]
        [--json OUT]
    python benchmarks/gpu/measure.py --device cpu --shapes tiny      # the same code, in seconds, on a CPU

It needs torch, megatron-core, transformers and this package, but not vLLM, Ray or a network. If Transformer Engine is
installed, its layers are used. Models have Qwen3's shapes and random weights. Exit code 1 if a number is outside its
bound or a part failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from shapes import SHAPES  # noqa: E402

PARTS = ("numerics", "train", "teacher", "export", "head")
DTYPES = ("fp32", "bf16")
PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine", "flash-attn", "fla-core", "numpy")
# f32: only rounding differs, because kernels on an A100 or H100 sum in another order than Hugging Face's
MOST_OFF_F32 = {"logprob_max": 1e-4, "loss": 1e-4, "gradient_norm": 1e-3}
# bf16: at most the distance of Hugging Face's bf16 from its f32, plus a tenth for chance
MOST_OFF_BF16 = {"times_theirs": 1.1, "loss": 0.1, "gradient_norm": 0.1}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables, and write all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6B", "1.7B", "4B", "8B"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--numerics-of", nargs="*", choices=SHAPES, help="shapes whose numbers are compared (default: the first)"
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="in which numbers are compared")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--peak-tflops", type=float, help="peak rate of the device, for the MFU (default: measured)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    compared = options.numerics_of if options.numerics_of is not None else options.shapes[:1]
    found: dict[str, Any] = {"versions": versions(), "peak_flops": 1e12 * (options.peak_tflops or 0) or peak()}
    for name in options.shapes:
        parts = [part for part in options.parts if part != "numerics" or name in compared]
        print(f"{name}: {' '.join(parts)} ...", file=sys.stderr, flush=True)
        found[name] = measured(name, parts, options.device, options.dtypes)
    print("\n".join(report(found, options.shapes)))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(problems(found, options.shapes)))


def measured(shape: str, parts: Sequence[str], device: str, dtypes: Sequence[str] = DTYPES) -> dict[str, Any]:
    """Return the engine's figures of a shape; on a GPU each part has a separate process, so that memory is measured
    separately."""
    groups = [[part] for part in parts] if device == "cuda" else [list(parts)]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        asked = ["--shape", shape]
        extra = ["--numerics"] if "numerics" in parts else []
        _, failed = output(["reference.py", directory, *asked, "--device", device, *extra], device)
        if failed:
            return {part: {"failed": failed} for part in parts}
        for group in groups:
            began = time.perf_counter()
            said, failed = output(["engine.py", directory, *asked, "--parts", *group, "--compared", *dtypes], device)
            took = f"{time.perf_counter() - began:.0f} s{', FAILED' if failed else ''}"
            print(f"{shape} {' '.join(group)}: {took}", file=sys.stderr, flush=True)
            found |= {part: {"failed": failed} for part in group} if failed else json.loads(said.splitlines()[-1])
    return found


def output(command: Sequence[str], device: str) -> tuple[str, str]:
    """Run a file of this directory; return its output, and the last lines of its errors if it failed."""
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, str(HERE / command[0]), *command[1:]], capture_output=True, text=True, env=environment
    )
    return done.stdout, done.stderr[-2000:] if done.returncode else ""


def peak() -> float:
    """Return the FLOPs per second of the fastest product of bf16 matrices on this device."""
    from machine_rates import rates

    return rates(len(os.sched_getaffinity(0)), "bf16")["flops"]


def versions() -> dict[str, str]:
    """Return the versions of the packages that affect numbers and speed."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "-"
    return found


def problems(found: Mapping[str, Any], shapes: Sequence[str]) -> list[str]:
    """Return a message for each number outside its bound and each failed part. Too little memory is not a failure."""
    lines = []
    for shape in shapes:
        for part, value in found[shape].items():
            if "failed" in value:
                lines.append(f"{shape} {part}: {value['failed'].strip().splitlines()[-1]}")
        for dtype, of in found[shape].get("numerics", {}).items():
            lines += [f"{shape} {dtype}: {text}" for text in off(dtype, of)] if isinstance(of, Mapping) else []
    return lines


def off(dtype: str, found: Mapping[str, Any]) -> list[str]:
    """Return a message for each number of a dtype that is outside its bound."""
    lines = [f"{name} is false" for name, value in found.items() if value is False]
    most = MOST_OFF_F32 if dtype == "fp32" else MOST_OFF_BF16
    for way, name in (("deterministic", "logprob"), ("fast", "fast")):
        largest, mean = found[f"{name}_max"], found[f"{name}_mean"]
        if dtype == "fp32" and largest > most["logprob_max"]:
            lines.append(f"a {way} log-prob is off by {largest:.2g}")
        if dtype == "bf16" and mean > most["times_theirs"] * found["theirs_mean"]:
            lines.append(f"{way} log-probs are off by {mean:.2g}, Hugging Face's by {found['theirs_mean']:.2g}")
    for objective, values in found.items():
        for name, value in values.items() if isinstance(values, Mapping) else ():
            if value > most[name]:
                lines.append(f"{objective}: {name} has a relative error of {value:.2g}")
    return lines


def report(found: Mapping[str, Any], shapes: Sequence[str]) -> list[str]:
    """Return the tables."""
    lines = [f"{found[shapes[0]].get('device', '?')}, {', '.join(f'{n} {v}' for n, v in found['versions'].items())}"]
    lines += [
        f"{'':>6} {'train tok/s':>12} {'MFU':>6} {'teacher tok/s':>14} {'MFU':>6} {'export GB/s':>12} {'to host':>8}"
    ]
    for shape in shapes:
        of = found[shape]
        cells = [cell(of, part, found["peak_flops"]) for part in ("train", "teacher")]
        sent = of.get("export", {})
        rates = [f"{sent[f'{way}_bytes_a_second'] / 1e9:.1f}" if "bytes" in sent else "-" for way in ("device", "host")]
        lines.append(f"{shape:>6} {cells[0]:>19} {cells[1]:>21} {rates[0]:>12} {rates[1]:>8}")
    for shape in shapes:
        kernel = found[shape].get("head", {})
        for way in ("eager", "chunked") if "tokens" in kernel else ():
            one = kernel[way]
            memory = "-" if one["extra_bytes"] is None else f"{one['extra_bytes'] / 2**20:.0f} MiB"
            text = f"{shape:>6} {way:>8} log-probs: {one['seconds']:.4f} s, {memory} more, off by {one['off']:.2g}"
            lines.append(text)
    return [*lines, *(problems(found, shapes) or ["all numbers are within their bounds"])]


def cell(found: Mapping[str, Any], part: str, peak_flops: float) -> str:
    """Return tokens per second and the share of the device's FLOPs, or the reason for their absence."""
    value = found.get(part, {})
    if "tokens_a_second" not in value:
        return "too large" if "out_of_memory" in value else "-"
    return f"{value['tokens_a_second']:.0f} {100 * value['flops_a_second'] / peak_flops:>5.1f}%"


if __name__ == "__main__":
    sys.exit(main())
