"""How often a sampler answers held-out prompts correctly, by the judges' word."""

from collections.abc import Sequence
from dataclasses import replace

from roll_opd.config.plan import SamplingPlan
from roll_opd.data.experience import Experience
from roll_opd.data.source import Prompt
from roll_opd.rollout.judging import Judging
from roll_opd.rollout.scheduler import Scorers, roll_out
from roll_opd.tracking.clock import PhaseClock
from roll_opd.tracking.metrics import validation_metrics
from roll_opd.workers.judge import Judge
from roll_opd.workers.roles import Sampler

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
    """Return the metrics of `validation_metrics` for `sampling.n` answers a prompt."""
    judging = Judging(judges)
    with clock.phase("validate"):
        selection = await roll_out(
            prompts,
            sampler,
            sampling,
            Scorers(),
            judging,
            first_draw=VALIDATION_DRAW,
            seed=seed,
            chunk_samples=chunk_samples,
            clock=clock,
        )
        answers = await judging.answered(selection.experiences())
    return validation_metrics([_by_main_reward(answer, judges) for answer in answers], sampling.n)


def _by_main_reward(answer: Experience, judges: Sequence[Judge]) -> Experience:
    """An answer is right or wrong by its domain's own reward: what is added to it, and its weight, are for training."""
    plan = next((judge.plan for judge in judges if judge.plan.domain == answer.domain), None)
    if plan is None or not plan.is_weighted or plan.terms[0].name not in answer.reward_parts:
        return answer
    return replace(answer, reward=answer.reward_parts[plan.terms[0].name])
