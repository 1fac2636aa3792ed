"""A host's part of a run's Ray cluster: run as a program by `member`, which tells it what to join, on standard input.

It says a JSON object a line on standard output: {} when it is up, {"failed": why} when it does not come up or a part of
it ends; and it ends with its standard input, so with the process that has started it, however that ends.
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
from roll_opd.cluster.forkserver.forkserver_start import warm_server
from roll_opd.cluster.process_reaper import guarded
from roll_opd.cluster.ray_environment import prepare_environment, use_the_network_of
from roll_opd.cluster.temp_directory import run_temp_directory

LOOK_SECONDS = 1.0  # between looks at Ray's processes


def run(told: dict[str, Any]) -> None:
    """Join the cluster that `told` describes, and stay until standard input ends."""
    os.environ |= told["environment"]
    use_the_network_of(told["here"])
    ended: queue.Queue[None] = queue.Queue()
    threading.Thread(target=_await_end, args=(ended,), daemon=True).start()
    with warm_server() as server:
        server.import_for(told["warm"])
        prepare_environment()
        with guarded() as reaper, run_temp_directory(reaper):
            from roll_opd.cluster.runtime import joined_node, what_has_ended

            try:
                node = joined_node(told["address"], told["here"], told["slots"])
            except Exception as error:  # Ray raises plain ones
                _say(failed=f"Ray does not start: {type(error).__name__}: {' '.join(str(error).split())[:400]}")
                return
            if DEBUG not in os.environ:
                reaper.remove_at_the_end(Path(node.get_session_dir_path()))
            _say()
            failed = None
            while failed is None:
                with contextlib.suppress(queue.Empty):
                    ended.get(timeout=LOOK_SECONDS)
                    break
                failed = what_has_ended(node)
            if failed:
                _say(failed=failed)
            node.kill_all_processes(check_alive=False, allow_graceful=False)


def _await_end(ended: "queue.Queue[None]") -> None:
    sys.stdin.read()
    ended.put(None)


def _say(**message: str) -> None:
    with contextlib.suppress(OSError):
        print(json.dumps(message), flush=True)


if __name__ == "__main__":
    run(json.loads(sys.stdin.readline()))
