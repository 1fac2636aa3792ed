"""One update of SFT, of DPO and of demonstrations among the student's samples."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import megatron_data as data
import numpy as np
from megatron_data import train_samples
from megatron_layouts import VOCABULARY
from megatron_ranks import Job, held, record, trainer_of, write_json
from megatron_registry import jobs, operation
from megatron_samples import TrainSample, updated

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import MicroBatchLimits, ObjectivePlan
from roll_opd.megatron.export import save_hf

# one update each, from rows with answers; in the last one these are a part of the batch
SUPERVISED = {
    "sft": ObjectivePlan(policy_loss="sft", loss_agg_mode="token-mean"),
    "dpo": ObjectivePlan(
        policy_loss="dpo",
        policy_loss_args={"beta": 0.3, "label_smoothing": 0.1},
        paired=True,
        kl_loss="k2",
        loss_agg_mode="seq-mean-token-mean",
    ),
    "mix_chord": ObjectivePlan(
        policy_loss="mix_chord",
        policy_loss_args=FrozenDict(
            {"mu_warmup_steps": 10, "mu_peak": 0.9, "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.2}
        ),
        adv_estimator="grpo",
        pg_clip_low=0.1,
        pg_clip_high=0.3,
        dual_clip=1.2,
        kl_loss="k2",
        kl_loss_coef=0.2,
        entropy_loss_coef=0.02,
        loss_agg_mode="seq-mean-token-mean",
    ),
}
# layout -> (sequences a micro-batch, tokens a micro-batch); a pair is never torn apart
SUPERVISED_LAYOUTS = {"tp2dp2": (None, 70), "pp2": (4, None), "tp2pp2": (2, None), "cp2": (None, 70)}
SUPERVISED_STEP = 4  # of the run; mix_chord's mu is 4/10 of its peak


def answered(prompt: np.ndarray, answer: np.ndarray) -> TrainSample:
    mask, zeros = np.ones(len(answer), dtype=bool), np.zeros(len(answer), np.float32)
    return TrainSample(np.concatenate([prompt, answer]), len(prompt), mask, zeros, zeros, zeros, old_logprobs=None)


def supervised_samples(schema: str) -> list[TrainSample]:
    """Return answers in which every token is trained on; for schema dpo in pairs, with the log-probs of a reference
    policy.

    For mix_chord they are demonstrations, between complete samples of the student.
    """
    rng = np.random.default_rng(300)
    rows = []
    for _ in range(7):
        prompt = rng.integers(0, VOCABULARY, size=int(rng.integers(1, 9)))
        answers = [rng.integers(0, VOCABULARY, size=int(rng.integers(3, 30))) for _ in range(1 + (schema == "dpo"))]
        rows.append((prompt, tuple(answers)))
    samples = [answered(prompt, answer) for prompt, answers in rows for answer in answers]
    if schema == "sft":
        return samples
    if schema == "mix_chord":
        demonstrations = [replace(sample, demonstration=True) for sample in samples]
        own = [
            replace(s, reward=1.0, ref_logprobs=rng.normal(-4.6, 0.5, size=len(s.action_mask)).astype(np.float32))
            for s in train_samples(3, "ppo", len(demonstrations))
        ]
        return [sample for pair in zip(own, demonstrations, strict=True) for sample in pair]
    return [replace(s, ref_logprobs=rng.normal(-4.6, 0.5, size=len(s.action_mask)).astype(np.float32)) for s in samples]


@operation
def supervised(job: Job, root: Path) -> None:
    """Run one update with several micro-batches per rank."""
    limits = MicroBatchLimits(*SUPERVISED_LAYOUTS[job["layout"]])
    trainer = trainer_of({**job, "model": "qwen3_tied"}, root, data.optimizer_plan(True), limits)
    schema = job["schema"]
    result = updated(trainer, supervised_samples(schema), SUPERVISED[schema], 1.0, SUPERVISED_STEP)
    write_json(root / f"{job['name']}.json", record(result))
    save_hf(trainer, root / f"{job['name']}.hf")
    held(trainer, job, root)


@jobs
def supervised_jobs() -> Iterator[Job]:
    for layout in SUPERVISED_LAYOUTS:
        for schema in SUPERVISED:
            yield {"op": "supervised", "name": f"{schema}-{layout}", "schema": schema, "layout": layout}
