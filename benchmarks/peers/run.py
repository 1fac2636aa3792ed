"""One command for all peers: TRL, a plain Hugging Face loop and this package run the same work alternately on this
machine.

    python benchmarks/peers/run.py [--work demo ...] [--sides trl hf ours] [--rounds N] [--json OUT] [--append]
        [--steps N] [--variant NAME key=value ...]

The first run makes an environment for the peers, benchmarks/peers/.venv, from requirements.txt in this directory.
README.md explains the measurements and the table.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import peer_environment
import peer_table
import psutil
import works

from roll_opd.extras.graders.rewards.math_rule import is_right

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
PEERS = {"trl": HERE / "trl_loop.py", "hf": HERE / "hf_loop.py"}
LAUNCHER = REPOSITORY / "examples" / "start_onpolicy_distill_pipeline.py"
TRAINER = "ray::TrainWorker"  # process title of the student in our run
STOP_SECONDS = 30
POLL_SECONDS = 0.02
MEMORY_SECONDS = 5  # between two samples of the memory of all processes; a sample briefly stops a large process
GIB = 2**30


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the figures and print the table."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raise an exception, so that started processes are ended
    python = peer_environment.make() if set(options.sides) - {"ours"} else Path()
    result: dict[str, Any] = {"machine": machine(), "works": {}}
    if options.append and options.json.exists():
        result = json.loads(options.json.read_text())
    for name in options.work:
        runs = result["works"].setdefault(name, {})
        work = works.WORKS[name]
        work = replace(work, steps=options.steps or work.steps)
        for side, figures in measure(work, options, python):
            runs.setdefault(side, []).append(figures)
            if options.json:  # written after each run, so that a later failure loses no figures
                options.json.parent.mkdir(parents=True, exist_ok=True)
                written = {**result, "table": peer_table.figures(result)}
                options.json.write_text(json.dumps(written, indent=1) + "\n")
    print(peer_table.text(result))
    return 0


def measure(work: works.Work, options: argparse.Namespace, python: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every round of every side when it ends."""
    variants = {name: tuple(overrides) for name, *overrides in options.variant}
    sides = [side for side in options.sides if side in work.sides] + list(variants)
    with tempfile.TemporaryDirectory(prefix="peers-") as directory:
        described, overrides = works.make(work, Path(directory))
        for number in range(options.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):  # alternately, because a machine's speed drifts
                print(f"{work.title}: round {number + 1} of {options.rounds}, {side} ...", flush=True)
                out = Path(directory) / f"{side}-{number}"
                out.mkdir()
                if side in PEERS:
                    rows = out / "rows.jsonl"
                    command = [str(python), str(PEERS[side]), str(described), str(rows)]
                else:
                    rows = out / "peers" / "latest" / "metrics.jsonl"
                    command = [sys.executable, str(LAUNCHER), "--config_path=demo", "--config_name=onpolicy_distill"]
                    command += [*overrides, *variants.get(side, ()), f"output_dir={out}"]
                yield side, run(work, command, rows, out / "log", described)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", nargs="+", choices=works.WORKS, default=list(works.WORKS))
    parser.add_argument("--sides", nargs="*", choices=[*PEERS, "ours"], default=[*PEERS, "ours"])
    parser.add_argument(
        "--rounds", type=int, default=2, metavar="N", help="rounds of each side; the sides alternate (%(default)s)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="steps of a round (default: set by the work)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures of every step here")
    parser.add_argument("--append", action="store_true", help="add the rounds to the rounds in OUT")
    parser.add_argument(
        "--variant",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "key=value"),
        help="add a column: ours with these overrides",
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1 or (options.append and not options.json):
        parser.error("--rounds must be at least 1, and --append needs --json")
    if options.steps is not None and any(options.steps <= works.WORKS[name].warmup for name in options.work):
        parser.error("--steps must be more than the steps that do not count")
    return options


def run(work: works.Work, command: Sequence[str], rows: Path, log: Path, described: Path) -> dict[str, Any]:
    """Run one side until it has completed its steps or reached the accuracy; return the figures measured from
    outside."""
    seen: list[dict[str, Any]] = []
    done = False
    truths = json.loads(described.read_text())["truths"]
    memory = {"trainer_gib": 0.0, "all_gib": 0.0}
    with log.open("w") as output:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=REPOSITORY, start_new_session=True)
        try:
            for line in follow(rows, process, memory if work.memory else None):
                seen.append({**read_row(line, truths), "at": time.monotonic() - began})
                memory["trainer_gib"] = max(memory["trainer_gib"], line.get("peak_gib", 0.0))
                done = seen[-1]["step"] == work.steps
                done |= work.target is not None and (seen[-1]["accuracy"] or 0.0) >= work.target
                if done:
                    break
        finally:
            end(process)
    if not done:
        sys.exit(f"{' '.join(command)}\nended with exit code {process.returncode}:\n{log.read_text()[-4000:]}")
    memory["all_gib"] = max(memory.values())  # the high-water mark may lie between two samples
    return {"rows": seen, "warmup": work.warmup, **(memory if work.memory else {})}


