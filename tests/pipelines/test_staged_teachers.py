"""docs/extending.md: the scorer of the section on teachers replaces the Megatron teacher in a real run."""

import json
import runpy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runs import REPOSITORY
from safetensors.torch import load_file
from stage import PURE, SHORT, Stage, optimizer_of

from roll_opd.config.plan import TeacherPlan
from roll_opd.teachers.scoring import Teacher

STEPS = 2
OF_THE_TEACHER = ("opd/teacher_logprob", "opd/reverse_kl/mean")
TOPK_CHECKS = {"sampling temperature", "sees its input", "top-16 overlap"}


def scorer_of_the_page() -> Any:
    return runpy.run_path(str(REPOSITORY / "examples/teachers/huggingface_teacher.py"))["HuggingFace"]


def test_another_scorer_teaches_what_the_megatron_teacher_teaches(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same samples, log-probs, losses and weights, up to rounding; and an objective over a top-k is refused."""
    settings = (*SHORT, *optimizer_of("student_train"), f"max_steps={STEPS}")
    by_megatron = stage.run(*settings, config=PURE, name="by_megatron")
    started, scorer_class, scorers = stage._teacher, scorer_of_the_page(), []

    def elsewhere(plan: TeacherPlan) -> Teacher:
        scorers.append(scorer_class(SimpleNamespace(name="elsewhere", model=plan.source.location)))
        return replace(started(plan), scorer=scorers[-1])

    monkeypatch.setattr(stage, "_teacher", elsewhere)
    by_page = stage.run(*settings, config=PURE, name="by_page")
    assert by_megatron.code == by_page.code == 0 and len(scorers) == 1
    first, second = (run.rows("metrics.jsonl")[1] for run in (by_megatron, by_page))
    for name in OF_THE_TEACHER:
        assert first[name] != 0 and second[name] == pytest.approx(first[name], abs=1e-5)
    both = by_megatron, by_page
    samples = [{row["id"]: row for row in run.rows("samples.jsonl") if row["step"] == 1} for run in both]
    assert samples[0].keys() == samples[1].keys() and len(samples[0]) == 64
    for name, row in samples[0].items():
        np.testing.assert_allclose(
            samples[1][name]["teacher_logprobs"]["teacher"], row["teacher_logprobs"]["teacher"], atol=1e-4
        )
    weights = [load_file(run.path / f"checkpoints/step_{STEPS}/hf/model.safetensors") for run in both]
    before = load_file(stage.first_weights)
    for name, tensor in weights[0].items():
        moved, apart = (tensor - before[name]).norm(), (weights[1][name] - tensor).norm()
        assert moved > 0 and apart <= 0.05 * moved, name
    checks = [json.loads((run.path / "summary.json").read_text())["preflight"]["teacher"] for run in both]
    assert {row["check"] for row in checks[0]} - {row["check"] for row in checks[1]} == TOPK_CHECKS
    assert {row["verdict"] for row in checks[1]} == {"ok"}

    assert stage.run(*settings, "opd_objective=topk", config=PURE, name="refused").code == 1
    assert "teacher teacher cannot compute the targets (topk) of opd_objective: topk" in capsys.readouterr().err
