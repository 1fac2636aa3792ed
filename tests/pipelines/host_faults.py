"""Runs over two and three hosts of `network`, and what happens when a part of them dies: a program, and not a test.

    python tests/pipelines/host_faults.py PLACE SCENARIO...

Each scenario prints a line: what was done, how long until all commands had ended, their exit codes, what the driver
said, and what was left running. It takes a minute or two each, so `make test` runs the few of `test_host_runs.py`.
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
from network import LEFT, NetworkHost, Process, kill, network, torchrun
from runs import PURE, REPOSITORY, SMALL

STEPS, SECONDS = 4, 280.0
ALONE = tuple(word for word in SMALL if "teacher.strategy" not in word)
TP2 = "teacher.strategy_args.strategy_config.tensor_model_parallel_size=2"
TWO = ("num_nodes=2", "num_gpus_per_node=1", "teacher.device_mapping=[1]")
SPANNING = ("num_nodes=2", "num_gpus_per_node=1", "teacher.device_mapping=[0,1]", TP2)
THREE = ("num_nodes=3", "num_gpus_per_node=1", "teacher.device_mapping=[1,2]", TP2)
# who is killed: a word of its command line, and the host that it is on
VICTIMS = {
    "student": ("ray::TrainWorker", 0),
    "teacher": ("ray::LogprobWorker", 1),
    "engine": ("VLLM::EngineCor", 1),
    "engine's actor": ("ray::RolloutWorker", 1),
    "raylet of host 0": ("/raylet/raylet", 0),
    "raylet of host 1": ("/raylet/raylet", 1),
    "GCS": ("gcs_server", 0),
    "node of host 1": ("roll_opd.cluster.ray_node", 1),
    "driver": ("start_onpolicy", 0),
    "member": ("start_onpolicy", 1),
    "torchrun of host 0": ("torch.distributed.run", 0),
    "torchrun of host 1": ("torch.distributed.run", 1),
    "host 0": ("", 0),
    "host 1": ("", 1),
}


def command(output: Path, *more: str) -> list[str]:
    words = [f"examples/{PURE}", "--config_path", "demo", "--config_name", "onpolicy_distill", f"output_dir={output}"]
    return [*words, *ALONE, f"max_steps={STEPS}", "save_steps=2", *more]


def launch(hosts: Sequence[NetworkHost], output: Path, *more: str) -> list[Process]:
    """Start a run on all hosts, under torchrun."""
    return [host.start(torchrun(hosts, rank, *command(output, *more))) for rank, host in enumerate(hosts)]


def model(output: Path, step: int = STEPS) -> bytes:
    """The weights at a run's end."""
    return (output / "demo/latest/checkpoints" / f"step_{step}" / "hf/model.safetensors").read_bytes()


def steps_of(output: Path) -> list[int]:
    rows = (output / "demo/latest/metrics.jsonl").read_text().splitlines()
    return [row["step"] for row in map(json.loads, rows) if row["step"]]


def find(host: NetworkHost, word: str) -> psutil.Process | None:
    """A process of the host by a word of its command line, the first to be started; without a word the very first."""
    for process in host.started[-1].processes():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if not word:
            return process
        # those of torchrun and of the shell have the words of what they start
        starts = "torch.distributed.run" in line
        if word in line and not line.startswith("bash") and starts == (word == "torch.distributed.run"):
            return process
    return None


