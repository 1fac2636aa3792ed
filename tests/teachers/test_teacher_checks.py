"""Ten faulty teachers and some sound teachers, made from the demo's models and computed with Hugging Face."""

import asyncio
import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from teacher_assets import logits_of, megatron, preflight_of, sampled, student_of, teacher_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from roll_opd.base.failures import RunError
from roll_opd.base.paths import REPOSITORY
from roll_opd.config.plan import ContextPlan, ModelPlan, TeacherPlan
from roll_opd.data.templates import load_tokenizer
from roll_opd.samples.sample import Sample, teacher_columns
from roll_opd.samples.sample import changed as with_fields
from roll_opd.teachers.logprob_checks import WIDTH, Check, table
from roll_opd.teachers.views import view_of

DEMO = REPOSITORY / "examples/demo"
pytestmark = pytest.mark.slow
STUDENT, TEACHER = DEMO / "models/student", DEMO / "models/teacher"
TEMPERATURE = 0.8


@dataclass
class Logger:
    rows: dict[str, Check] = field(default_factory=dict)

    def teacher_preflight(self, name: str, rows: list[Check]) -> None:
        self.rows = {row.check: row for row in rows}
        assert max(map(len, table(name, rows).splitlines())) <= WIDTH


@dataclass
class Demo:
    student: PreTrainedModel
    teacher: PreTrainedModel
    samples: list[Sample]

    def check(
        self, model: PreTrainedModel, *, mode: Any = "warn", may_be_student: bool = False, **faults: Any
    ) -> dict[str, Check]:
        """Return the preflight rows of `model`; its log-probs in the run have the same faults."""
        group = teacher_of(model, TEACHER, **faults)
        logger = Logger()
        preflight = preflight_of(
            student_of(self.student, STUDENT), group, logger.teacher_preflight, mode, may_be_student=may_be_student
        )
        change = faults.get("change", lambda temperature: temperature)
        scored = [
            e.with_columns(**teacher_columns({"teacher": in_run(model, e, change(TEMPERATURE))})) for e in self.samples
        ]
        asyncio.run(preflight.check(scored, TEMPERATURE))
        return logger.rows


def in_run(model: PreTrainedModel, sample: Sample, temperature: float) -> np.ndarray:
    logits = logits_of(model, sample.tokens)[sample.prompt_length - 1 :]
    return (
        (logits / temperature)
        .log_softmax(-1)
        .gather(1, torch.from_numpy(sample.response_tokens)[:, None])[:, 0]
        .numpy()
    )


@pytest.fixture(scope="module")
def demo() -> Demo:
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (STUDENT, TEACHER)
    )
    tokenizer = load_tokenizer(str(STUDENT))
    prompts = []
    for line in (DEMO / "data/train.jsonl").read_text().splitlines()[:16]:
        messages = json.loads(json.loads(line)["messages"])
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text)["input_ids"])
    return Demo(student, teacher, sampled(student, prompts, TEMPERATURE))


def alarms(rows: dict[str, Check]) -> dict[str, str]:
    return {name: row.verdict for name, row in rows.items() if row.verdict != "ok"}


def changed(model: PreTrainedModel, change: Callable[[PreTrainedModel], Any]) -> PreTrainedModel:
    other = copy.deepcopy(model)
    with torch.no_grad():
        torch.manual_seed(0)
        change(other)
    return other


def _shuffled(model: PreTrainedModel) -> None:
    order = torch.randperm(model.config.vocab_size)
    for weight in (model.get_input_embeddings().weight, model.lm_head.weight):
        weight.copy_(weight[order].clone())


def _shifted(model: PreTrainedModel) -> None:
    for weight in (model.get_input_embeddings().weight, model.lm_head.weight):
        weight.copy_(weight.roll(1, 0))


def _rounded(model: PreTrainedModel) -> None:
    """Two bits: -1, 0 and 1 times the largest weight."""
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.copy_((weight / weight.abs().max()).round() * weight.abs().max())


