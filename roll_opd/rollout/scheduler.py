"""One step's rollout: sample everything in one continuous batch, score each chunk the moment it is complete.

A chunk is a fixed run of prompts with all their samples. Which samples a teacher packs together thus depends on the
plan alone and never on timing, and a run repeats exactly.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from roll_opd.config.plan import SamplingPlan
from roll_opd.data.experience import Experience
from roll_opd.data.source import Prompt
from roll_opd.inference.completion import Completion
from roll_opd.tracking.clock import PhaseClock
from roll_opd.workers.roles import Judge, RunError, Sampler, Teacher
from roll_opd.workers.rollout import Request


async def roll_out(
    prompts: Sequence[Prompt],
    sampler: Sampler,
    sampling: SamplingPlan,
    teachers: Sequence[Teacher],
    judges: Sequence[Judge],
    *,
    first_draw: int,
    seed: int,
    chunk_prompts: int,
    clock: PhaseClock,
) -> list[Experience]:
    """Return `sampling.n` experiences a prompt, in the prompts' order, scored by the teachers and judges of their tag.

    Args:
        first_draw: how many prompts the run has drawn before; numbers the groups and seeds the samples.
        chunk_prompts: prompts a chunk.
    """
    requests = [
        Request(position // chunk_prompts, prompt.tokens, sample_seed(seed, first_draw + position, sample))
        for position, prompt in enumerate(prompts)
        for sample in range(sampling.n)
    ]
    scoring: dict[int, asyncio.Task] = {}
    try:
        with clock.phase("generate"):
            async for chunk, completions in sampler.sample(requests, sampling):
                first = chunk * chunk_prompts
                members = prompts[first : first + chunk_prompts]
                experiences = _experiences(members, completions, sampling.n, first_draw + first)
                scoring[chunk] = asyncio.create_task(_score(experiences, teachers, judges, sampling.temperature))
        with clock.phase("teacher"):
            scored = await asyncio.gather(*[scoring[chunk] for chunk in sorted(scoring)])
    except BaseException:
        for task in scoring.values():
            task.cancel()
        raise
    return [experience for chunk in scored for experience in chunk]


def sample_seed(seed: int, draw: int, sample: int) -> int:
    """A seed for one sample that depends on nothing but the run's seed, the draw and the sample's number."""
    return int(np.random.SeedSequence([seed, draw, sample]).generate_state(1, np.uint32)[0] & 0x7FFFFFFF)


def _experiences(
    prompts: Sequence[Prompt], completions: Sequence[Completion], n: int, first_draw: int
) -> list[Experience]:
    result = []
    for index, completion in enumerate(completions):
        prompt, draw, sample = prompts[index // n], first_draw + index // n, index % n
        result.append(
            Experience(
                id=f"{prompt.id}#{draw}/{sample}",
                group_id=f"{prompt.id}#{draw}",
                tag=prompt.tag,
                domain="",
                tokens=np.concatenate([prompt.tokens, completion.tokens]),
                prompt_length=len(prompt.tokens),
                action_mask=np.ones(len(completion.tokens), dtype=bool),
                rollout_logprobs=completion.logprobs,
                finish_reason=completion.finish_reason,
                weights_version=completion.weights_version,
                ground_truth=prompt.ground_truth,
            )
        )
    return result


async def _score(
    experiences: list[Experience], teachers: Sequence[Teacher], judges: Sequence[Judge], temperature: float
) -> list[Experience]:
    """Have every teacher and judge score the samples of its tags, side by side."""
    result = list(experiences)

    async def ask_teacher(teacher: Teacher) -> None:
        routed = [i for i, e in enumerate(experiences) if teacher.plan.scores(e.tag)]
        if not routed:
            return
        for i, logprobs in zip(routed, await teacher.score([experiences[i] for i in routed], temperature), strict=True):
            scores = {**result[i].teacher_logprobs, teacher.plan.name: logprobs}
            result[i] = replace(result[i], teacher_logprobs=scores)

    async def ask_judge(judge: Judge) -> None:
        routed = [i for i, e in enumerate(experiences) if judge.plan.scores(e.tag) and e.ground_truth is not None]
        if not routed:
            return
        for i, reward in zip(routed, await judge.score([experiences[i] for i in routed]), strict=True):
            result[i] = replace(result[i], reward=reward, domain=judge.plan.domain)

    await asyncio.gather(*[ask_teacher(t) for t in teachers], *[ask_judge(j) for j in judges])
    if teachers:
        orphans = sorted({e.tag for e in result if not e.teacher_logprobs})
        if orphans:
            raise RunError(f"no teacher scores samples tagged {', '.join(orphans)}: add the tag to a tag_included")
    return result
