"""How often a sampler answers held-out prompts correctly, by the judges' word."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from roll_opd.config.plan import SamplingPlan
from roll_opd.data.source import Prompt
from roll_opd.rollout.scheduler import Scorers, roll_out
from roll_opd.tracking.clock import PhaseClock
from roll_opd.workers.roles import Judge, Sampler

VALIDATION_DRAW = 2**31  # draws of validation samples start here, far from those of training


async def validate(
    prompts: Sequence[Prompt],
    sampler: Sampler,
    sampling: SamplingPlan,
    judges: Sequence[Judge],
    *,
    seed: int,
    chunk_samples: int,
    clock: PhaseClock,
) -> dict[str, float]:
    """Return `val_correct/all/mean` and `val_correct/<tag>/mean`: mean reward over all samples, 0 to 1 for a rule."""
    with clock.phase("validate"):
        answers = await roll_out(
            prompts,
            sampler,
            sampling,
            Scorers(judges=judges),
            first_draw=VALIDATION_DRAW,
            seed=seed,
            chunk_samples=chunk_samples,
            clock=clock,
        )
    experiences = answers.experiences()
    rewards: dict[str, list[float]] = defaultdict(list)
    for experience in experiences:
        if experience.reward is not None:
            rewards["all"].append(experience.reward)
            rewards[experience.tag].append(experience.reward)
    metrics = {f"val_correct/{tag}/mean": float(np.mean(values)) for tag, values in rewards.items()}
    lengths = [experience.response_length for experience in experiences]
    return {**metrics, "val/response_length/mean": float(np.mean(lengths))}
