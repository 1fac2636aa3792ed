"""Download in a child process, which ends immediately when its parent is interrupted or ends.

The threads of the clients cannot be interrupted. The child ends when its standard input closes, and removes the files
that it has begun: the clients give each attempt new names, so no later attempt would continue or remove them.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from roll_opd.base import hub_clients
from roll_opd.base.hub import Download, HubError, HubName, pinned

BEGUN = ".incomplete"  # suffix of files that are being written
ROOT = Path(__file__).resolve().parents[2]


def in_child(wanted: Sequence[Download]) -> dict[HubName, Path]:
    """Download files into the cache; return the directory of each name. Raises HubError."""
    request = [{**asdict(one.name), "wanted": one.name.wanted, "files": one.files} for one in wanted]
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    child = subprocess.Popen(
        [sys.executable, "-m", "roll_opd.base.hub_downloads"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": search},
        start_new_session=True,  # only this process gets the Ctrl-C of a terminal
    )
    assert child.stdin and child.stdout
    try:
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.flush()
        text = child.stdout.read()
    finally:
        child.stdin.close()
        code = child.wait()
    try:
        answer = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError):
        raise HubError(f"{wanted[0].name}: the download ended with exit code {code}; start again") from None
    if "error" in answer:
        raise HubError(answer["error"])
    return {one.name: Path(path) for one, path in zip(wanted, answer["paths"], strict=True)}


def main() -> None:
    """Download what the first line of the standard input requests; print the directories or the error as JSON."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer: dict[str, Any]
    try:
        answer = {"paths": [str(_downloaded(one)) for one in request]}
    except HubError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
    os._exit(0)


def _downloaded(one: dict[str, Any]) -> Path:
    name = HubName(one["kind"], one["id"], one["revision"])
    with pinned({str(name): one["wanted"]}):
        return hub_clients.fetched([Download(name, tuple(one["files"]))])[name]


def _end_with_parent() -> None:
    sys.stdin.read()
    for entry in Path("/proc/self/fd").iterdir() if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):
            file = os.readlink(entry)
            if file.endswith(BEGUN):
                os.unlink(file)
    os._exit(1)


if __name__ == "__main__":
    main()
