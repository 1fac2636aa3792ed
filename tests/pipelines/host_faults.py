"""Runs over two and three hosts of `network`, in which a part dies: a program, not a test.

    python tests/pipelines/host_faults.py PLACE SCENARIO...

Each scenario prints a line: the fault, the time until all commands had ended, their exit codes, the driver's message,
and the remaining processes. A scenario takes a minute or two, so `make test` runs only the few in `test_host_runs.py`.
"""

import json
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from network import LEFT, NetworkHost, Process, kill, network, plainly, torchrun
from runs import PURE, REPOSITORY, SMALL

STEPS, SECONDS = 4, 280.0
MANY = 60  # steps of a run that outlives all `VICTIMS`
BOTH = ("num_gpus_per_node=2", "teacher.device_mapping=[1]")  # devices of one host
ALONE = tuple(word for word in SMALL if "teacher.strategy" not in word)
TP2 = "teacher.strategy_args.strategy_config.tensor_model_parallel_size=2"
TWO = ("num_nodes=2", "num_gpus_per_node=1", "teacher.device_mapping=[1]")
SPANNING = ("num_nodes=2", "num_gpus_per_node=1", "teacher.device_mapping=[0,1]", TP2)
THREE = ("num_nodes=3", "num_gpus_per_node=1", "teacher.device_mapping=[1,2]", TP2)
# who is killed: a word of its command line, and its host; engine and teacher are on host 1
VICTIMS = {
    "teacher": ("ray::LogprobWorker", 1),
    "engine": ("engine's core", 1),
    "raylet of host 1": ("/raylet/raylet", 1),
    "driver": ("driver", 0),
    "GCS": ("gcs_server", 0),
    "command of host 1": (PURE, 1),
    "host 1": ("", 1),
    "student": ("ray::TrainWorker", 0),
    "raylet of host 0": ("/raylet/raylet", 0),
    "node of host 1": ("roll_opd.cluster.multihost.ray_node", 1),
    "engine's actor": ("ray::RolloutWorker", 1),
}


def command(output: Path, *more: str) -> list[str]:
    words = [f"examples/{PURE}", "--config_path", "demo", "--config_name", "onpolicy_distill", f"output_dir={output}"]
    return [*words, *ALONE, f"max_steps={STEPS}", "save_steps=2", *more]


def launch(hosts: Sequence[NetworkHost], output: Path, *more: str) -> list[Process]:
    """Start a run on all hosts, under torchrun."""
    return [host.start(torchrun(hosts, rank, *command(output, *more))) for rank, host in enumerate(hosts)]


def model(output: Path) -> bytes:
    """Return the weights at the end of a run."""
    checkpoints = (output / "demo/latest/checkpoints").glob("step_*")
    last = max(checkpoints, key=lambda path: int(path.name.removeprefix("step_")))
    return (last / "hf/model.safetensors").read_bytes()


def steps_of(output: Path) -> list[int]:
    rows = (output / "demo/latest/metrics.jsonl").read_text().splitlines()
    return [row["step"] for row in map(json.loads, rows) if row["step"]]


def find(host: NetworkHost, word: str) -> psutil.Process | None:
    """Return the first started process of the host whose command line has a word; without a word the first process.

    The driver has the command line of the command that started it. An engine's core has the command line of the
    preloaded server, because it is a fork of it.
    """
    for process in host.started[-1].processes():
        try:
            line = " ".join(process.cmdline())
            if not word:
                return process
            if line.startswith("bash") or "torch.distributed.run" in line:  # they name what they start
                continue
            above = process.parent().cmdline()
            if word == "driver" and (PURE in line and PURE in " ".join(above[1:2])):
                return process
            if word == "engine's core" and "serve(" in line and above == process.cmdline():
                return process
            if word in line:
                return process
        except (psutil.Error, AttributeError):
            continue
    return None


