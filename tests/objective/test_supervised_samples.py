"""Rows with answers become samples: the loss reads every token of an answer, and no advantages."""

import numpy as np
import pytest

from roll_opd.config.plan import ObjectivePlan
from roll_opd.objective.columns import loss_columns
from roll_opd.objective.demonstrations import supervised_samples


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
        samples = [sample.with_columns(ref_logprobs=ref) for sample, ref in zip(samples, references, strict=True)]
    assert len({sample.id for sample in samples}) == len(samples)

    found = loss_columns(samples, (), ObjectivePlan(policy_loss="sft"))
    answers_given = [(prompt, answer) for prompt, given in rows for answer in given]
    tokens = sum(len(answer) for _, answer in answers_given)
    for one, (prompt, answer), reference in zip(found, answers_given, references, strict=True):
        zeros = np.zeros(len(answer), np.float32)
        expected = {
            "mask": np.ones(len(answer), bool),
            "weight": np.full(len(answer), 1 / tokens, np.float32),
            "advantages": zeros,
            "opd_coefficients": zeros,
            "opd_teacher": zeros,
            **({"ref_logprobs": reference} if has_reference else {}),
        }
        assert one.tokens.tolist() == [*prompt, *answer] and one.prompt_length == len(prompt)
        assert one.columns.keys() == expected.keys() and one.routes is None
        for name, wanted in expected.items():
            assert one.columns[name].dtype == wanted.dtype and np.array_equal(one.columns[name], wanted), name
