"""The benchmark against peers: its table for rows in the form of runs, and its work as planned by the package."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "benchmarks" / "peers"
MODULES = ("run", "works", "peer_table", "peer_environment", "peer_side")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(PEERS))
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


def side(*seconds: float, start: float = 5.0, accuracies: tuple[float, ...] = (), warmup: int = 1) -> dict:
    """Return a round with steps of these durations."""
    rows, at = [], start
    for step, took in enumerate(seconds, start=1):
        at += took
        accuracy = accuracies[step - 1] if accuracies else None
        rows.append({"step": step, "seconds": took, "tokens": 100 * step, "at": at, "accuracy": accuracy})
    return {"rows": rows, "warmup": warmup}


def test_a_figure_is_the_median_over_rounds_without_warm_up(peers):
    table = peers("peer_table")
    runs = [side(9.0, 1.0, 2.0), side(9.0, 4.0, 3.0, start=7.0)]
    assert table.step_seconds(runs) == 2.5  # of 1, 2, 4, 3
    assert table.first_step_end(runs) == 15.0  # of 14 and 16
    assert table.tokens(runs) == 250


def test_the_accuracy_counts_when_every_round_has_reached_it(peers):
    table = peers("peer_table")
    runs = [side(1.0, 1.0, 1.0, accuracies=(0.1, 0.8, 0.9)), side(2.0, 2.0, accuracies=(0.79, 0.95))]
    assert (table.reached(runs), table.steps_to_target(runs)) == (8.0, 2)  # of 7 and 9
    assert table.reached([*runs, side(1.0, accuracies=(0.5,))]) is None


def test_the_table_has_what_was_measured_and_a_dash_for_the_rest(peers):
    table = peers("peer_table")
    memory = {"trainer_gib": 1.5, "all_gib": 4.25}
    works = {
        "demo": {"trl": [side(1.0, 2.0)], "hf": [side(1.0, 3.0)], "bf16": [side(1.0, 6.125)]},
        "vocabulary": {"ours": [{**side(1.0, warmup=0), **memory}]},
    }
    lines = table.text({"works": works}).splitlines()
    assert [word for word in lines[1].split() if word != "loop"] == ["TRL", "HF", "ours", "bf16"]
    step = next(line for line in lines if line.startswith("demo: a step, s"))
    assert step.split()[-4:] == ["2.00", "3.00", "-", "6.12"]
    assert next(line for line in lines if "peak of the training" in line).split()[-4:] == ["-", "-", "1.50", "-"]
    assert not any("accuracy" in line for line in lines)


def test_steps_of_both_kinds_are_read_alike(peers):
    run = peers("run")
    row = {"step": 3, "seconds": 1.5, "parts": {"generate": 1.0}, "tokens": 90, "loss": 0.5, "texts": ["1\n5", "1\n6"]}
    assert run.read_row(row, ["5", "7"])["accuracy"] == 0.5
    ours = {"step": 3, "time/step": 4.0, "time/validate": 2.0, "time/checkpoint": 0.5, "time/generate": 1.0}
    ours |= {"time/reward/math_rule/latency/max": 9.0, "rollout/generated_tokens": 90.0, "opd/reverse_kl/mean": 0.5}
    read = run.read_row({**ours, "val_correct/all/mean": 0.5}, [])
    assert read == {**run.read_row(row, ["5", "7"]), "seconds": 1.5}


def test_a_peer_reads_the_plan_that_we_run(peers, tmp_path: Path):
    works = peers("works")
    path, overrides = works.make(works.WORKS["learn"], tmp_path)
    work = json.loads(path.read_text())
    assert overrides == works.VALIDATED
    assert (work["prompts_per_step"], work["answers"], work["max_new_tokens"]) == (64, 4, 48)
    assert len(work["prompts"]) == len(work["texts"]) == work["steps"] * 64
    assert len({len(prompt) for prompt in work["prompts"]}) == 1, "a peer would have to pad"
    assert len(work["held_out"]) == len(work["truths"]) == 200


def test_the_learning_rate_is_that_of_our_schedule(peers):
    import torch

    peer_side = peers("peer_side")
    work = {"learning_rate": 1.0, "betas": [0.9, 0.95], "epsilon": 1e-8, "weight_decay": 0.0}
    optimizer, schedule = peer_side.optimizer_of({**work, "warmup_steps": 4, "total_steps": 8}, torch.nn.Linear(1, 1))
    rates = []
    for _ in range(8):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_both_environments_pin_the_same(peers):
    ours = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / "cpu.lock").read_text(), re.MULTILINE))
    ours = {name.lower().replace("_", "-"): pin for name, pin in ours.items()}
    pins = peers("peer_environment").pins()
    assert {"torch", "transformers", "tokenizers"} <= set(pins) & set(ours)
    assert {name: pin for name, pin in pins.items() if ours.get(name, pin) != pin} == {}


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--append"], ["--work", "demo", "--steps", "3"]])
def test_nothing_to_measure_is_refused(peers, arguments):
    with pytest.raises(SystemExit) as ended:
        peers("run").parse(arguments)
    assert ended.value.code == 2
