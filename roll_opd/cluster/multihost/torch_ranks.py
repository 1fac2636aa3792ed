"""Start a host's ranks of a torch program with torchrun, for `roll-opd score`.

On hosts other than host 0, this module is a program. `multihost_worker` starts it and writes a request to its standard
input. The program prints {"failed": reason} if its ranks fail, and exits when its standard input closes.
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
from roll_opd.cluster.ray_environment import run_temp_directory, torch_variables, use_interface_of

# first words of Megatron's harmless warnings, as in PYTHONWARNINGS
EXPECTED_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
)
LOCAL_ADDRESS = "localhost"  # this host's name may have no address


def start(request: Mapping[str, Any], output: IO[str] | None = None) -> "subprocess.Popen[bytes]":
    """Start the ranks of this host with torchrun, and return the torchrun process.

    Args:
        request: a mapping with these keys:
            ranks: number of ranks on this host.
            module, arguments: the program that each rank runs, and its command-line arguments.
            hosts: number of hosts. The next keys are needed only if there are several hosts.
            host, here: number and address of this host.
            address, port: address of host 0, and a free port on host 0 for the rendezvous.
        output: file for the output of the ranks. None: the standard output of this process.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={request['ranks']}"]
    threads = str(max(1, (os.cpu_count() or 1) // request["ranks"]))
    use_cache_of_compilers(os.environ)
    environment = {"OMP_NUM_THREADS": threads, **torch_variables(), **os.environ}
    if DEBUG not in os.environ:
        ignored = [f"ignore:{beginning}" for beginning in EXPECTED_WARNINGS]
        environment["PYTHONWARNINGS"] = ",".join([*ignored, *filter(None, [os.environ.get("PYTHONWARNINGS")])])
    if request["hosts"] == 1:
        launcher += ["--standalone", f"--local_addr={LOCAL_ADDRESS}"]
    else:
        use_interface_of(request["here"])
        environment |= os.environ
        launcher += [
            f"--nnodes={request['hosts']}",
            f"--node_rank={request['host']}",
            f"--local_addr={request['here']}",
        ]
        launcher += [f"--master_addr={request['address']}", f"--master_port={request['port']}"]
    command = [*launcher, "-m", request["module"], *request["arguments"]]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output)


def _serve(request: Mapping[str, Any]) -> None:
    with guarded() as reaper, run_temp_directory(reaper):
        process = start(request, sys.stderr)  # standard output is for messages

        def wait() -> None:
            if code := process.wait():
                print(json.dumps({"failed": f"its ranks have ended (exit code {code})"}), flush=True)

        threading.Thread(target=wait, daemon=True).start()
        sys.stdin.read()


if __name__ == "__main__":
    _serve(json.loads(sys.stdin.readline()))