def until(what: Callable[[], object], seconds: float = SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def said(process: Process, since: int = 0) -> str:
    lines = re.findall(r"^roll-opd: .*(?:\n  .*)*", process.output[since:], re.MULTILINE)
    return " | ".join(" ".join(line.split()) for line in lines)


def report(name: str, began: float, processes: Sequence[Process], more: str = "") -> None:
    codes = [process.wait(SECONDS) for process in processes]
    left = sum(process.output.count(LEFT) for process in processes)
    words = " || ".join(f"{rank}: {said(process)[:900]}" for rank, process in enumerate(processes))
    print(f"## {name}: {time.monotonic() - began:.1f} s, codes {codes}, left {left}{more}\n   {words}", flush=True)


def alone(output: Path, *more: str) -> bytes:
    """Return the weights of a run on one host; run it if necessary."""
    if not (output / "demo").exists():
        with network(1, output, output.parent) as (host,):
            began = time.monotonic()
            report("one host", began, [host.start([sys.executable, *command(output, *BOTH, *more)])])
    return model(output)


def same(name: str, place: Path, reference: bytes, count: int, *more: str) -> None:
    """Check that a run over hosts ends with the same bits as the run on a single host."""
    with network(count, place / name, place) as hosts:
        began = time.monotonic()
        processes = launch(hosts, place / name, *more)
        codes = [process.wait(SECONDS) for process in processes]
        equal = not any(codes) and model(place / name) == reference
        report(name, began, processes, f", same bits as on one host: {equal}")


def kills(place: Path, rng: random.Random) -> None:
    """Check a run that restarts automatically after the deaths of all `VICTIMS`, each at a random moment."""
    output, ended, length = place / "kills", 0, f"max_steps={MANY}"
    reference = alone(place / "many", length)
    with network(2, output, place) as hosts:
        words = [sys.executable, *command(output, *TWO, length, "save_steps=1", f"max_restarts={len(VICTIMS)}")]
        processes = [host.start(words, **plainly(hosts, rank)) for rank, host in enumerate(hosts)]
        for name, (word, rank) in VICTIMS.items():
            if not until(lambda word=word, rank=rank: find(hosts[rank], word)) or processes[0].popen.poll() is not None:
                break
            time.sleep(rng.uniform(0, 15))
            found, seen = find(hosts[rank], word), len(processes[0].output)
            if found is None:
                continue
            began = time.monotonic()
            kill(found)
            ended += 1
            until(lambda ended=ended: processes[0].output.count("max_restarts") >= ended)
            took, after = time.monotonic() - began, processes[0].output[:seen].count("\nstep ")
            print(f"## kill {name} after {after} lines of steps: {took:.1f} s\n{said(processes[0], seen)}", flush=True)
            if processes[1].popen.poll() is not None:
                print(f"   host 1: code {processes[1].popen.returncode}; started again", flush=True)
                processes[1] = hosts[1].start(words, **plainly(hosts, 1))
        codes = [process.wait(SECONDS) for process in processes]
        equal = not any(codes) and model(output) == reference
        report("all kills", time.monotonic(), processes, f", steps {steps_of(output)}, bits of one host: {equal}")


def main(place: Path, scenarios: Sequence[str]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    reference = alone(place / "one")
    for scenario in scenarios:
        if scenario == "two":
            same(scenario, place, reference, 2, *TWO)
        elif scenario == "spanning":
            same(scenario, place, reference, 2, *SPANNING)
        elif scenario == "three":
            same(scenario, place, reference, 3, *THREE)
        elif scenario == "kills":
            kills(place, rng)
        elif scenario == "cable":
            cable(place, reference)
        elif scenario in VICTIMS:
            killed(scenario, place, rng)
        elif scenario in ("SIGTERM", "SIGINT"):
            signalled(scenario, place)


def cable(place: Path, reference: bytes) -> None:
    """No packet arrives for 20 s."""
    with network(2, place / "cable", place) as hosts:
        processes = launch(hosts, place / "cable", *TWO)
        until(lambda: "\nstep " in processes[0].output)
        hosts[1].plug(is_in=False)
        time.sleep(20)
        hosts[1].plug(is_in=True)
        began = time.monotonic()
        codes = [process.wait(SECONDS) for process in processes]
        equal = not any(codes) and model(place / "cable") == reference
        report("cable drawn for 20 s", began, processes, f", same bits as on one host: {equal}")


def killed(name: str, place: Path, rng: random.Random) -> None:
    """Check a run without restarts in which a victim dies during the steps."""
    word, rank = VICTIMS[name]
    output = place / name.replace(" ", "-")
    with network(2, output, place) as hosts:
        words = [sys.executable, *command(output, *TWO, f"max_steps={MANY}")]
        processes = [host.start(words, **plainly(hosts, number)) for number, host in enumerate(hosts)]
        until(lambda: "\nstep " in processes[0].output)
        time.sleep(rng.uniform(0, 3))
        found = find(hosts[rank], PURE if word == "driver" else word)  # which is the command itself
        assert found, name
        began = time.monotonic()
        kill(found)
        report(name, began, processes, f", after steps {steps_of(output)[-1:]}")


def signalled(name: str, place: Path) -> None:
    """Check a signal that only host 1 receives."""
    with network(2, place / name, place) as hosts:
        processes = launch(hosts, place / name, *TWO)
        until(lambda: "\nstep " in processes[0].output)
        member = find(hosts[1], PURE)
        assert member
        began = time.monotonic()
        kill(member, getattr(signal, name))
        report(f"{name} on host 1", began, processes)


if __name__ == "__main__":
    assert Path.cwd() == REPOSITORY, "run it in the repository"
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
