"""RL on the best and the worst answers of each prompt; the update leaves out the answers between them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from roll_opd.config.schema import Many, Section, Top, ours
from roll_opd.objective.filters import masked_by
from roll_opd.pipelines import distill
from roll_opd.pipelines.run_context import Run
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.samples.sample import Sample


@dataclass(frozen=True, kw_only=True)
class Selection(Section):
    """`selection`: the answers of a prompt that are in the update."""

    best: Many = ours(1, "number of answers with the highest rewards")
    worst: Many = ours(1, "number of answers with the lowest rewards")


@dataclass(frozen=True, kw_only=True)
class BestAndWorst(Top):
    """Keys of the pipeline on the best and the worst answers of each prompt."""

    pipeline = "best_and_worst"
    title = "reinforcement learning on the best and worst answers"
    selection: Selection = ours(Selection(), "the answers of a prompt that are in the update")


async def train(run: Run, workers: RunWorkers) -> None:
    """Train from the first step, or from the one after a checkpoint, to `plan.max_steps`."""
    await distill.train(run, workers, partial(best_and_worst, selection=run.plan.pipeline_args["selection"]))


def best_and_worst(samples: Sequence[Sample], selection: Selection) -> list[Sample]:
    """Mask the samples of each group, except those with the highest and the lowest rewards."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_id].append(sample)
    between: set[str] = set()
    for group in groups.values():
        ranked = sorted(group, key=lambda sample: sample.reward or 0.0)
        between.update(sample.id for sample in ranked[selection.worst : -selection.best])
    return [masked_by(sample, {"best_and_worst": sample.id in between}) for sample in samples]