def _second_half_new(model: PreTrainedModel) -> None:
    fresh = AutoModelForCausalLM.from_config(model.config).float()
    both = list(zip(model.parameters(), fresh.parameters(), strict=True))
    for weight, new in both[len(both) // 2 :]:
        weight.copy_(new)


FAULTS = {
    "first layer lost": lambda model: model.model.layers.__delitem__(0),
    "three layers lost": lambda model: model.model.layers.__delitem__(slice(1, None)),
    "zero final norm": lambda model: model.model.norm.weight.zero_(),
    "zero embedding": lambda model: model.get_input_embeddings().weight.zero_(),
    "other ids": _shuffled,
    "ids shifted by one": _shifted,
    "rounded to two bits": _rounded,
    "second half not loaded": _second_half_new,
    "head four times too large": lambda model: model.lm_head.weight.mul_(4),
    "NaN in a norm": lambda model: model.model.layers[1].input_layernorm.weight[:1].fill_(math.nan),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_teacher(demo: Demo, fault: str) -> None:
    assert alarms(demo.check(changed(demo.teacher, FAULTS[fault])))


@pytest.mark.parametrize("change", [lambda t: 2 * t, lambda t: 1.0], ids=["doubled", "not looked at"])
def test_a_wrong_temperature(demo: Demo, change: Callable[[float], float]) -> None:
    found = alarms(demo.check(demo.teacher, change=change))
    assert found["sampling temperature"] == "failed"


def test_sound_teachers(demo: Demo) -> None:
    """The demo's teacher, the student itself, and an untrained teacher with an untrained student."""
    assert alarms(demo.check(demo.teacher)) == {}
    assert alarms(demo.check(demo.student, may_be_student=True)) == {}
    torch.manual_seed(1)
    new = AutoModelForCausalLM.from_config(demo.student.config).float().eval()
    assert alarms(replace(demo, student=new).check(new, may_be_student=True)) == {}


def test_the_student_is_no_teacher_of_itself(demo: Demo) -> None:
    """A server may compute it in another precision."""
    for itself in (demo.student, changed(demo.student, round_to_bf16)):
        assert alarms(demo.check(itself)) == {"is not the student": "failed"}


def round_to_bf16(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        noise = 1 + 2**-9 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        parameter.data = (parameter.data * noise).bfloat16().float()


def test_a_failure_ends_the_run(demo: Demo) -> None:
    shuffled = changed(demo.teacher, _shuffled)
    with pytest.raises(RunError, match="the preflight of teacher teacher failed: mean log-prob, samples"):
        demo.check(shuffled, mode=True)
    assert demo.check(shuffled, mode=False) == {}


def test_a_preflight_reads_the_answers_of_rows(demo: Demo) -> None:
    """A worked answer in the row is scored too; a sound teacher gives it a higher probability than the student."""
    right = "1+4+0=5,6+3+0=9,6+2+0=8\n895"
    first = [replace(demo.samples[0], extra={"solution": right})]
    row = replace(demo, samples=first).check(demo.teacher)["mean log-prob, answers"]
    assert row.verdict == "ok"
    assert float(row.value.split(",")[0]) > -0.1


def test_log_probs_of_single_tokens_are_checked_with_the_cut_of_both_tokenizers(demo: Demo) -> None:
    """The tokenizers are the same, so every token is aligned 1:1."""
    context = ContextPlan(name="teacher", key="teacher", prompt_length=64, tokenizer=str(TEACHER))
    plan = TeacherPlan("teacher", megatron(TEACHER), 1.0, context=context, tokenizer=str(TEACHER), prefix_topk=20)
    teacher = replace(teacher_of(demo.teacher, TEACHER), plan=plan, view=view_of(plan, ModelPlan(str(STUDENT))))
    scored = [
        with_fields(
            e.with_columns(**teacher_columns({"teacher": in_run(demo.teacher, e, TEMPERATURE)})),
            teacher_prompts={"teacher": e.prompt_tokens},
        )
        for e in demo.samples
    ]
    logger = Logger()
    preflight = preflight_of(student_of(demo.student, STUDENT), teacher, logger.teacher_preflight)
    asyncio.run(preflight.check(scored, TEMPERATURE))
    assert logger.rows["aligned 1:1"].value.startswith("100% of bytes")
    assert logger.rows["same sequence twice"].value == "differs by 0.0e+00"
    assert alarms(logger.rows) == alarms(demo.check(demo.teacher))
