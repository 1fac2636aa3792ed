"""Whole runs of the objectives with a live gradient, student and teacher on different layouts."""

import numpy as np
import pytest
from runs import SMALL, launch

STEPS = 6
SHORT = (
    *SMALL,
    "validation=null",
    "save_steps=0",
    "samples_per_step=64",
    f"max_steps={STEPS}",
    # the teacher is on both slots (TP2), the student on one
    "student_train.training_args.learning_rate=3e-4",
    "student_train.training_args.warmup_steps=0",
    "student_train.training_args.lr_scheduler_type=constant",
)


@pytest.mark.parametrize(
    "objective",
    [
        ("opd_objective=full", "opd_divergence=reverse_kl"),
        ("opd_objective=topk", "opd_topk=8", "opd_topk_source=student", "opd_divergence=jsd", "opd_jsd_beta=0.9"),
    ],
    ids=["full", "topk"],
)
def test_a_divergence_in_the_loss_teaches(objective: tuple[str, ...], tmp_path) -> None:
    run = launch(tmp_path / "run", *SHORT, *objective)
    assert run.code == 0, run.output[-4000:]
    rows = run.rows("metrics.jsonl")[1:]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    losses = [row["actor/opd_loss"] for row in rows]
    assert all(loss > 0 for loss in losses)
    assert np.mean(losses[-2:]) < 0.6 * losses[0]
    assert np.mean([row["opd/reverse_kl/mean"] for row in rows[-2:]]) < 0.6 * rows[0]["opd/reverse_kl/mean"]
    assert all(row["actor/total_loss"] == pytest.approx(row["actor/opd_loss"], rel=1e-6) for row in rows)
    assert all(row["actor/grad_norm"] > 0 and not row["actor/skipped_updates"] for row in rows)
    samples = run.rows("samples.jsonl")
    assert len(samples) == STEPS * 64
    for row in samples:  # the sampled reverse KL is measured as ever, and is no part of an advantage
        assert not np.any(row["advantages"]) and len(row["teacher_logprobs"]["teacher"]) == len(row["student_logprobs"])
    if "opd_objective=full" in objective:  # its mean is an estimate of the exact one
        first = [np.array(row["student_logprobs"]) - row["teacher_logprobs"]["teacher"] for row in samples[:64]]
        spread = np.concatenate(first).std() / np.sqrt(sum(len(gaps) for gaps in first))
        assert losses[0] == pytest.approx(rows[0]["opd/reverse_kl/mean"], abs=5 * spread)
