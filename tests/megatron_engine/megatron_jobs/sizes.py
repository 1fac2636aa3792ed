"""Models of random sizes: scored, exported, and the gradient of one update."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import megatron_data as data
from megatron_layouts import VOCABULARY
from megatron_ranks import STILL, Job, trainer_of, write_arrays
from megatron_registry import jobs, operation
from megatron_samples import updated
from megatron_sizes import CASES

from roll_opd.config.plan import MicroBatchLimits, ObjectivePlan
from roll_opd.megatron.export import save_hf

PASSES = ("pack", "shared_cold")  # packed; with shared prefixes and split into micro-batches


@operation
def sized(job: Job, root: Path) -> None:
    """Score, export, and write the gradient of one packed update with a learning rate of zero."""
    trainer = trainer_of(job, root, STILL, MicroBatchLimits(tokens=120))
    for name in PASSES:
        rows, tokens, temperature, trainer.share_prefixes = data.PASSES[name]
        trainer.plan = replace(trainer.plan, forward_limits=MicroBatchLimits(sequences=rows, tokens=tokens))
        found = trainer.compute_logprobs(data.sequences(VOCABULARY), temperature)
        write_arrays(root / f"{job['name']}-{name}.npz", found)
    save_hf(trainer, root / f"{job['name']}.hf")
    trainer.share_prefixes = False
    updated(trainer, data.train_samples(0, "opd"), ObjectivePlan(), data.TEMPERATURE)
    for parameter in (parameter for chunk in trainer.chunks for parameter in chunk.parameters()):
        parameter.data.copy_(parameter.main_grad)
    save_hf(trainer, root / f"{job['name']}-gradient.hf")


@jobs
def sizes_jobs() -> Iterator[Job]:
    for family, layout in CASES:
        yield {"op": "sized", "name": f"sized-{family}-{layout}", "model": f"sized-{family}", "layout": layout}
