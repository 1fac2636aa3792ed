"""The loss with teachers that have other tokenizers, against loops over chunks; same bits for equal tokens."""

from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
import torch

from roll_opd.config.plan import Layout, MegatronPlan, MicroBatchLimits, ModelPlan, ObjectivePlan, TeacherPlan
from roll_opd.objective.columns import loss_columns, with_total_advantages
from roll_opd.objective.opd_loss import opd_loss
from roll_opd.objective.registry import POLICY_LOSSES
from roll_opd.objective.reverse_kl import ChunkCredit
from roll_opd.samples.byte_alignment import Alignment
from roll_opd.samples.sample import Sample, changed, chunks_column, logprobs_column
from roll_opd.tracking.sample_metrics import alignment_metrics, opd_metrics

WORKER = MegatronPlan("", ModelPlan(""), (0,), Layout(), MicroBatchLimits())
TEACHERS = [TeacherPlan("plain", WORKER, 0.7), TeacherPlan("bytes", WORKER, 1.5), TeacherPlan("words", WORKER, 0.4)]
RULES = get_args(ChunkCredit)


def with_teacher(
    sample: Sample, name: str, teacher_ends: np.ndarray, missing: np.ndarray, seed: int, by_token: bool
) -> Sample:
    """Return the sample with the log-probs of a teacher whose tokens end at `teacher_ends`."""
    logprobs = -np.random.default_rng(seed).random(np.count_nonzero(~missing)).astype(np.float32)
    ends, mask = np.arange(1, sample.response_length + 1) * 2, sample.action_mask
    alignment = Alignment(ends, teacher_ends, missing, mask, by_token=by_token)
    columns = {logprobs_column(name): alignment.on_student_tokens(logprobs), chunks_column(name): alignment.credits}
    return changed(sample, columns={**sample.columns, **columns}, alignments={**sample.alignments, name: alignment})


def made(by_token: bool = False) -> list[Sample]:
    """Return samples of 2-byte tokens, without a teacher of bytes, with one, and with three teachers.

    `by_token`: each token has its own credit.
    """
    rng, found = np.random.default_rng(3), []
    for number, length in enumerate((7, 9, 5, 8)):
        own = -rng.random(length).astype(np.float32)
        columns = {"action_mask": np.ones(length, bool), "rollout_logprobs": own, "old_logprobs": own}
        if number != 1:
            columns[logprobs_column("plain")] = -rng.random(length).astype(np.float32)
        sample = Sample(np.arange(length + 2), 2, columns, id=str(number), group_id=str(number))
        if number:  # chunks of one to three student tokens, one of them without a teacher token
            ends = np.unique([3, 6, 9, 12, 13, 2 * length])
            ends = ends[ends <= 2 * length]
            sample = with_teacher(sample, "bytes", ends, np.arange(len(ends)) == 1, number, by_token)
        if number == 3:
            ends = np.array([8, 9, 16])
            sample = with_teacher(sample, "words", ends, np.zeros(3, bool), 9, by_token)
        found.append(sample)
    return found


def advantages(samples: Sequence[Sample], objective: ObjectivePlan) -> np.ndarray:
    """Return the advantages that the loss gives to the tokens: its gradient without their weights."""
    packed = loss_columns(samples, TEACHERS, objective)
    columns = {name: torch.tensor(np.concatenate([s.columns[name] for s in packed])) for name in packed[0].columns}
    logprobs_M = columns["old_logprobs"].clone().requires_grad_()
    lengths = [sample.response_length for sample in samples]
    arguments = POLICY_LOSSES.defaults(objective.policy_loss)
    loss, *_ = opd_loss(logprobs_M, columns, lengths, objective=objective, arguments=arguments, step=1)
    loss.backward()
    assert logprobs_M.grad is not None
    return (-logprobs_M.grad / columns["weight"]).numpy()


