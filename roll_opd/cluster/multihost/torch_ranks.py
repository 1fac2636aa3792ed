"""A host's share of the ranks of a torch program, under torchrun: what `roll-opd score` starts.

Run as a program, it is that of another host, by `member`, which says on standard input what is to be started. It says
{"failed": why} on standard output where its ranks fail, and ends with its standard input, so with the process that has
started it, however that ends.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any

from roll_opd.base.failures import DEBUG
from roll_opd.base.paths import use_cache_of_compilers
from roll_opd.cluster.process_reaper import guarded
from roll_opd.cluster.ray_environment import torch_variables, use_the_network_of
from roll_opd.cluster.temp_directory import run_temp_directory

# of Megatron, on a machine where nothing is wrong; the beginnings of the messages, as PYTHONWARNINGS takes them
EXPECTED_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
)
ALONE = "localhost"  # in the place of this host's name, which need not have an address


def start(told: Mapping[str, Any], output: IO[str] | None = None) -> "subprocess.Popen[bytes]":
    """Start `ranks` ranks of `module` with `arguments`, which write to `output`, or where this process does.

    Of several hosts (`hosts`) this is number `host`; `here` is its own address, `address` that of host 0, with the free
    `port` at which the ranks meet.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={told['ranks']}"]
    threads = str(max(1, (os.cpu_count() or 1) // told["ranks"]))
    use_cache_of_compilers(os.environ)
    environment = {"OMP_NUM_THREADS": threads, **torch_variables(), **os.environ}
    if DEBUG not in os.environ:
        ignored = [f"ignore:{beginning}" for beginning in EXPECTED_WARNINGS]
        environment["PYTHONWARNINGS"] = ",".join([*ignored, *filter(None, [os.environ.get("PYTHONWARNINGS")])])
    if told["hosts"] == 1:
        launcher += ["--standalone", f"--local_addr={ALONE}"]
    else:
        use_the_network_of(told["here"])
        environment |= os.environ
        launcher += [f"--nnodes={told['hosts']}", f"--node_rank={told['host']}", f"--local_addr={told['here']}"]
        launcher += [f"--master_addr={told['address']}", f"--master_port={told['port']}"]
    command = [*launcher, "-m", told["module"], *told["arguments"]]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output)


def _serve(told: Mapping[str, Any]) -> None:
    with guarded() as reaper, run_temp_directory(reaper):
        process = start(told, sys.stderr)  # what they say is no message

        def wait() -> None:
            if code := process.wait():
                print(json.dumps({"failed": f"its ranks have ended (exit code {code})"}), flush=True)

        threading.Thread(target=wait, daemon=True).start()
        sys.stdin.read()


if __name__ == "__main__":
    _serve(json.loads(sys.stdin.readline()))
