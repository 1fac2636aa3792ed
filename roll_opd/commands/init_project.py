"""`roll-opd init DIR`: write a project from one of the package's examples: configurations, launcher, data, models."""

import argparse
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from roll_opd.base.command_line import DONE, USER_ERROR
from roll_opd.base.paths import REPOSITORY


@dataclass(frozen=True)
class Example:
    """The source of a project: a directory of `examples/`, and files of other examples."""

    what: str
    config: str  # the configuration that the launcher runs
    also: tuple[str, ...] = ()  # patterns of files of other examples, which the project has in the same place


EXAMPLES = {
    "start": Example(
        "distillation with a reward of your own, for two CPU cores",
        "distill.yaml",
        ("demo/data/train.jsonl", "demo/data/val.jsonl", "demo/models/student/*", "demo/models/teacher/*"),
    ),
    "demo": Example("each way of training, with the same small models", "onpolicy_distill.yaml"),
    "games": Example("FrozenLake and Sokoban, with a teacher, a reward, or both", "frozen_lake.yaml"),
    "cards": Example("one GPU of 24 GB, with or without LoRA; a node of 8; 64 GPUs", "card_24gb.yaml"),
    "qwen3-8B-onpolicy-distill-megatron": Example(
        "Qwen3-8B from Qwen3-32B, or from two teachers, on 16 GPUs", "onpolicy_distill_config.yaml"
    ),
    "qwen3-8B-rlvr-opd-megatron": Example("the same with a reward, on 8 GPUs", "rlvr_opd_config.yaml"),
}
PARTS = ("*.yaml", "my_*.py", "data/*.jsonl", "models/*/*")
GROUPS = {"demo": "models/demo_*.yaml"}  # configuration groups with an example's paths
LAUNCHER = """#!/bin/sh
# Plan and train. Words are overrides of keys: ./run.sh max_steps=5
cd "$(dirname "$0")" && exec roll-opd run {config} "$@"
"""
NEXT = """{directory} has the example {name}: {what}.

    cd {directory}
    roll-opd plan {config}
    ./run.sh
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("directory", metavar="DIR", help="a new or empty directory")
    known = "; ".join(f"{name}: {example.what}" for name, example in EXAMPLES.items())
    parser.add_argument("--example", default="start", choices=EXAMPLES, metavar="NAME", help=f"default: start. {known}")


def run(arguments: argparse.Namespace) -> int:
    """Write the project, print the next commands, and return the exit code."""
    directory, example = Path(arguments.directory).expanduser(), EXAMPLES[arguments.example]
    try:
        if directory.exists() and any(directory.iterdir()):
            print(f"roll-opd: {directory} is not empty; name a new directory", file=sys.stderr)
            return USER_ERROR
        write(directory, arguments.example)
    except OSError as error:
        why = error.strerror or error
        print(f"roll-opd: the project cannot be written to {directory}: {why}; name another directory", file=sys.stderr)
        return USER_ERROR
    names = {"name": arguments.example, "what": example.what, "config": example.config}
    print(NEXT.format(directory=shlex.quote(str(directory)), **names), end="", flush=True)
    return DONE


def write(directory: Path, name: str) -> None:
    """Write the files of an example into `directory`. May raise OSError.

    Paths in these files are relative to `directory`.
    """
    example, root = EXAMPLES[name], REPOSITORY / "examples"
    sources = {file: file.relative_to(root / name) for part in PARTS for file in (root / name).glob(part)}
    for pattern in example.also:
        sources |= {file: Path(*file.relative_to(root).parts[1:]) for file in root.glob(pattern)}
    if name in GROUPS:
        groups = REPOSITORY / "configs"
        sources |= {file: file.relative_to(groups) for file in groups.glob(GROUPS[name])}
    inside = {f"examples/{name}/", *(f"examples/{Path(pattern).parts[0]}/" for pattern in example.also)}
    for file, place in sources.items():
        target = directory / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".yaml":
            text = file.read_text(encoding="utf-8")
            for path in inside:
                text = text.replace(path, "")
            target.write_text(text, encoding="utf-8")
        else:
            shutil.copyfile(file, target)
    launcher = directory / "run.sh"
    launcher.write_text(LAUNCHER.format(config=example.config), encoding="utf-8")
    launcher.chmod(0o755)
