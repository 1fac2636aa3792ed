"""Replacement for Ray's dashboard agent. It reports that no port is in use, and exits when its raylet exits.

A raylet waits for the files of its agent when it starts, and exits if its agent exits. Ray's own agent takes 2 s to
import servers for metrics and jobs, which a run does not use. This program runs without site packages, so it starts
immediately.
"""

import sys
from pathlib import Path

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
NOT_IN_USE = "-1"


def main(arguments: list[str]) -> None:
    """Write the port files that the raylet waits for; return when the raylet ends.

    Ray passes the session directory and the node id on the command line.
    """
    named = dict(each.removeprefix("--").split("=", 1) for each in arguments if each.startswith("--") and "=" in each)
    for port in PORTS:
        file = Path(named["session-dir"]) / f"{port}_{named['node-id']}"
        partial = file.with_name(f"{file.name}.partial")  # the raylet must not read an incomplete file
        partial.write_text(NOT_IN_USE)
        partial.rename(file)
    sys.stdin.read()  # a pipe of the raylet, closed at its end


if __name__ == "__main__":
    main(sys.argv[1:])
