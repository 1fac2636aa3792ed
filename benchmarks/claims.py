"""Published claims, measured: every claim is a directory of examples/claims; docs/evidence.md shows the results.

    python benchmarks/claims.py [NAME ...] [--seeds 1 2 3] [--again 4 5 6] [--task threes] [--engine loop]
        [--arms ARM ...] [--resume] [--output DIR]

Writes NAME.json and NAME.svg, with every run that was started, into the output directory (default output/claims; the
published files are in benchmarks/results/claims). Files of another task or engine have its name behind the claim's.
The engine `loop` trains in this process, `session` in the processes of a run. A claim is judged with `--seeds`, and
again with `--again`: by the inequalities of its paper (`holds` of its module), and by those that the page states
(`findings`; without this function they are the same). The exit code is 1 if a finding does not hold.
"""

import argparse
import importlib
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline_run import REPOSITORY, machine

CLAIMS = REPOSITORY / "examples" / "claims"
sys.path.insert(0, str(CLAIMS))

from results import Runs, cost, plot, table  # noqa: E402


def names() -> list[str]:
    """Return the names of the claims."""
    return sorted(path.parent.name for path in CLAIMS.glob("*/__init__.py"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the claims and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(names())}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--again", type=int, nargs="*", default=[], help="other seeds, judged separately")
    parser.add_argument("--task", default="threes", help="of examples/claims/make_chains.py (%(default)s)")
    parser.add_argument("--engine", choices=("loop", "session"), default="loop")
    parser.add_argument("--resume", action="store_true", help="keep the finished runs of the result file")
    parser.add_argument("--arms", nargs="+", help="only these, for a look; the claim is not judged then")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "output" / "claims", metavar="DIR")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(names()):
        parser.error(f"no claim {', '.join(sorted(unknown))}; known are {', '.join(names())}")
    found = [measure(name, options) for name in options.names or names()]
    files = options.output.glob("*.json")
    hours, memory = cost([json.loads(file.read_text(encoding="utf-8")) for file in files])
    print(f"all claims in {options.output}: {hours} CPU-hours, peak memory {memory} GiB")
    return 0 if all(found) else 1


