"""`roll-opd demo DIR`: write the demo's configurations, data and models into a directory."""

import argparse
import shlex
import shutil
import sys
from pathlib import Path

from roll_opd.base.command_line import DONE, USER_ERROR
from roll_opd.base.paths import REPOSITORY

DEMO = Path("examples/demo")
PARTS = ("*.yaml", "data/*.jsonl", "models/*/*")
MODELS = "configs/models/demo_*.yaml"  # configuration group of the demo's models
NEXT = """The demo is in {directory}: a student, a teacher, data, and a configuration for each way of training.

    cd {directory}
    roll-opd run distill onpolicy_distill.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("directory", metavar="DIR", help="a new or empty directory")


def run(arguments: argparse.Namespace) -> int:
    """Write the demo, print the next commands, and return the exit code."""
    directory = Path(arguments.directory).expanduser()
    try:
        if directory.exists() and any(directory.iterdir()):
            print(f"roll-opd: {directory} is not empty; name a new directory", file=sys.stderr)
            return USER_ERROR
        write(directory)
    except OSError as error:
        why = error.strerror or error
        print(f"roll-opd: the demo cannot be written to {directory}: {why}; name another directory", file=sys.stderr)
        return USER_ERROR
    print(NEXT.format(directory=shlex.quote(str(directory))), end="", flush=True)
    return DONE


def write(directory: Path) -> None:
    """Write the demo's files into `directory`. May raise OSError.

    Paths in these files are relative to `directory`.
    """
    sources = {file: file.relative_to(REPOSITORY / DEMO) for part in PARTS for file in (REPOSITORY / DEMO).glob(part)}
    sources |= {file: file.relative_to(REPOSITORY / "configs") for file in REPOSITORY.glob(MODELS)}
    for file, inside in sources.items():
        target = directory / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".yaml":
            text = file.read_text(encoding="utf-8").replace(f"{DEMO.as_posix()}/", "")
            target.write_text(text, encoding="utf-8")
        else:
            shutil.copyfile(file, target)
