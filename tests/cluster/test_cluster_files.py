"""The job files in examples/clusters: shell code, names, and the environment variables of the command."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_opd.cluster.multihost.host_facts import DEFAULT_PORT
from roll_opd.config.schema import Run

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
SLURM, KUBERNETES = CLUSTERS / "slurm.sbatch", CLUSTERS / "k8s_job.yaml"
SECONDS = 60.0
# in the place of srun: the tasks of a step, all on this machine
SRUN = """
import os, signal, subprocess, sys, time
words = sys.argv[1:]
assert words[:7:2] == ["--nodes", "--ntasks", "--ntasks-per-node", "--kill-on-bad-exit=0"], words
size = words[3]
assert words[7] == "--cpus-per-task=" + os.environ["SLURM_CPUS_PER_TASK"], words
time.sleep(float(os.environ.get("SECONDS_TO_START", "0")))
step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_TASKS_PER_NODE": f"1(x{size})"}
tasks = [
    subprocess.Popen(words[8:], env={**os.environ, **step, "SLURM_PROCID": str(rank)}) for rank in range(int(size))
]
sys.exit(max(task.wait() for task in tasks))
"""
# in the place of the command: what it is given, and, asked to be the driver, a step that ends after SIGTERM
COMMAND = """
import signal
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))  # first: the script may be asked before
import json, os, sys, time
from roll_opd.cluster.multihost.host_facts import launched
host = launched(os.environ)
rank = host.rank if host else 0
with open(f"{os.environ['FOUND']}.{rank}", "w") as file:
    json.dump([sys.argv[1:], host and [host.rank, host.size, host.address, host.port]], file)
deadline = time.monotonic() + float(os.environ["SECONDS_OF_RUN"])
while time.monotonic() < deadline and not asked and not os.path.exists(os.environ["FOUND"] + ".end"):
    time.sleep(0.05)
open(os.environ["FOUND"] + ".end", "w").close()  # the others end with the driver
time.sleep(0.3)
sys.exit(143 if asked else 0)
"""


def program(path: Path, text: str, python: str = sys.executable) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{python}\n{text}")
    path.chmod(0o755)


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of an sbatch job of two hosts, which are this machine, with the command replaced."""
    program(tmp_path / "bin" / "srun", SRUN)
    program(tmp_path / "submitted" / ".venv" / "bin" / "python", COMMAND)
    slurm = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.2", "SLURM_JOB_NUM_NODES": "2"}
    slurm |= {"SLURM_SUBMIT_DIR": str(tmp_path / "submitted"), "ENVIRONMENT": "BATCH", "SLURM_NTASKS": "2"}
    slurm["SLURM_CPUS_PER_TASK"] = "3"
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MASTER"))}
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return {**outer, **slurm, "PATH": path, "FOUND": str(tmp_path / "found"), "SECONDS_OF_RUN": "0"}


def found(job: dict[str, str], rank: int) -> Any:
    return json.loads(Path(f"{job['FOUND']}.{rank}").read_text())


def test_the_slurm_job_starts_the_command_on_every_host(job: dict[str, str]) -> None:
    done = subprocess.run(["bash", SLURM, "my run.yaml", "a=b c"], env=job, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        words, host = found(job, rank)
        assert words == ["-m", "roll_opd", "run", "my run.yaml", "a=b c", "num_nodes=2"]
        assert host == [rank, 2, "127.0.0.1", 20078]  # the port after MASTER_PORT


def test_the_signal_before_the_end_reaches_the_driver_and_the_job_waits_for_its_checkpoint(job: dict[str, str]) -> None:
    job["SECONDS_OF_RUN"] = str(SECONDS)
    running = subprocess.Popen(["bash", SLURM, "run.yaml"], env=job, stderr=subprocess.PIPE)
    deadline = time.monotonic() + SECONDS
    while not all(os.path.exists(f"{job['FOUND']}.{rank}") for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)  # to the script alone: --signal=B:TERM
    assert running.wait(timeout=SECONDS) == 143


def test_a_signal_that_comes_before_the_driver_reaches_it(job: dict[str, str]) -> None:
    job |= {"SECONDS_OF_RUN": str(SECONDS), "SECONDS_TO_START": "1.5"}
    running = subprocess.Popen(["bash", SLURM, "run.yaml"], env=job, stderr=subprocess.PIPE)
    time.sleep(0.5)
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=SECONDS / 2) == 143


def test_the_slurm_job_asks_for_one_task_a_host_and_for_time_to_save() -> None:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", SLURM.read_text(), re.MULTILINE))
    assert options["ntasks-per-node"] == "1"
    what, _, seconds = options["signal"].partition("@")
    assert what == "B:TERM" and int(seconds) > Run().shutdown_timeout_s


@pytest.mark.slow
def test_the_slurm_job_ends_with_the_exit_code_of_the_command(job: dict[str, str], tmp_path: Path) -> None:
    """The command itself, on two simulated hosts; its configuration has an unknown key."""
    python = tmp_path / "submitted" / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    config = CLUSTERS.parent / "demo" / "onpolicy_distill.yaml"
    done = subprocess.run(
        ["bash", SLURM, config, "no_such_key=1"], env=job, capture_output=True, text=True, timeout=4 * SECONDS
    )
    assert done.returncode == 2 and "no_such_key" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def pod() -> Any:
    service, job = yaml.safe_load_all(KUBERNETES.read_text())
    return service, job, job["spec"]["template"]["spec"]


def test_the_names_of_the_kubernetes_job_fit_each_other(pod: Any) -> None:
    service, job, spec = pod
    [container] = spec["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    name = job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}
    assert spec["subdomain"] == service["metadata"]["name"]
    assert variables["MASTER_ADDR"] == f"{name}-0.{spec['subdomain']}"  # a pod's host name: the job's and its index
    hosts = {job["spec"]["completions"], job["spec"]["parallelism"], int(variables["WORLD_SIZE"])}
    assert len(hosts) == 1 and job["spec"]["completionMode"] == "Indexed"
    assert spec["terminationGracePeriodSeconds"] > Run().shutdown_timeout_s
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize("index", ["0", "1"])
def test_a_pod_is_the_host_of_its_index(index: str, pod: Any, tmp_path: Path) -> None:
    [container] = pod[2]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    program(tmp_path / "bin" / "python", COMMAND)
    program(tmp_path / "bin" / "getent", "")  # the name of the first pod has an address
    environment = {**os.environ, **variables, "JOB_COMPLETION_INDEX": index, "SECONDS_OF_RUN": "0"}
    environment |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "FOUND": str(tmp_path / "found")}
    done = subprocess.run([*container["command"], *container["args"]], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words, host = json.loads(Path(f"{tmp_path / 'found'}.{index}").read_text())
    assert words == ["-m", "roll_opd", "run", "/runs/config.yaml", "num_nodes=2", "output_dir=/runs/output"]
    assert host == [int(index), 2, "roll-opd-0.roll-opd", DEFAULT_PORT + 1]


@pytest.mark.nightly
@pytest.mark.slow
def test_bandwidth_is_measured() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, str(CLUSTERS / "bandwidth.py"), "--mib", "8", "--repeats", "3"]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * SECONDS, check=True)
    speed = re.fullmatch(r"2 ranks, gloo, 8 MiB: (\d+\.\d\d) GB/s bus bandwidth\n", done.stdout)
    assert speed and float(speed[1]) > 6 * 8 * 2**20 / (time.monotonic() - began) / 1e9  # six calls took less than all


def test_the_shell_of_the_job_files_parses() -> None:
    assert shutil.which("bash")
    subprocess.run(["bash", "-n", SLURM], check=True)
