"""What every command that reads a configuration takes, and the exit codes of all commands."""

import argparse
import gc
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from roll_opd.base.failures import ConfigError

DONE, FAILED, USER_ERROR, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
YAML = (".yaml", ".yml")
WANTED = "give a YAML file, or --config_path DIR --config_name NAME"
# of pipelines that roll out, the arguments of `load_plan`; others are known to the configuration by their name
ENTRIES: dict[str, dict[str, Any]] = {
    "distill": {"pure": True},
    "rlvr": {"pure": False},
    "agentic": {"pipeline": "agentic"},
}
SIZES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "dp": "data"}  # parallel sizes of `score`
# the file into which a run writes where its directory is, for `roll_opd.run`, which starts it
RUN_DIRECTORY_FILE = "ROLL_OPD_RUN_DIRECTORY_FILE"


def safe_output() -> None:
    """Have what the terminal's encoding lacks printed as an escape, rather than end the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def without_collections() -> Iterator[None]:
    """Have Python collect garbage only where it is told to.

    What a command imports and what a step's samples are made of stays: collections that come by themselves find
    nothing, and took a sixth of the driver's time in a step of 8,192 samples.
    """
    were_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if were_on:
            gc.enable()


def add_config_arguments(parser: argparse.ArgumentParser, takes_pipeline: bool = True) -> None:
    """Add what every command that reads a configuration takes: it is a YAML file, or as in ROLL a directory and a name.

    With `takes_pipeline` the first word may name the pipeline; without it the configuration tells.
    """
    pipeline = f"[{'|'.join(ENTRIES)}|sft|dpo|MODULE] " if takes_pipeline else ""
    parser.usage = (
        f"%(prog)s [options] {pipeline}CONFIG.yaml [key=value ...]\n"
        f"       %(prog)s [options] {pipeline}--config_path DIR --config_name NAME [key=value ...]"
    )
    parser.add_argument("--config", metavar="FILE", help="the configuration's file, as the word CONFIG.yaml")
    parser.add_argument("--config_path", metavar="DIR", help="directory, from here, examples/ or beside the script")
    parser.add_argument("--config_name", metavar="NAME", help="YAML file in it, with or without .yaml")
    pipeline = "the pipeline (without it the configuration tells), " if takes_pipeline else ""
    what = f"{pipeline}the configuration's file, and overrides of it: key=value, +key=value, ~key"
    parser.add_argument("overrides", nargs="*", metavar="words", help=what)


def asked_pipeline(parsed: argparse.Namespace) -> dict[str, Any]:
    """Take the pipeline from the words of a command line; return what `load_plan` is told of it, if there is one."""
    first = parsed.overrides[0] if parsed.overrides else ""
    if not first or not _is_name(first):
        return {}
    if (_named_yaml(first) or os.path.isfile(first)) and not _names_configuration(parsed):
        return {}  # meant as the configuration, of which `configuration` says what its name lacks
    parsed.overrides = parsed.overrides[1:]
    return ENTRIES.get(first, {"pipeline": first})


def configuration(parsed: argparse.Namespace) -> tuple[str, str, list[str]]:
    """Return directory, name and overrides of the configuration that a command line names, or raise ConfigError."""
    files = [*filter(None, [parsed.config]), *(word for word in parsed.overrides if _is_file(word))]
    overrides = [word for word in parsed.overrides if not _is_file(word)]
    named = [option for option in ("config_path", "config_name") if getattr(parsed, option) is not None]
    if len(files) > 1:
        raise ConfigError([f"{' and '.join(files)} are {len(files)} configurations; a run takes one"])
    if files and named:
        raise ConfigError([f"{files[0]} and --{named[0]} both name the configuration; give one of them"])
    if files:
        directory, name = os.path.split(files[0])
        return directory or ".", name, overrides
    if len(named) < 2:
        if named:
            raise ConfigError([f"--{named[0]} alone names no configuration; {WANTED}"])
        raise ConfigError([f"no configuration is named{_advice(next(filter(_is_name, overrides), None))}"])
    return parsed.config_path, parsed.config_name, overrides


def _advice(word: str | None) -> str:
    """Say what to write where no configuration is named; `word` may have been meant as its name."""
    if word is None:
        return f"; {WANTED}"
    near = _named_yaml(word)
    return f": {word!r} is no .yaml file; {f'write {near}' if near else WANTED}"


def _named_yaml(word: str) -> str | None:
    """Return the YAML file that a word names without its ending, as --config_name may; None where there is none."""
    return next((word + ending for ending in YAML if os.path.isfile(word + ending)), None)


def _names_configuration(parsed: argparse.Namespace) -> bool:
    options = (parsed.config, parsed.config_path, parsed.config_name)
    return any(options) or any(map(_is_file, parsed.overrides))


def _is_name(word: str) -> bool:
    """Whether a word of the command line is neither an override nor a YAML file."""
    return "=" not in word and not word.startswith("~") and not word.endswith(YAML)


def _is_file(word: str) -> bool:
    """Whether a word of the command line is a configuration's file; `key=file.yaml` is an override."""
    return word.endswith(YAML) and ("=" not in word or os.path.isfile(word))


def tell_run_directory(path: str | os.PathLike[str]) -> None:
    """Write where a run's directory is into the file that the environment names, if it names one.

    It names none afterwards: a run that this one starts, in a workflow say, is another's.
    """
    if file := os.environ.pop(RUN_DIRECTORY_FILE, None):
        with open(file, "w", encoding="utf-8") as told:
            told.write(os.path.realpath(path))
