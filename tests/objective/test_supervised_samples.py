"""Rows with answers become samples like any other: the loss reads every token of an answer, and no advantage."""

from dataclasses import fields

import numpy as np
import pytest

from roll_opd.actors.megatron_actor import train_samples
from roll_opd.config.plan import ObjectivePlan
from roll_opd.roles.policy_roles import training_kind
from roll_opd.samples.experience import changed, supervised_samples
from roll_opd.samples.training import TrainSample


@pytest.mark.parametrize("answers", [1, 2], ids=["sft", "dpo"])
@pytest.mark.parametrize("has_reference", [False, True])
def test_an_answer_is_a_train_sample_without_advantages(answers: int, has_reference: bool) -> None:
    rng = np.random.default_rng(answers)
    rows = [
        (
            rng.integers(0, 99, rng.integers(1, 9)),
            tuple(rng.integers(0, 99, rng.integers(1, 30)) for _ in range(answers)),
        )
        for _ in range(5)
    ]
    samples = supervised_samples(rows)
    references = [rng.normal(size=sample.response_length).astype(np.float32) for sample in samples]
    if has_reference:
        samples = [changed(sample, ref_logprobs=ref) for sample, ref in zip(samples, references, strict=True)]
    assert len({sample.id for sample in samples}) == len(samples) and len({training_kind(s) for s in samples}) == 1

    expected = []
    for prompt, given in rows:
        for answer in given:
            zeros, mask = np.zeros(len(answer), np.float32), np.ones(len(answer), bool)
            ref = references[len(expected)] if has_reference else None
            whole = np.concatenate([prompt, answer])
            expected.append(TrainSample(whole, len(prompt), mask, zeros, zeros, zeros, None, ref, actions=mask))
    found = train_samples(samples, (), ObjectivePlan(policy_loss="sft"))
    for one, other in zip(found, expected, strict=True):
        for field in fields(TrainSample):
            value, wanted = getattr(one, field.name), getattr(other, field.name)
            if isinstance(wanted, np.ndarray):
                assert value.dtype == wanted.dtype and np.array_equal(value, wanted), field.name
            else:
                assert value == wanted, field.name
