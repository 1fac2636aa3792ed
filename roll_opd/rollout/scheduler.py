"""One step's rollout: sample everything in one continuous batch, score samples while others are still being written.

A reward is asked for the moment its sample is finished, and waited for here only where a filter wants to know it.
Teachers get samples in chunks, in the order in which an engine finishes them. A deterministic engine finishes them in
an order of its own that no timing changes, so a deterministic run also packs and scores them alike every time.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np

from roll_opd.config.plan import ObjectivePlan, SamplingPlan
from roll_opd.data.experience import Experience
from roll_opd.data.source import Prompt
from roll_opd.inference.completion import Completion
from roll_opd.rollout.pending_rewards import PendingRewards
from roll_opd.rollout.selection import Keeps, Selection
from roll_opd.tracking.clock import PhaseClock
from roll_opd.workers.errors import RunError
from roll_opd.workers.roles import FrozenModel, Sampler, Student, Teacher
from roll_opd.workers.rollout import Request


@dataclass(frozen=True)
class FrozenModels:
    """Who looks at finished samples: teachers at those of their tags, the reference policy at all.

    Where `targets_for` is an objective, teachers say more than the log-probs of the sampled tokens; where `student` is
    there, it is of the student's most likely tokens that they speak.
    """

    teachers: Sequence[Teacher] = ()
    reference: FrozenModel | None = None
    targets_for: ObjectivePlan | None = None
    student: Student | None = None


async def roll_out(
    prompts: Sequence[Prompt],
    sampler: Sampler,
    sampling: SamplingPlan,
    frozen_models: FrozenModels,
    pending_rewards: PendingRewards,
    *,
    first_draw: int,
    seed: int,
    chunk_samples: int,
    clock: PhaseClock,
    wanted: int | None = None,
    keeps: Keeps | None = None,
) -> Selection:
    """Sample `sampling.n` responses a prompt and have them scored, until the groups to learn from are certain.

    What is still being written then is aborted.

    Args:
        pending_rewards: has every sample scored once it is finished; without `keeps`, the returned samples
            have not waited for it.
        first_draw: how many prompts the run has drawn before; numbers the groups and seeds the samples.
        chunk_samples: samples that are scored together.
        wanted: groups to learn from; None: all.
        keeps: tells whether a finished group may be learned from; None: every one.
    """
    n = sampling.n
    requests = [
        Request(position, prompt.tokens, sample_seed(seed, first_draw + position, sample))
        for position, prompt in enumerate(prompts)
        for sample in range(n)
    ]
    selection = Selection(len(prompts), n, len(prompts) if wanted is None else wanted, keeps)
    settled = asyncio.Event()  # nothing more is needed, or something went wrong

    written: dict[int, Experience] = {}

    def finish(index: int, completion: Completion) -> None:
        written[index] = experience_of(prompts[index // n], first_draw + index // n, index % n, completion)
        pending_rewards.ask(written[index])

    async def take(index: int, experience: Experience) -> None:
        if keeps:  # a group waits for its own rewards, and for no other sample's
            (experience,) = await pending_rewards.answered([experience])
        selection.add(index, experience)
        if selection.enough:
            settled.set()

    async def score(finished: list[tuple[int, Completion]]) -> None:
        try:
            scored = await _score([written[index] for index, _ in finished], frozen_models, sampling.temperature)
            indices = [index for index, _ in finished]
            await asyncio.gather(*[take(index, one) for index, one in zip(indices, scored, strict=True)])
        except Exception:
            settled.set()
            raise

    scoring: list[asyncio.Task] = []

    async def generate() -> None:
        async with aclosing(sampler.sample(requests, sampling, chunk_samples, finish)) as stream:
            async for finished in stream:
                scoring.append(asyncio.create_task(score(finished)))

    generating = asyncio.create_task(generate())
    over = asyncio.create_task(settled.wait())
    try:
        with clock.phase("generate"):
            await asyncio.wait([generating, over], return_when=asyncio.FIRST_COMPLETED)
            if generating.done():
                generating.result()  # raises what went wrong
        with clock.phase("teacher" if frozen_models.teachers or frozen_models.reference else "reward"):
            while not settled.is_set() and (left := [task for task in scoring if not task.done()]):
                await asyncio.wait([*left, over], return_when=asyncio.FIRST_COMPLETED)
        for task in scoring:
            if task.done():
                task.result()
    finally:
        everything = [generating, over, *scoring]
        for task in everything:
            task.cancel()
        await asyncio.gather(*everything, return_exceptions=True)
        if keeps:  # the groups that are returned have their rewards
            pending_rewards.forget()
    return selection


def sample_seed(seed: int, draw: int, sample: int) -> int:
    """A seed for one sample that depends on nothing but the run's seed, the draw and the sample's number."""
    return int(np.random.SeedSequence([seed, draw, sample]).generate_state(1, np.uint32)[0] & 0x7FFFFFFF)


def experience_of(prompt: Prompt, draw: int, sample: int, completion: Completion) -> Experience:
    """What sample number `sample` of the run's draw number `draw` is before anybody has looked at it."""
    return Experience(
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
        extra=prompt.extra,
    )


async def _score(experiences: list[Experience], frozen_models: FrozenModels, temperature: float) -> list[Experience]:
    """Have every teacher score the samples of its tags, and the reference all, side by side."""
    result = list(experiences)
    objective, ids = frozen_models.targets_for, None
    if frozen_models.student:
        ids = await frozen_models.student.topk_ids(experiences, temperature, objective)

    async def ask_teacher(teacher: Teacher) -> None:
        routed = [i for i, e in enumerate(experiences) if teacher.plan.accepts(e.tag)]
        if not routed:
            return
        samples, name = [experiences[i] for i in routed], teacher.plan.name
        if objective is None:
            answers = [(logprobs, None) for logprobs in await teacher.score(samples, temperature)]
        else:
            answers = await teacher.look(samples, temperature, objective, ids and [ids[i] for i in routed])
        for i, (logprobs, view) in zip(routed, answers, strict=True):
            scores = {**result[i].teacher_logprobs, name: logprobs}
            views = result[i].teacher_targets if view is None else {**result[i].teacher_targets, name: view}
            result[i] = replace(result[i], teacher_logprobs=scores, teacher_targets=views)

    async def ask_reference(reference: FrozenModel) -> None:
        for i, logprobs in enumerate(await reference.score(experiences, temperature)):
            result[i] = replace(result[i], ref_logprobs=logprobs)

    asked = [ask_teacher(teacher) for teacher in frozen_models.teachers]
    if frozen_models.reference:
        asked.append(ask_reference(frozen_models.reference))
    await asyncio.gather(*asked)
    if frozen_models.teachers:
        orphans = sorted({e.tag for e in result if not e.teacher_logprobs})
        if orphans:
            raise RunError(f"no teacher scores samples tagged {', '.join(orphans)}: add the tag to a tag_included")
    return result