def of_loops(sample: Sample, rule: str) -> list[float]:
    """Return the advantages of a sample's tokens, from the formula."""
    found = [0.0] * sample.response_length
    for teacher in TEACHERS:
        q = sample.teacher_logprobs.get(teacher.name)
        if q is None:
            continue
        chunks = sample.columns.get(chunks_column(teacher.name), np.arange(sample.response_length))
        own = sample.student_logprobs.astype(float)
        for t, chunk in enumerate(chunks):
            members = [i for i, other in enumerate(chunks) if other == chunk and chunk >= 0]
            total = sum(own[i] - float(q[i]) for i in members)
            is_cut = teacher.name in sample.alignments
            if rule == "with_previous" and is_cut and chunk > 0 and chunks[chunk - 1] >= 0:
                total += sum(own[i] - float(q[i]) for i, other in enumerate(chunks) if other == chunks[chunk - 1])
            weight = {"prefix": 1.0, "whole": 1.0, "with_previous": 1.0, "mean": 1 / max(len(members), 1)}.get(rule)
            if weight is None:
                weight = own[t] / sum(own[i] for i in members) if members else 0.0
            found[t] -= teacher.opd_kl_coef * weight * total
    return found


@pytest.mark.parametrize("rule", RULES)
def test_the_loss_credits_chunks_as_loops_do(rule: ChunkCredit) -> None:
    samples, objective = made(by_token=rule == "prefix"), ObjectivePlan(opd_chunk_credit=rule)
    wanted = np.concatenate([of_loops(sample, rule) for sample in samples])
    assert advantages(samples, objective) == pytest.approx(wanted, abs=2e-6)
    valued = with_total_advantages(samples, TEACHERS, objective)
    assert np.concatenate([s.total_advantages for s in valued]) == pytest.approx(wanted, abs=1e-6)


def test_credit_does_not_depend_on_the_pack() -> None:
    samples, objective = made(), ObjectivePlan()
    whole = advantages(samples, objective)
    order = [2, 0, 3, 1]
    parts = np.split(
        advantages([samples[n] for n in order], objective), np.cumsum([samples[n].response_length for n in order])
    )
    assert np.concatenate([parts[order.index(n)] for n in range(4)]).tobytes() == whole.tobytes()


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "with_previous"])
def test_the_same_cut_gives_the_advantages_of_the_same_tokenizer_to_the_bit(rule: ChunkCredit) -> None:
    plain = [sample for sample in made() if "plain" in sample.teacher_logprobs and not sample.alignments]
    for sample in plain:
        ends = np.arange(1, sample.response_length + 1) * 2
        alignment = Alignment(ends, ends, np.zeros(len(ends), bool), sample.action_mask)
        given = sample.teacher_logprobs["plain"]
        columns = {"plain/logprobs": alignment.on_student_tokens(given), "plain/chunks": alignment.chunks}
        aligned = changed(sample, columns={**sample.columns, **columns})
        discount = 0.5 if rule == "prefix" else 0.0
        objective = ObjectivePlan(opd_chunk_credit=rule, opd_kl_discount=discount)
        plainly = ObjectivePlan(opd_kl_discount=discount)
        assert advantages([aligned], objective).tobytes() == advantages([sample], plainly).tobytes()
        one, other = (with_total_advantages([s], TEACHERS, objective)[0].total_advantages for s in (aligned, sample))
        assert one.tobytes() == other.tobytes()


def test_metrics_leave_out_uncovered_tokens_and_name_the_cut() -> None:
    samples = made()
    assert np.isnan(samples[1].teacher_logprobs["bytes"]).any()
    assert all(np.isfinite(value) for value in opd_metrics(samples).values())
    metrics = alignment_metrics(samples)
    sizes = np.concatenate([s.alignments["bytes"].sizes for s in samples[1:]])
    chunked = sum(size[2] for size in sizes if size[0] != 1 or size[1] != 1)
    assert metrics["opd/alignment/bytes/chunked_bytes"] == pytest.approx(chunked / sizes[:, 2].sum())
    assert metrics["opd/alignment/bytes/longest_chunk"] == sizes[:, 0].max()
    uncovered = sum(int((s.columns["bytes/chunks"] < 0).sum()) for s in samples[1:])
    assert metrics["opd/alignment/bytes/uncovered"] == pytest.approx(uncovered / 22)
    assert "opd/alignment/plain/uncovered" not in metrics