def until(what: Callable[[], object], seconds: float = SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def said(process: Process) -> str:
    lines = re.findall(r"^roll-opd: .*(?:\n  .*)*", process.output, re.MULTILINE)
    return " | ".join(" ".join(line.split()) for line in lines)


def told(name: str, began: float, processes: Sequence[Process], more: str = "") -> None:
    codes = [process.wait(SECONDS) for process in processes]
    left = sum(process.output.count(LEFT) for process in processes)
    words = " || ".join(f"{rank}: {said(process)[:900]}" for rank, process in enumerate(processes))
    print(f"## {name}: {time.monotonic() - began:.1f} s, codes {codes}, left {left}{more}\n   {words}", flush=True)


def same(name: str, place: Path, reference: bytes, count: int, *more: str) -> None:
    """A run over hosts has the same bits at its end as the one on a single host."""
    with network(count, place / name, place) as hosts:
        began = time.monotonic()
        processes = launch(hosts, place / name, *more)
        codes = [process.wait(SECONDS) for process in processes]
        equal = not any(codes) and model(place / name) == reference
        told(name, began, processes, f", same bits as on one host: {equal}")


def fault(name: str, place: Path, victim: str, rng: random.Random, *more: str) -> None:
    """Kill one process at a random moment of training, or before it."""
    output = place / name.replace(" ", "_").replace("'", "")
    with network(2, output, place) as hosts:
        processes = launch(hosts, output, *TWO, *more)
        word, rank = VICTIMS[victim]
        until(lambda: find(hosts[rank], word) is not None)
        delay = rng.uniform(0, 25)
        until(lambda: any(process.popen.poll() is not None for process in processes), delay)
        found = find(hosts[rank], word)
        if found is None:
            print(f"## {name}: had ended after {delay:.1f} s", flush=True)
            return
        steps = processes[0].output.count("\nstep ")
        kill(found)
        told(name, time.monotonic(), processes, f", {delay:.1f} s after its start, after {steps} steps")


def main(place: Path, scenarios: Sequence[str]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    with network(1, place / "one", place) as (host,):
        began = time.monotonic()
        alone = host.start(
            [sys.executable, *command(place / "one", "num_gpus_per_node=2", "teacher.device_mapping=[1]")]
        )
        told("one host", began, [alone])
    reference = model(place / "one")
    for scenario in scenarios:
        if scenario == "two":
            same(scenario, place, reference, 2, *TWO)
        elif scenario == "spanning":
            same(scenario, place, reference, 2, *SPANNING)
        elif scenario == "three":
            same(scenario, place, reference, 3, *THREE)
        elif scenario.startswith("kill "):
            fault(scenario, place, scenario.removeprefix("kill "), rng)
        elif scenario == "cable":
            cable(place, reference)
        elif scenario == "restarts":
            restarts(place, reference, rng)
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
        told("cable drawn for 20 s", began, processes, f", same bits as on one host: {equal}")


def restarts(place: Path, reference: bytes, rng: random.Random) -> None:
    """Three faults in one run, which goes on by itself; then its end, its steps and its weights are as without them."""
    output = place / "restarts"
    with network(2, output, place) as hosts:
        began = time.monotonic()
        processes = launch(hosts, output, *TWO, "max_restarts=3")
        for number, victim in enumerate(("teacher", "engine", "driver")):
            word, rank = VICTIMS[victim]
            until(lambda number=number: processes[0].output.count("restart ") >= number)
            until(lambda word=word, rank=rank: find(hosts[rank], word))
            time.sleep(rng.uniform(5, 15))
            found = find(hosts[rank], word)
            if victim == "driver" and found:  # the process below the one that starts it again
                found = next(
                    (child for child in found.children() if "start_onpolicy" in " ".join(child.cmdline())), found
                )
            if found:
                kill(found)
        codes = [process.wait(SECONDS) for process in processes]
        equal = not any(codes) and model(output) == reference
        told("restarts", began, processes, f", steps {steps_of(output)}, same bits as on one host: {equal}")


def signalled(name: str, place: Path) -> None:
    """The signal comes to host 1 alone."""
    with network(2, place / name, place) as hosts:
        processes = launch(hosts, place / name, *TWO)
        until(lambda: "\nstep " in processes[0].output)
        member = find(hosts[1], "start_onpolicy")
        assert member
        began = time.monotonic()
        kill(member, getattr(signal, name))
        told(f"{name} on host 1", began, processes)


if __name__ == "__main__":
    assert Path.cwd() == REPOSITORY, "run it in the repository"
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
