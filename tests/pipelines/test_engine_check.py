"""Whole runs whose engine samples from the student, or from another distribution."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import SMALL, Run, launch
from stage import PURE, SHORT, WITH_TEACHER, Stage, optimizer_of

from roll_opd.pipelines import distill
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.rollout.producer import Rollouts

ROW, LOGPROBS = "drawn from the student", "log-probs of the engine"
SPECULATION = "+student_infer.strategy_args.strategy_config.speculative_config="


def run(stage: Stage, tmp_path: Path, *overrides: str, config: tuple[str, str] = PURE) -> Run:
    role = "student_train" if config == PURE else "actor_train"
    settings = (*SHORT, *optimizer_of(role), "max_steps=2", "teacher_preflight=false")
    return stage.run(*settings, *overrides, config=config, place=tmp_path)


def verdicts(run: Run) -> dict[str, str]:
    (rows,) = json.loads((run.path / "preflight.json").read_text()).values()
    return {row["check"]: row["verdict"] for row in rows}


def samples_with(monkeypatch: pytest.MonkeyPatch, **sampling: Any) -> None:
    """Let the engine sample with other settings than the run's plan."""
    original = distill.rollouts_of

    def rollouts_of(*args: Any) -> Rollouts:
        made = original(*args)
        made.context = replace(made.context, sampling=replace(made.context.sampling, **sampling))
        return made

    monkeypatch.setattr(distill, "rollouts_of", rollouts_of)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        (PURE, ()),
        pytest.param(
            PURE,
            ("student_infer.generating_args.top_p=0.9", "student_infer.generating_args.top_k=12"),
            marks=pytest.mark.nightly,
        ),
        (PURE, ("async_generation_ratio=1",)),
        pytest.param(WITH_TEACHER, ("actor_infer.generating_args.temperature=0.8",), marks=pytest.mark.nightly),
    ],
)
def test_a_right_engine_is_no_fault(
    stage: Stage, tmp_path: Path, config: tuple[str, str], overrides: tuple[str, ...]
) -> None:
    made = run(stage, tmp_path, *overrides, config=config)
    assert made.code == 0 and verdicts(made) == {ROW: "ok", LOGPROBS: "ok"}
    for row in made.rows("metrics.jsonl")[1:]:
        assert row["rollout/engine/tokens"] > 500 and abs(row["rollout/engine/z"]) < 5
        assert row["rollout/engine/compared"] > 0 and row["rollout/engine/root_mean_square"] < 1e-5


@pytest.mark.parametrize("sampling", [{"temperature": 0.6}, {"top_p": 0.7}, {"top_k": 1}])
def test_a_run_ends_before_its_first_update_if_the_engine_samples_otherwise(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    samples_with(monkeypatch, **sampling)
    made = run(stage, tmp_path)
    assert made.code == 1 and "failed" in verdicts(made).values()
    assert [row["step"] for row in made.rows("metrics.jsonl")] == [0]


COLD = """
from roll_opd.workflows import WORKFLOWS, Experience, Workflow

@WORKFLOWS.register_module("cold")
class Cold(Workflow):
    def run(self):
        made = []
        prompt = [{"role": "user", "content": "12+34="}]
        top, penalty = {"top_k": 3, "top_p": 0.8}, {"repetition_penalty": 1.3}
        for options in ({"temperature": 0.4}, top, {"temperature": 0}, penalty):
            made += self.model.chat(prompt, **options)
        for one in made:
            one.reward = 1.0
        return made
"""


@pytest.mark.nightly
def test_calls_with_other_settings_are_no_fault(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "cold.py").write_text(COLD)
    made = run(stage, tmp_path, f"plugin_dir={tmp_path}/plugins", "workflow=cold", "deterministic=false")
    assert made.code == 0 and verdicts(made) == {ROW: "ok", LOGPROBS: "ok"}
    assert made.rows("metrics.jsonl")[-1]["rollout/engine/tokens"] > 500


@pytest.mark.nightly
def test_with_warn_the_run_goes_on(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples_with(monkeypatch, temperature=0.6)
    made = run(stage, tmp_path, "engine_check=warn")
    assert made.code == 0 and verdicts(made)[LOGPROBS] == "failed"
    assert made.rows("metrics.jsonl")[-1]["rollout/engine/difference"] > 1e-3


@pytest.mark.nightly
def test_samples_of_older_weights_do_not_hide_that_engines_have_other_weights(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With S = 1, the second step has no token of the current weights; then the student gets other weights."""
    send = RunWorkers.send_weights

    async def send_and_change(workers: RunWorkers, version: int, *, updated: bool = True) -> None:
        await send(workers, version, updated=updated)
        if version == 2:
            await workers.student.load(stage.place / "start")

    monkeypatch.setattr(RunWorkers, "send_weights", send_and_change)
    made = run(stage, tmp_path, "async_generation_ratio=1", "max_steps=4")
    assert made.code == 1 and [row["step"] for row in made.rows("metrics.jsonl")] == [0, 1]


WRONG_DRAFTS = """
import torch
from vllm.v1.sample.rejection_sampler import expand_kernel

class WrongDrafts:
    pass

def expanded(output, values, ends, *rest):  # another temperature, as with vLLM's own kernel
    output.fill_(0.3 if output.is_floating_point() else 5)

expand_kernel._impl = expanded
"""


@pytest.mark.nightly
def test_speculation_is_admitted_if_its_samples_are_right(tmp_path: Path) -> None:
    """The draft model is the start of the student, which it leaves."""
    config = "{model: examples/demo/models/student, num_speculative_tokens: 3}"
    for number, written in enumerate(("{method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 2}", config)):
        made = launch(
            tmp_path / str(number),
            *SMALL,
            "teacher_preflight=false",
            "max_steps=3",
            "async_generation_ratio=1",
            SPECULATION + written,
        )
        assert made.code == 0 and set(verdicts(made).values()) == {"ok"}, made.output[-3000:]
        for row in made.rows("metrics.jsonl")[1:]:
            assert abs(row["rollout/engine/z"]) < 5
            assert 0 < row.get("rollout/draft_acceptance", 0.5) < 1  # none if the last step generated nothing
        assert sum(row.get("rollout/drafted_tokens", 0) for row in made.rows("metrics.jsonl")) > 500


@pytest.mark.nightly
def test_speculation_that_draws_wrong_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_drafts.py").write_text(WRONG_DRAFTS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    made = launch(
        tmp_path / "out",
        *(
            *SMALL,
            "teacher_preflight=false",
            "max_steps=2",
            SPECULATION + "{method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 2}",
        ),
        "+student_infer.strategy_args.strategy_config.worker_extension_cls=wrong_drafts.WrongDrafts",
    )
    assert made.code == 1 and "failed" in verdicts(made).values()
    assert [row["step"] for row in made.rows("metrics.jsonl")] == [0] and "speculative_config" in made.output