def measure(name: str, options: argparse.Namespace) -> bool:
    """Run the arms of a claim with all seeds and write its files; return whether its findings hold."""
    from lab import train
    from make_chains import TASKS

    claim = importlib.import_module(name)
    arms = {arm: claim.ARMS[arm] for arm in options.arms or claim.ARMS}
    started = [
        {"arm": arm, "seed": seed}
        for number, seed in enumerate([*options.seeds, *options.again])
        for arm in arms
        if arms[arm].seeds is None or number < arms[arm].seeds
    ]
    result: dict[str, Any] = {
        "claim": (claim.__doc__ or "").splitlines()[0],
        "task": options.task,
        "engine": options.engine,
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "seeds": options.seeds,
        "started": started,
        "arms": {arm: settings(arms[arm]) for arm in arms},
        "runs": [],
    }
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / f"{'-'.join([name, *suffixes(options)])}.json"
    kept, peak = earlier(file) if options.resume else ({}, 0)
    with tempfile.TemporaryDirectory(prefix="claims-") as directory, engine_of(options, Path(directory)) as engine:
        for number, one in enumerate(started):
            result["runs"].append(kept.get((one["arm"], one["seed"]), {}))
            if result["runs"][number]:
                continue
            for run in train(engine, TASKS[options.task], one["arm"], arms[one["arm"]], one["seed"]):
                result["runs"][number] = asdict(run) | {key: result[key] for key in ("commit", "machine")}
                write(file, result)
            print(f"{run.arm}, seed {run.seed}: {json.dumps(run.curve[-1])}, {run.seconds} s", flush=True)
    bars = {arm: a.bar for arm, a in arms.items()}
    print(table(Runs(result["runs"], bars)))
    if not options.arms:
        result |= judged(claim, result, bars)
        file.with_suffix(".svg").write_text(plot(Runs(result["runs"], bars), claim.PANELS), encoding="utf-8")
        for title, key in (("claim", "holds"), ("page", "findings")):
            for ending in ("", "_again"):
                for text, value in result.get(f"{key}{ending}", {}).items():
                    print(f"{title}{ending.replace('_', ', ')}: {'holds' if value else 'DOES NOT HOLD'}: {text}")
    result["seconds"] = round(sum(run["seconds"] for run in result["runs"]), 1)
    result["peak_bytes"] = max(peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    write(file, result)
    return all(value for ending in ("", "_again") for value in result.get(f"findings{ending}", {}).values())


def settings(arm: Any) -> dict[str, Any]:
    """Return the fields of an arm that are numbers."""
    return {field: value for field, value in vars(arm).items() if isinstance(value, int | float)}


def judged(claim: ModuleType, result: dict[str, Any], bars: dict[str, float]) -> dict[str, Any]:
    """Return the figures and both verdicts of a claim, with the first seeds and, if there are any, with the others."""
    found: dict[str, Any] = {}
    for ending, first in (("", True), ("_again", False)):
        # arms of a search have runs with the first seeds only, so their runs count in both verdicts
        searched = {arm for arm, values in result["arms"].items() if "seeds" in values}
        chosen = [run for run in result["runs"] if (run["seed"] in result["seeds"]) == first or run["arm"] in searched]
        if {run["seed"] for run in chosen} - (set() if first else set(result["seeds"])):
            found[f"figures{ending}"] = claim.figures(Runs(chosen, bars))
            for key, verdict in (("holds", claim.holds), ("findings", getattr(claim, "findings", claim.holds))):
                found[f"{key}{ending}"] = verdict(found[f"figures{ending}"])
    return found


def earlier(file: Path) -> tuple[dict[tuple[str, int], dict[str, Any]], int]:
    """Return the finished runs of a result file by arm and seed, and its peak memory in bytes; {} and 0 without a file.

    A run without a machine has the machine of the file.
    """
    if not file.is_file():
        return {}, 0
    result = json.loads(file.read_text(encoding="utf-8"))
    runs = [run | {"machine": run.get("machine", result["machine"])} for run in result["runs"] if run.get("finished")]
    return {(run["arm"], run["seed"]): run for run in runs}, result.get("peak_bytes", 0)


def suffixes(options: argparse.Namespace) -> list[str]:
    """Return the options that differ from their defaults and are part of a file's name."""
    chosen = {options.task: "threes", options.engine: "loop"}
    return [value for value, default in chosen.items() if value != default]


@contextmanager
def engine_of(options: argparse.Namespace, directory: Path) -> Iterator[Any]:
    """Yield the engine with the task's models, which are made first if the repository does not have them."""
    import torch
    from make_chains import TASKS, make

    torch.set_num_threads(1)  # also while models are made
    models = CLAIMS / "assets"
    if not (models / f"{options.task}_teacher").is_dir():
        models = directory / "models"
        make(TASKS[options.task], models)
    if options.engine == "loop":
        from loop import Loop

        yield Loop(models, options.task)
    else:
        from session import opened

        with opened(models, options.task, directory) as engine:
            yield engine


def write(file: Path, result: dict[str, Any]) -> None:
    """Write the result; a run has one line in it. A process that is killed meanwhile leaves the earlier file."""
    runs = ",\n  ".join(json.dumps(run) for run in result["runs"])
    rest = json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=1)
    new = file.with_suffix(".new")
    new.write_text(f'{rest[:-2]},\n "runs": [\n  {runs}\n ]\n}}\n', encoding="utf-8")
    new.replace(file)


def commit() -> str:
    """Return the commit that was measured, with + if files differ from it."""
    git = ["git", "-C", str(REPOSITORY)]
    done = subprocess.run([*git, "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
