"""How often a sampler answers held-out prompts correctly, by their rewards; and a few of the answers, to read."""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from roll_opd.config.plan import SamplingPlan
from roll_opd.data.prompt_source import Prompt
from roll_opd.roles.reward_pool import RewardPool
from roll_opd.rollout.runs import PendingRewards, RolloutContext, roll_out
from roll_opd.samples.experience import Experience
from roll_opd.teachers.frozen_models import FrozenModels
from roll_opd.tracking.metrics import validation_metrics

VALIDATION_DRAW = 2**31  # draws of validation samples start here, far from those of training


async def validate(context: RolloutContext, prompts: Sequence[Prompt]) -> tuple[dict[str, float], list[Experience]]:
    """Return the metrics of `validation_metrics` for `context.sampling.n` answers a prompt, and these answers."""
    rewards = PendingRewards(context)
    async with aclosing(roll_out(context, prompts, rewards, VALIDATION_DRAW)) as samples:
        by_number = {number: made async for number, made in samples}
    answers = await rewards.added_to([answer for number in range(len(by_number)) for answer in by_number[number]])
    metrics = validation_metrics([_by_main_reward(e, context.reward_pools) for e in answers], context.sampling.n)
    return metrics, answers


async def read_answers(
    models: FrozenModels, answers: Sequence[Experience], sampling: SamplingPlan, most_tokens: int
) -> list[Experience]:
    """Return the answers as teachers and reference policy read them, at the temperature that their log-probs are of.

    Answers that no teacher is there for, and those of more than `most_tokens` tokens, are returned as they are: the
    models' batches are made for the responses of training. So are teachers with a context left out: held-out rows need
    not have what it is made of.
    """
    teachers = [teacher for teacher in models.teachers if teacher.plan.context is None]
    plain = replace(models, teachers=teachers, targets_for=None, student=None)
    if not (teachers or models.reference):
        return list(answers)

    def is_read(answer: Experience) -> bool:
        taught = not plain.teachers or any(teacher.plan.accepts(answer.tag) for teacher in plain.teachers)
        return taught and answer.response_length <= most_tokens

    asked = [answer for answer in answers if is_read(answer)]
    if not asked:
        return list(answers)
    read = {answer.id: answer for answer in await plain.compute_logprobs(asked, sampling.temperature or 1.0)}
    return [read.get(answer.id, answer) for answer in answers]


def first_answers(answers: Sequence[Experience], samples: int, most: int) -> list[Experience]:
    """Return the first of each prompt's `samples` answers, of `most` prompts: always the same ones, evenly spread."""
    firsts = answers[::samples]
    most = min(most, len(firsts))
    return [firsts[place * len(firsts) // most] for place in range(most)]


def _by_main_reward(answer: Experience, reward_pools: Sequence[RewardPool]) -> Experience:
    """An answer is right or wrong by its domain's own reward: what is added to it, and its weight, are for training."""
    plan = next((pool.plan for pool in reward_pools if pool.plan.domain == answer.domain), None)
    if plan is None or not plan.is_weighted or plan.terms[0].name not in answer.reward_parts:
        return answer
    return replace(answer, reward=answer.reward_parts[plan.terms[0].name])
