"""CPU seconds by part, sent and received bytes, and memory of the driver in a step, for numbers of sequences.

    python benchmarks/data_plane.py [--sequences 1000 10000] [--lengths fixed tail short] [--modes pure mixed topk full]
        [--steps 2] [--ranks 4] [--json OUT]

The driver is real: a launch of a demo configuration with rollout, roles, advantages, metrics, records and Ray. Engines,
ranks and reward workers are real processes without a model: they answer immediately with random numbers of the right
shapes (`synthetic_roles`). README.md explains the table.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lengths import LENGTHS, TOKENS
from pipeline_run import machine

ANSWERS = 8  # to a prompt
MODES = {  # mode -> (configuration, whether it is pure distillation, overrides)
    "pure": ("onpolicy_distill", True, ()),
    "topk": ("onpolicy_distill", True, ("opd_objective=topk", "opd_topk=64")),
    "full": ("onpolicy_distill", True, ("opd_objective=full",)),
    "mixed": ("rlvr_opd", False, ()),
}
STUDENT = {True: ("student_train", "student_infer"), False: ("actor_train", "actor_infer")}
CHUNK_TOKENS = 32_768  # of a teacher's micro-batch
UPDATES = 2  # updates per step; with more than one, old log-probs are computed


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each point in separate processes and print the table."""
    options = parse(arguments)
    results = []
    for mode in options.modes:
        for lengths in options.lengths:
            for sequences in options.sequences:
                point = {"mode": mode, "lengths": lengths, "sequences": sequences}
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    results.append(pool.apply(measure, (point, options.steps, options.ranks)))
                print(table(results[-1]), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        settings = {"steps": options.steps, "ranks": options.ranks, "answers": ANSWERS, "updates": UPDATES}
        whole = {"points": results, "settings": settings, "machine": machine()}
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=["fixed", "tail"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["pure", "mixed"])
    parser.add_argument("--steps", type=int, default=2, help="measured steps, after one more step (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="data-parallel ranks of each role (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures of every point here")
    options = parser.parse_args(arguments)
    least = ANSWERS * UPDATES * options.ranks
    if min(options.sequences) < least:
        parser.error(f"--sequences: at least {least}, of which each rank learns {ANSWERS} in each of {UPDATES} updates")
    return options


def overrides_of(mode: str, sequences: int, ranks: int, steps: int, directory: Path) -> list[str]:
    """Return the command line of a run with `sequences` sequences per step, or slightly fewer."""
    _, pure, own = MODES[mode]
    student, engines = STUDENT[pure]
    mini_batch = sequences // (UPDATES * ranks * ANSWERS) * ANSWERS  # of a rank
    mapping = f'"{list(range(ranks))}"'
    return [
        *(f"{role}.device_mapping={mapping}" for role in (student, engines, "teacher")),
        f"rollout_batch_size={mini_batch * UPDATES * ranks // ANSWERS}",
        f"num_return_sequences_in_group={ANSWERS}",
        f"{student}.training_args.per_device_train_batch_size={mini_batch}",
        f"{student}.training_args.gradient_accumulation_steps=1",
        f"teacher.max_tokens_per_microbatch_in_infer={CHUNK_TOKENS}",
        "parallel@teacher.strategy_args.strategy_config=single",
        f"num_gpus_per_node={ranks}",
        f"response_length={TOKENS}",
        f"max_steps={steps + 1}",
        "validation=null",
        "eval_steps=0",
        "save_steps=0",
        "teacher_preflight=false",
        f"output_dir={directory}",
        "exp_name=run",
        *own,
    ]


def measure(point: dict[str, Any], steps: int, ranks: int) -> dict[str, Any]:
    """Run one point in this process, which is the driver; return its figures."""
    from driver_cost import DriverCost
    from synthetic_roles import put_in_place

    from roll_opd.commands import run

    config, pure, _ = MODES[point["mode"]]
    cost = DriverCost()
    put_in_place(point["lengths"], cost)
    with tempfile.TemporaryDirectory(prefix="data_plane-") as directory:
        command = overrides_of(point["mode"], point["sequences"], ranks, steps, Path(directory))
        code = run.main("data plane", pure=pure, arguments=["--config_path", "demo", "--config_name", config, *command])
    if code:
        raise RuntimeError(f"the run of {point} ended with exit code {code}")
    return {**point, **cost.figures()}


def table(result: dict[str, Any]) -> str:
    """Return one point as text."""
    millions = result["tokens"] / 1e6
    lines = [
        f"{result['mode']}, {result['lengths']}: {result['sequences']:,} sequences, {millions:.2f} M response tokens",
        *(f"  {name:32} {seconds:8.3f} s CPU" for name, seconds in result["parts"].items()),
        f"  {'all threads of the driver':32} {result['cpu']:8.3f} s CPU, {result['cpu'] / millions:.3f} µs per token",
        f"  {'sent, received':32} {result['sent'] / 2**20:8.1f} MiB, {result['received'] / 2**20:.1f} MiB",
        f"  {'private memory, at the peak':32} {result['private_peak'] / 2**20:8.1f} MiB,"
        f" {result['private_before'] / 2**20:.1f} MiB before the first step",
        f"  {'shared with the object store':32} {result['shared_peak'] / 2**20:8.1f} MiB",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
