"""Validation: the accuracy of a sampler on held-out prompts, and a few answers for the records."""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from roll_opd.config.plan import SamplingPlan
from roll_opd.data.prompt_source import Prompt
from roll_opd.rollout.runs import PendingRewards, RolloutContext, roll_out
from roll_opd.samples.sample import Sample
from roll_opd.teachers.scoring import Scorers
from roll_opd.tracking.metrics import validation_metrics
from roll_opd.workers.reward_pool import RewardPool

VALIDATION_DRAW = 2**31  # first draw number of validation, above all draw numbers of training


async def validate(context: RolloutContext, prompts: Sequence[Prompt]) -> tuple[dict[str, float], list[Sample]]:
    """Return (metrics, answers): `validation_metrics` of `sampling.n` answers to each prompt, and the answers."""
    rewards = PendingRewards(context)
    async with aclosing(roll_out(context, prompts, rewards, VALIDATION_DRAW)) as samples:
        by_number = {number: made async for number, made in samples}
    answers = await rewards.added_to([answer for number in range(len(by_number)) for answer in by_number[number] or ()])
    metrics = validation_metrics([_by_main_reward(e, context.reward_pools) for e in answers], context.sampling.n)
    return metrics, answers


async def read_answers(
    models: Scorers, answers: Sequence[Sample], sampling: SamplingPlan, most_tokens: int
) -> list[Sample]:
    """Return the answers with log-probs of the teachers and of the reference policy.

    The log-probs are at the sampling temperature. An answer is returned unchanged if its response has more than
    `most_tokens` tokens, or if there are teachers but none of them accepts its tag. Teachers with a context are left
    out, because held-out rows may lack the columns of the context.

    Args:
        most_tokens: largest number of tokens in a batch of the models.
    """
    teachers = [teacher for teacher in models.teachers if teacher.plan.context is None]
    plain = replace(models, teachers=teachers, targets_for=None, student=None)
    if not (teachers or models.reference):
        return list(answers)

    def is_read(answer: Sample) -> bool:
        taught = not plain.teachers or any(teacher.plan.accepts(answer.tag) for teacher in plain.teachers)
        return taught and answer.response_length <= most_tokens

    chosen = [answer for answer in answers if is_read(answer)]
    if not chosen:
        return list(answers)
    read = {answer.id: answer for answer in await plain.compute_logprobs(chosen, sampling.temperature or 1.0)}
    return [read.get(answer.id, answer) for answer in answers]


def first_answers(answers: Sequence[Sample], samples: int, most: int) -> list[Sample]:
    """Return the first answer to each of at most `most` prompts.

    The prompts are evenly spread over the data and are the same in every call.

    Args:
        answers: the answers to all prompts; the answers to one prompt are consecutive.
        samples: number of answers to each prompt.
    """
    firsts = answers[::samples]
    most = min(most, len(firsts))
    return [firsts[place * len(firsts) // most] for place in range(most)]


def _by_main_reward(answer: Sample, reward_pools: Sequence[RewardPool]) -> Sample:
    """Return an answer whose reward is the main reward of its domain.

    The other reward terms and the weights of all terms are used only in training.
    """
    plan = next((pool.plan for pool in reward_pools if pool.plan.domain == answer.domain), None)
    if plan is None or not plan.is_weighted or plan.terms[0].name not in answer.reward_parts:
        return answer
    return replace(answer, reward=answer.reward_parts[plan.terms[0].name])