def follow(path: Path, process: subprocess.Popen, memory: dict[str, float] | None) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file while they are written, until the process ends; also sample the memory of the
    process."""
    read, looked = 0, 0.0
    while True:
        ended = process.poll() is not None
        text = path.read_text() if path.exists() else ""
        lines = text[read : text.rfind("\n") + 1]
        read += len(lines)
        if memory is not None and not ended and (lines or time.monotonic() - looked > MEMORY_SECONDS):
            look_at_memory(process.pid, memory)
            looked = time.monotonic()
        yield from map(json.loads, lines.splitlines())
        if ended:
            return
        time.sleep(POLL_SECONDS)


def look_at_memory(pid: int, memory: dict[str, float]) -> None:
    """Raise `memory` to the current values: the sum over all processes, and the high-water mark of our training
    process.

    What several processes share is shared out in the sum. A peer, which is one process, tells its own high-water mark.
    """
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        trainers = [process.pid for process in processes if "".join(process.cmdline()[:1]).startswith(TRAINER)]
    except psutil.Error:  # one has just ended
        return
    whole = sum(kibibytes(process.pid, "smaps_rollup", "Pss:") for process in processes)
    peak = max((kibibytes(trainer, "status", "VmHWM:") for trainer in trainers), default=0)
    memory["all_gib"] = max(memory["all_gib"], whole * 1024 / GIB)
    memory["trainer_gib"] = max(memory["trainer_gib"], peak * 1024 / GIB)


def kibibytes(pid: int, file: str, name: str) -> int:
    """Return a figure of /proc in KiB; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def read_row(row: dict[str, Any], truths: Sequence[str]) -> dict[str, Any]:
    """Return a step of any side: seconds without validation and checkpoint, tokens, loss and accuracy."""
    if "seconds" in row:  # a peer's
        texts = row.get("texts")
        accuracy = sum(map(bool, map(is_right, texts, truths))) / len(truths) if texts else None
        return {name: row.get(name) for name in ("step", "seconds", "parts", "tokens", "loss")} | {"accuracy": accuracy}
    timed = {name: value for name, value in row.items() if name.startswith("time/") and name.count("/") == 1}
    parts = {name.removeprefix("time/"): value for name, value in timed.items()}
    whole = parts.pop("step", 0.0) - parts.pop("validate", 0.0) - parts.pop("checkpoint", 0.0)
    figures = {"step": int(row["step"]), "seconds": whole, "parts": parts}
    figures |= {"tokens": row.get("rollout/generated_tokens"), "loss": row.get("opd/reverse_kl/mean")}
    return {**figures, "accuracy": row.get("val_correct/all/mean")}


def end(process: subprocess.Popen) -> None:
    """Stop a run that has not ended, and wait until it has ended its processes."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def machine() -> dict[str, Any]:
    """Return a description of the machine."""
    versions = {name: version(name) for name in ("torch", "transformers", "megatron-core", "ray")}
    pins = peer_environment.pins()
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "python": platform.python_version(),
        "ours": versions,
        "peers": {name: pins[name] for name in ("trl", "torch", "transformers")},
    }


if __name__ == "__main__":
    sys.exit(main())
