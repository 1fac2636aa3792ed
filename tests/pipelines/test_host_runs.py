"""Runs over several hosts, in real network, PID and mount namespaces; more of them in `host_faults.py`."""

import json
import sys
from pathlib import Path

import pytest
import torch
from ahead_checks import ahead, check_ahead
from host_faults import STEPS, TWO, command, launch, model
from megatron_data import demo_sequences
from network import LEFT, needs_hosts, network, plainly
from runs import REPOSITORY, Run
from transformers import AutoModelForCausalLM

pytestmark = needs_hosts
SECONDS = 300.0


@pytest.mark.nightly
def test_two_hosts_end_with_the_bits_of_one(tmp_path: Path) -> None:
    """Student and engine are on one host, the teacher is on the other; torchrun starts both."""
    short = ("max_steps=2", "save_steps=0")
    both = ("num_gpus_per_node=2", "teacher.device_mapping=[1]", "student_infer.device_mapping=[0]")
    apart = (*TWO, "student_infer.device_mapping=[0]")
    with network(2, tmp_path / "logs", tmp_path) as hosts:
        alone = hosts[0].start([sys.executable, *command(tmp_path / "one", *both, *short)])
        assert alone.wait(SECONDS) == 0, alone.output
        processes = launch(hosts, tmp_path / "two", *apart, *short)
        assert [process.wait(SECONDS) for process in processes] == [0, 0], processes[0].output
        first, second = (process.output for process in processes)
        assert LEFT not in first + second
        assert f"Devices: 0 on {hosts[0].address}, 1 on {hosts[1].address}" in first
        assert "step 2/2" in first and "step" not in second
    assert model(tmp_path / "two") == model(tmp_path / "one")


@pytest.mark.nightly
def test_two_hosts_generate_ahead(tmp_path: Path) -> None:
    """Host 0 has the student and an engine, host 1 the teacher and an engine; both engines generate ahead."""
    devices = ("num_nodes=2", "num_gpus_per_node=2", "teacher.device_mapping=[2]", "student_infer.device_mapping=[1,3]")
    batch, output = ("rollout_batch_size=16", "logged_samples_per_step=64"), tmp_path / "out"
    with network(2, tmp_path / "logs", tmp_path) as hosts:
        processes = launch(hosts, output, *devices, *batch, *ahead(1))
        assert [process.wait(SECONDS) for process in processes] == [0, 0], processes[0].output
    run = Run(0, processes[0].output, (output / "demo/latest").resolve())
    check_ahead(run, 1, groups=16, steps=STEPS)


def test_a_host_that_does_not_come_is_named(tmp_path: Path) -> None:
    with network(2, tmp_path / "logs", tmp_path) as hosts:
        words = command(tmp_path / "out", *TWO, "host_timeout_s=2")
        process = hosts[0].start([sys.executable, *words], **plainly(hosts, 0))
        assert process.wait(60) == 2
        problem = "1. host 1 of 2 has not joined within 2 s (host_timeout_s); start the same command on this host"
        assert problem in process.output
        assert LEFT not in process.output and not (tmp_path / "out").exists()


@pytest.mark.nightly
def test_hosts_that_do_not_fit_are_reported_together(tmp_path: Path) -> None:
    """Host 1 has another version of the package, lacks the teacher, and has a directory of its own for the run."""
    output = "/tmp/own"
    teacher, part = REPOSITORY / "examples/demo/models/teacher", REPOSITORY / "roll_opd/base/failures.py"
    (tmp_path / "changed.py").write_text(part.read_text() + "# another\n")
    with network(2, tmp_path / "logs", tmp_path) as hosts:
        hosts[1].hidden, hosts[1].replaced = [teacher], {part: tmp_path / "changed.py"}
        words = [sys.executable, *command(Path(output), *TWO)]
        processes = [host.start(words, **plainly(hosts, rank)) for rank, host in enumerate(hosts)]
        assert [process.wait(60) for process in processes] == [2, 2]
        said = processes[0].output
        assert f"1. host 1 ({hosts[1].name}, {hosts[1].address}) has roll_opd" in said
        assert f"2. host 1 ({hosts[1].name}, {hosts[1].address}) has no model at {teacher} (no config.json)" in said
        assert f"3. host 1 ({hosts[1].name}, {hosts[1].address}) does not share {output}" in said
        assert "host 1: the run has ended; see host 0 for the reason" in processes[1].output


def test_scores_of_a_teacher_on_two_hosts_are_hugging_faces(tmp_path: Path) -> None:
    """Its ranks are tensor-parallel over both hosts; the rows are only on host 0, whose name has no address."""
    teacher, own = REPOSITORY / "examples/demo/models/teacher", tmp_path / "of_host_0"
    own.mkdir()
    rows = [
        {"id": number, "tokens": tokens.tolist(), "prompt_length": prompt}
        for number, (tokens, prompt) in enumerate(demo_sequences())
    ]
    (own / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--model", str(teacher), "--input", str(own / "rows.jsonl"), "--output", str(own / "out.jsonl")]
    words = [sys.executable, "-m", "roll_opd.commands.main", "score", *options, "--tp", "2"]
    with network(2, tmp_path / "logs", tmp_path) as hosts:
        hosts[1].hidden = [own]
        processes = [host.start(words, **plainly(hosts, rank)) for rank, host in enumerate(hosts)]
        assert [process.wait(SECONDS) for process in processes] == [0, 0], processes[0].output
        assert not any(LEFT in process.output or "roll-opd" in process.output for process in processes)
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    for row, found in zip(rows, map(json.loads, (own / "out.jsonl").read_text().splitlines()), strict=True):
        with torch.no_grad():
            table = model(torch.tensor([row["tokens"]])).logits[0].log_softmax(-1)
        places = range(row["prompt_length"], len(row["tokens"]))
        wanted = [float(table[place - 1, row["tokens"][place]]) for place in places]
        assert found["id"] == row["id"]
        assert found["logprobs"] == pytest.approx(wanted, abs=1e-5)
