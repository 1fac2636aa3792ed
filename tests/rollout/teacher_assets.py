"""Roles whose numbers come from Hugging Face models: they replace Megatron in a preflight."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from roll_opd.config.plan import Layout, MegatronPlan, MicroBatchLimits, ModelPlan, TeacherPlan
from roll_opd.samples.micro_batches import Packing, ShardedBatch
from roll_opd.samples.sample import Sample, as_columns
from roll_opd.teachers.logprob_checks import Check
from roll_opd.teachers.megatron_teacher import MegatronScorer
from roll_opd.teachers.scoring import Teacher
from roll_opd.teachers.teacher_preflight import TeacherPreflight
from roll_opd.teachers.views import SameTokens
from roll_opd.workers.student import Student


@dataclass
class Group:
    """The ranks of a role, in this process."""

    model: PreTrainedModel
    plan: MegatronPlan
    change: Callable[[float], float] = field(default=lambda temperature: temperature)  # what a fault makes of it

    packing = Packing(ranks=1)

    async def scatter(
        self, method: str, sharded: ShardedBatch, temperature: float, **wanted: Any
    ) -> list[tuple[int, Any]]:
        assert method == "compute_targets"
        answers = {}
        (shard,) = sharded.shards
        samples: Any = shard.samples
        for number in (number for part in shard.micro_batches for number in part):
            tokens, prompt = samples._value[number].tokens, samples._value[number].prompt_length
            logits = logits_of(self.model, tokens)[prompt - 1 :]
            scored = (logits / self.change(temperature)).log_softmax(-1)
            values = {"logprobs": scored.gather(1, torch.from_numpy(tokens[prompt:])[:, None])[:, 0]}
            shared = logits[:, : wanted["vocab_size"]]
            values["topk_logprobs"], ids = (shared / self.change(temperature)).log_softmax(-1).topk(wanted["topk"])
            values["topk_ids"] = ids
            if wanted.get("plain"):
                values["plain_logprobs"] = shared.log_softmax(-1).gather(1, ids)
            answers[number] = {name: value.numpy() for name, value in values.items()}
        return [(0, answers)]


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: np.ndarray) -> torch.Tensor:
    """[T-1, V]: row t is of the token that follows token t."""
    return model(torch.from_numpy(tokens)[None]).logits[0, :-1].float()


def megatron(path: Path | str) -> MegatronPlan:
    return MegatronPlan("teacher", ModelPlan(str(path)), (0,), Layout(), MicroBatchLimits())


def student_of(model: PreTrainedModel, path: Path | str) -> Student:
    plan: Any = megatron(path)
    group: Any = Group(model, plan)
    return Student(plan, group)


def teacher_of(model: PreTrainedModel, path: Path | str, **faults: Any) -> Teacher:
    plan = megatron(path)
    group: Any = Group(model, plan, **faults)
    return teacher_with(group, model.config.vocab_size, TeacherPlan("teacher", plan, 1.0))


def teacher_with(group: Any, vocab_size: int, plan: TeacherPlan) -> Teacher:
    return Teacher(plan, MegatronScorer(plan.name, group, vocab_size), SameTokens(plan.name))


@torch.no_grad()
def sampled(
    student: PreTrainedModel, prompts: Sequence[Sequence[int]], temperature: float, longest: int = 40
) -> list[Sample]:
    """Return one sample of the student a prompt; prompts have one length."""
    torch.manual_seed(0)
    whole = student.generate(
        torch.tensor(prompts), do_sample=True, temperature=temperature, top_k=0, max_new_tokens=longest
    ).numpy()
    experiences = []
    for number, row in enumerate(whole):
        length = len(prompts[number])
        ends = np.flatnonzero(row[length:] == student.config.eos_token_id)
        tokens = row[: length + ends[0] + 1] if len(ends) else row
        experiences.append(
            Sample(
                id=str(number),
                group_id=str(number),
                tag="math_rule",
                tokens=tokens,
                prompt_length=length,
                finish_reason="stop" if len(ends) else "length",
                columns=as_columns(action_mask=np.ones(len(tokens) - length, dtype=bool)),
            )
        )
    return experiences


def preflight_of(
    student: Student,
    teacher: Teacher,
    report: Callable[[str, Sequence[Check]], None],
    mode: Any = "warn",
    may_be_student: bool = False,
) -> TeacherPreflight:
    return TeacherPreflight(mode, student.group, (teacher,), report, may_be_student=may_be_student)
