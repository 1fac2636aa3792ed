"""Updates with values that are not finite, and the update after them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_data as data
import numpy as np
import torch.distributed as dist
from megatron_ranks import Job, identical, meet_anew, trainer_of, weights, write_json
from megatron_registry import jobs, operation
from megatron_samples import updated

from roll_opd.config.plan import MicroBatchLimits, OptimizerPlan
from roll_opd.megatron import parallel

POISON = {"dp2": "nan", "pp2": "inf", "tp2": "nan"}  # layout -> what stands where a number should


@operation
def poison(job: Job, root: Path) -> None:
    """Run invalid updates and then a valid one; in a second trainer run only the valid one.

    Infinite log-probs of the sampling weights or of the reference policy would be clamped by a ratio and an estimator.
    """
    job = {**job, "model": "qwen3_tied"}
    objective = data.OBJECTIVES["opd"]
    optimizer = OptimizerPlan(learning_rate=1e-3)  # constant: the bad update's place in the schedule shows nowhere
    good = data.train_samples(0, "opd")
    referred = replace(objective, kl_loss_coef=0.1)
    place, value = np.flatnonzero(good[7].action_mask)[2], -float(job["value"])
    bad = []
    for name in ("opd_teacher", "old_logprobs", "ref_logprobs"):
        batch = [replace(sample, **{name: sample.opd_teacher.copy()}) for sample in good]
        getattr(batch[7], name)[place] = value
        bad.append(batch)

    trainer = trainer_of(job, root, optimizer, MicroBatchLimits(tokens=70))
    start = weights(trainer)
    applied = [updated(trainer, batch, referred, 1.0).applied for batch in bad]
    after_bad = weights(trainer)
    applied.append(updated(trainer, good, objective, 1.0).applied)
    after_both = weights(trainer)
    parallel.shutdown()

    meet_anew(root / f"port-{job['name']}")
    trainer = trainer_of(job, root, optimizer, MicroBatchLimits(tokens=70))
    updated(trainer, good, objective, 1.0)
    facts = {
        "applied": applied,
        "untouched": identical(start, after_bad),
        "moved": not identical(start, after_both),
        "no_trace": identical(after_both, weights(trainer)),
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    write_json(root / f"{job['name']}.json", everyone)


@jobs
def poison_jobs() -> Iterator[Job]:
    for layout, value in POISON.items():
        yield {"op": "poison", "name": f"poison-{layout}", "layout": layout, "value": value}
