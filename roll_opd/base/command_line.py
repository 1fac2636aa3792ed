"""Exit codes, and the arguments that all commands with a configuration share."""

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
HOW_TO_NAME = "give a YAML file, or --config_path DIR --config_name NAME"
# pipeline with rollouts -> arguments of `load_plan`; for other pipelines, the argument is the pipeline's name
ENTRIES: dict[str, dict[str, Any]] = {
    "distill": {"pure": True},
    "rlvr": {"pure": False},
    "agentic": {"pipeline": "agentic"},
}
SIZES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "dp": "data"}  # parallel sizes of `score`
# file to which a run writes its directory, for `roll_opd.run`, which starts the run
RUN_DIRECTORY_FILE = "ROLL_OPD_RUN_DIRECTORY_FILE"
RUN_ID = "ROLL_OPD_RUN"  # environment variable: id of the run over all its attempts
# socket of the session (`roll_opd.open`) that starts a run and requests its steps
SESSION_SOCKET = "ROLL_OPD_SESSION_SOCKET"
SESSION_INTERRUPT = "interrupt"  # message of a session whose caller interrupts a call


def safe_output() -> None:
    """Make stdout and stderr escape characters that their encoding does not have, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def use_utf8() -> None:
    """Restart this process in Python's UTF-8 mode if names of files have another encoding, as with LC_ALL=C.

    Names with other letters could not be written. The processes of a run inherit the mode.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable automatic garbage collection inside the block. Explicit collections still work.

    Automatic collections find nothing to free, because imported modules and the samples of a step stay alive. In a step
    of 8,192 samples, they took a sixth of the driver's time.
    """
    were_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if were_on:
            gc.enable()


def add_config_arguments(parser: argparse.ArgumentParser, takes_pipeline: bool = True) -> None:
    """Add the arguments that name a configuration, and the overrides.

    The configuration is a YAML file, or a directory and a name, as in ROLL.

    Args:
        takes_pipeline: whether the first word may be the name of a pipeline. Without such a name, the configuration
            determines the pipeline.
    """
    pipeline = f"[{'|'.join(ENTRIES)}|sft|dpo|offline_distill|MODULE] " if takes_pipeline else ""
    parser.usage = (
        f"%(prog)s [options] {pipeline}CONFIG.yaml [key=value ...]\n"
        f"       %(prog)s [options] {pipeline}--config_path DIR --config_name NAME [key=value ...]"
    )
    parser.add_argument("--config", metavar="FILE", help="configuration file, same as CONFIG.yaml")
    parser.add_argument("--config_path", metavar="DIR", help="directory (relative to here, examples/ or the script)")
    parser.add_argument("--config_name", metavar="NAME", help="YAML file in --config_path, with or without .yaml")
    pipeline = "the pipeline (by default determined by the configuration), " if takes_pipeline else ""
    what = f"{pipeline}the configuration file, and overrides: key=value, +key=value, ~key"
    parser.add_argument("overrides", nargs="*", metavar="words", help=what)


def pipeline_arguments(parsed: argparse.Namespace) -> dict[str, Any]:
    """Remove the pipeline's name from a command line; return the arguments of `load_plan` that select it.

    If the command line has no pipeline name, the result is an empty dict.
    """
    first = parsed.overrides[0] if parsed.overrides else ""
    if not first or not _is_name(first):
        return {}
    if (_named_yaml(first) or os.path.isfile(first)) and not _names_configuration(parsed):
        return {}  # a configuration named without .yaml; `configuration` reports it
    parsed.overrides = parsed.overrides[1:]
    return ENTRIES.get(first, {"pipeline": first})


def configuration(parsed: argparse.Namespace) -> tuple[str, str, list[str]]:
    """Return (directory, name, overrides) of the configuration on a command line.

    Raises:
        ConfigError: if no configuration is named, or more than one.
    """
    files = [*filter(None, [parsed.config]), *(word for word in parsed.overrides if _is_file(word))]
    overrides = [word for word in parsed.overrides if not _is_file(word)]
    named = [option for option in ("config_path", "config_name") if getattr(parsed, option) is not None]
    if len(files) > 1:
        raise ConfigError([f"{' and '.join(files)} are {len(files)} configurations; give one configuration"])
    if files and named:
        raise ConfigError([f"{files[0]} and --{named[0]} both name the configuration; give only one of the two"])
    if files:
        directory, name = os.path.split(files[0])
        return directory or ".", name, overrides
    if len(named) < 2:
        if named:
            raise ConfigError([f"--{named[0]} alone does not name a configuration; {HOW_TO_NAME}"])
        raise ConfigError([f"no configuration given{_advice(next(filter(_is_name, overrides), None))}"])
    return parsed.config_path, parsed.config_name, overrides


def _advice(word: str | None) -> str:
    """Return advice for a command line without a configuration.

    `word` is a word of the command line that may be a file name without the ending .yaml.
    """
    if word is None:
        return f"; {HOW_TO_NAME}"
    near = _named_yaml(word)
    return f": {word!r} is not a .yaml file; {f'write {near}' if near else HOW_TO_NAME}"


def _named_yaml(word: str) -> str | None:
    """Return `word` with the ending of a YAML file, if a file with this name exists, else None."""
    return next((word + ending for ending in YAML if os.path.isfile(word + ending)), None)


def _names_configuration(parsed: argparse.Namespace) -> bool:
    options = (parsed.config, parsed.config_path, parsed.config_name)
    return any(options) or any(map(_is_file, parsed.overrides))


def _is_name(word: str) -> bool:
    """Return whether a word of the command line is neither an override nor a YAML file."""
    return "=" not in word and not word.startswith("~") and not word.endswith(YAML)


def _is_file(word: str) -> bool:
    """Return whether a word of the command line is a configuration file.

    `key=file.yaml` is an override, unless a file with this name exists.
    """
    return word.endswith(YAML) and ("=" not in word or os.path.isfile(word))


def write_run_directory(path: str | os.PathLike[str]) -> None:
    """Write the path of the run's directory to a file, if the environment variable `RUN_DIRECTORY_FILE` names one.

    The variable is then removed, so that nested runs do not overwrite the file.
    """
    if file := os.environ.pop(RUN_DIRECTORY_FILE, None):
        with open(file, "w", encoding="utf-8") as stream:
            stream.write(os.path.realpath(path))
