"""What every command that reads a configuration takes, and the exit codes of all commands."""

import argparse

DONE, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every command that reads a configuration takes."""
    parser.add_argument(
        "--config_path", required=True, metavar="DIR", help="directory, from here, examples/ or beside the script"
    )
    parser.add_argument("--config_name", required=True, metavar="NAME", help="YAML file in it, with or without .yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides: key=value, +key=value, ~key")
