"""What every command that reads a configuration takes, and the exit codes of all commands."""

import argparse
import io
import sys

DONE, FAILED, USER_ERROR, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143


def safe_output() -> None:
    """Have what the terminal's encoding lacks printed as an escape, rather than end the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every command that reads a configuration takes."""
    parser.add_argument("--config_path", required=True, metavar="DIR", help="directory, from here or from examples/")
    parser.add_argument("--config_name", required=True, metavar="NAME", help="YAML file in it, with or without .yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides: key=value, +key=value, ~key")
