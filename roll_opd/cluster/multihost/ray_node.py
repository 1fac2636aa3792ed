"""Program that runs a Ray node on a host other than host 0.

`multihost_worker` starts the program and writes a request to its standard input. The program answers with JSON lines on
standard output: {} after Ray has started, and {"failed": reason} if Ray does not start or a Ray process ends.

The program exits when its standard input closes. The input also closes if `multihost_worker` ends.
"""

import contextlib
import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

from roll_opd.base.failures import DEBUG
from roll_opd.cluster.forkserver.forkserver_start import fork_server
from roll_opd.cluster.process_reaper import guarded
from roll_opd.cluster.ray_environment import prepare_environment, run_temp_directory, use_interface_of

POLL_INTERVAL_S = 1.0  # seconds between checks of Ray's processes


def run(request: dict[str, Any]) -> None:
    """Start a Ray node as described in `request`, and stop it when standard input closes."""
    os.environ |= request["environment"]
    use_interface_of(request["here"])
    ended: queue.Queue[None] = queue.Queue()
    threading.Thread(target=_await_end, args=(ended,), daemon=True).start()
    with fork_server() as server:
        server.import_for(request["warm"])
        prepare_environment()
        with guarded() as reaper, run_temp_directory(reaper):
            from roll_opd.cluster.ray_runtime import ended_processes, join_node

            try:
                node = join_node(request["address"], request["here"], request["slots"])
            except Exception as error:  # Ray raises various types
                _send(failed=f"Ray does not start: {type(error).__name__}: {' '.join(str(error).split())[:400]}")
                return
            if DEBUG not in os.environ:
                reaper.remove_at_the_end(Path(node.get_session_dir_path()))
            _send()
            failed = None
            while failed is None:
                with contextlib.suppress(queue.Empty):
                    ended.get(timeout=POLL_INTERVAL_S)
                    break
                failed = ended_processes(node)
            if failed:
                _send(failed=failed)
            node.kill_all_processes(check_alive=False, allow_graceful=False)


def _await_end(ended: "queue.Queue[None]") -> None:
    sys.stdin.read()
    ended.put(None)


def _send(**message: str) -> None:
    with contextlib.suppress(OSError):
        print(json.dumps(message), flush=True)


if __name__ == "__main__":
    run(json.loads(sys.stdin.readline()))
