"""Runs with rewards of a user, with failing rewards, and with lost reward processes."""

import asyncio
import importlib
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import ray
from runs import REPOSITORY, Run
from stage import SHORT, WITH_REWARD, Stage, optimizer_of

from roll_opd.base.frozen import freeze
from roll_opd.tracking.audit import audit
from roll_opd.workers.reward_pool import RewardPool

STEPS = 3
FAILING = '''
def failing(samples, rest):
    """Right or wrong, but it cannot bear some of the numbers."""
    scores = []
    for sample in samples:
        if int(sample.ground_truth) % 5 == rest:
            raise ArithmeticError(f"not {sample.ground_truth}")
        scores.append(float(sample.response.endswith(sample.ground_truth)))
    return scores
'''


def play(stage: Stage, name: str, *overrides: str) -> Run:
    settings = (*SHORT, *optimizer_of("actor_train"), f"max_steps={STEPS}", "use_kl_loss=false")
    return stage.run(*settings, *overrides, config=WITH_REWARD, name=name)


def own(stage: Stage, source: str, section: str) -> tuple[str, ...]:
    """Overrides for a reward in a module of the user's own."""
    (stage.place / "users" / "my_rewards.py").write_text(source)
    importlib.invalidate_caches()
    return ("~rewards", f"+rewards={section}")


@pytest.mark.nightly
def test_a_reward_worker_killed_in_a_batch_changes_nothing(stage: Stage) -> None:
    undisturbed = play(stage, "undisturbed")
    (pool,) = next(iter(stage.started.values()))
    caught = threading.Thread(target=kill_in_a_batch, args=(stage.place / "disturbed", pool))
    caught.start()
    disturbed = play(stage, "disturbed")
    caught.join(60)
    assert undisturbed.code == disturbed.code == 0 and not caught.is_alive()
    restarts = f"time/reward/{pool.plan.domain}/restarts"
    assert sum(row.get(restarts, 0) for row in disturbed.rows("metrics.jsonl")) == 1
    for name in ("metrics.jsonl", "samples.jsonl", "prompts.jsonl"):
        one, other = (timeless(run.rows(name)) for run in (undisturbed, disturbed))
        assert one == other
    weights = f"checkpoints/step_{STEPS}/hf/model.safetensors"
    assert (undisturbed.path / weights).read_bytes() == (disturbed.path / weights).read_bytes()


@pytest.mark.nightly
def test_the_reward_of_the_page_runs_as_it_is_printed(stage: Stage) -> None:
    page = (REPOSITORY / "docs/rewards/README.md").read_text()
    source = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    assert len(source.splitlines()) < 30
    section = "{short_math: {worker_cls: my_rewards.Brevity, price: 0.02}}"
    assert "short_math:\n    worker_cls: my_rewards.Brevity" in page and "price: 0.02" in page
    run = play(stage, "page", *own(stage, source, section))
    assert run.code == 0
    last = run.rows("metrics.jsonl")[-1]
    assert 0 <= last["reward/short_math/right/mean"] <= 1 and last["reward/short_math/errors"] == 0
    for sample in run.rows("samples.jsonl"):
        parts = sample["reward_parts"]
        assert sample["reward"] == pytest.approx(parts["right"] - 0.02 * parts["words"])
        assert sample["reward_reason"] == ("right" if sample["ground_truth"] in sample["response"] else "wrong")


@pytest.mark.nightly
def test_samples_whose_reward_fails(stage: Stage) -> None:
    """Left out of every mean and of the update, or wrong, or the end of the run."""
    section = "{{sums: {{worker_cls: my_rewards.failing, on_error: {on_error}, rest: 0}}}}"
    overrides = own(stage, FAILING, section.format(on_error="drop"))
    run = play(stage, "drop", *overrides)
    assert run.code == 0
    samples, rows = run.rows("samples.jsonl"), run.rows("metrics.jsonl")[1:]
    failed = [sample for sample in samples if int(sample["ground_truth"]) % 5 == 0]
    assert 0 < len(failed) < len(samples)
    assert sum(row.get("reward/sums/errors/ArithmeticError", 0) for row in rows) == len(failed)
    assert sum(row.get("reward/sums/excluded", 0) for row in rows) == len(failed)
    for sample in failed:
        assert sample["reward"] is None and sample["reward_reason"] == "ArithmeticError"
        assert not any(sample["loss_mask"])
        assert not any(sample["advantages"])
    assert any(sample["loss_mask"] is None and any(sample["advantages"]) for sample in samples)
    for step, row in enumerate(rows, 1):
        given = [sample["reward"] for sample in samples if sample["step"] == step and sample["reward"] is not None]
        assert row["reward/sums/mean"] == pytest.approx(sum(given) / len(given))

    zero = play(stage, "zero", *own(stage, FAILING, section.format(on_error="zero")))
    counted = [sample for sample in zero.rows("samples.jsonl") if int(sample["ground_truth"]) % 5 == 0]
    assert zero.code == 0 and counted and all(sample["reward"] == 0 for sample in counted)


@pytest.mark.nightly  # test_failed_runs.py shows on every push which groups are replaced
def test_failed_samples_are_replaced_or_end_a_run_below_the_floor(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    section = "{{sums: {{worker_cls: my_rewards.failing, on_error: {on_error}, rest: 0}}}}"
    run = play(stage, "replace", *own(stage, FAILING, section.format(on_error="replace")))
    assert run.code == 0 and audit(run.path)[1] == []
    assert any(row["failed"] for row in run.rows("ledger.jsonl"))
    assert not any(row["filtered"] for row in run.rows("ledger.jsonl"))
    assert all(int(sample["ground_truth"]) % 5 and sample["reward"] is not None for sample in run.rows("samples.jsonl"))
    floor = "min_batch_fraction=0.99"
    ended = play(stage, "floor", *own(stage, FAILING, section.format(on_error="drop")), floor)
    assert ended.code == 1 and "min_batch_fraction 0.99" in capsys.readouterr().err


def test_an_error_may_end_the_run(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    run = play(stage, "stop", *own(stage, FAILING, "{sums: {worker_cls: my_rewards.failing, rest: 1}}"))
    assert run.code == 1
    message = (
        r"rewards\.sums: sample .*: reward failing raised ArithmeticError: not \d+ \(.*my_rewards\.py:7\).*on_error"
    )
    assert re.search(message, capsys.readouterr().err)


def test_a_reward_that_always_fails_is_found_while_the_engines_start(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def starting(*_: object) -> None:
        await asyncio.Event().wait()  # for ever

    monkeypatch.setattr(stage, "workers", starting)
    source = "def broken(samples):\n    return [sample.extra['score'] for sample in samples]\n"
    play(stage, "broken", *own(stage, source, "{sums: {worker_cls: my_rewards.broken}}"))
    said = capsys.readouterr().err
    assert re.search(r"tried before the first step.*raised KeyError: 'score' \(.*my_rewards\.py:2\)", said)
    assert not (stage.place / "broken").exists()


def timeless(rows: list[dict]) -> object:
    return freeze(
        [{key: value for key, value in row.items() if not key.startswith(("time/", "system/"))} for row in rows]
    )


def kill_in_a_batch(experiment: Path, pool: RewardPool) -> None:
    """Kill the worker that is scoring samples; it is stopped before, so that it is certainly scoring."""
    metrics = experiment / "latest" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        time.sleep(0.01)
    (member,) = pool._pool.members.values()
    process = ray.get(member.worker.actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(process, signal.SIGSTOP)
    while not any(member.in_hand for member in pool._pool.members.values()):
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
