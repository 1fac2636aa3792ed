"""A program in the place of Ray's dashboard agent, which says what that says where it serves nothing: no port in use.

A raylet does not begin without these files and ends with its agent, so there must be one. Ray's own imports 2 s of
servers, for metrics and jobs, that nobody asks anything. This one runs without site packages, and so is there at once.
"""

import sys
from pathlib import Path

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
NOT_IN_USE = "-1"


def main(arguments: list[str]) -> None:
    """Write the files for the session and node that Ray names in `arguments`; return when the raylet has ended."""
    named = dict(each.removeprefix("--").split("=", 1) for each in arguments if each.startswith("--") and "=" in each)
    for port in PORTS:
        file = Path(named["session-dir"]) / f"{port}_{named['node-id']}"
        aside = file.with_name(f"{file.name}.aside")  # a raylet that looks meanwhile must not read half of it
        aside.write_text(NOT_IN_USE)
        aside.rename(file)
    sys.stdin.read()  # a pipe of the raylet's, which closes with it


if __name__ == "__main__":
    main(sys.argv[1:])
