"""One step's batch: draw prompts, sample, have frozen models and rewards look at each sample, select groups.

Everything is sampled in one continuous batch, and samples are worked on while others are still being written: a reward
is requested the moment its sample is finished, and waited for only where a filter reads it. Frozen models get samples
in chunks, in the order in which an engine finishes them. A deterministic engine finishes them in an order of its own
that no timing changes, so a deterministic run also packs them alike every time.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from roll_opd.config.plan import SamplingPlan
from roll_opd.data.experience import Experience
from roll_opd.data.source import Prompt, PromptSource
from roll_opd.inference.completion import Completion
from roll_opd.rollout.selection import GroupFilter, Selection
from roll_opd.tracking.clock import PhaseClock
from roll_opd.tracking.progress import Count, Progress
from roll_opd.workers.errors import RunError
from roll_opd.workers.reward_pool import RewardPool, RewardResult
from roll_opd.workers.roles import FrozenModels, Request, Sampler

MOST_REJECTED = 20  # times the batch, and at least FEW_REJECTED: a filter that rejects more will not be satisfied
FEW_REJECTED = 1000


@dataclass(frozen=True)
class Rollout:
    """What all rollouts of a run share."""

    sampler: Sampler
    sampling: SamplingPlan
    reward_pools: Sequence[RewardPool]
    seed: int
    chunk_samples: int  # samples that are handed to the frozen models together
    clock: PhaseClock
    frozen_models: FrozenModels = field(default_factory=FrozenModels)
    exclude_failed: bool = True  # False: a sample is learned from whatever becomes of its reward
    progress: Progress = field(default_factory=Progress)


class PendingRewards:
    """Reward requests in flight, by sample id."""

    def __init__(self, rollout: Rollout) -> None:
        self._pools, self._exclude_failed = rollout.reward_pools, rollout.exclude_failed
        self._requests: dict[str, asyncio.Future[RewardResult]] = {}
        self._progress, self.scored = rollout.progress, Count("scored")

    def request(self, experience: Experience) -> None:
        """Have a sample scored by the pool of its tag, if there is one."""
        for pool in self._pools:
            if pool.plan.accepts(experience.tag):
                self.scored.total += 1
                self._requests[experience.id] = answer = pool.submit(experience)
                answer.add_done_callback(self.scored.one)

    async def added_to(self, experiences: Sequence[Experience]) -> list[Experience]:
        """Return the samples with their rewards, as soon as all have them; those without a request as they are.

        A request is answered once: calling again changes nothing. Raises what `RewardPool.submit` says.
        """
        names = [experience.id for experience in experiences if experience.id in self._requests]
        with self._progress.showing(self.scored):
            answers = await asyncio.gather(*[self._requests.pop(name) for name in names])
        results = dict(zip(names, answers, strict=True))
        return [self._with(results[e.id], e) if e.id in results else e for e in experiences]

    def cancel(self) -> None:
        """Cancel the requests that have not been answered."""
        for request in self._requests.values():
            request.cancel()
        self._requests.clear()

    def _with(self, result: RewardResult, experience: Experience) -> Experience:
        added = result.added_to(experience)
        return added if self._exclude_failed else replace(added, excluded=False)


@dataclass(frozen=True)
class Batch:
    """What a step learns from, and the prompts whose groups did not pass."""

    prompts: list[Prompt]
    experiences: list[Experience]  # the samples of each prompt, in the prompts' order
    filtered: list[Prompt]
    generated_tokens: int  # of both
    rewards: PendingRewards
    demonstrations: list[Prompt] = field(default_factory=list)  # rows with answers

    async def with_rewards(self, experiences: Sequence[Experience]) -> list[Experience]:
        """Return the batch's samples, in whatever state they are now, with those rewards that they have not got yet."""
        return await self.rewards.added_to(experiences)


async def fill_batch(
    source: PromptSource, wanted: int, rollout: Rollout, *, extra: int = 0, passes: GroupFilter | None = None
) -> Batch:
    """Draw prompts and roll them out until `wanted` of their groups pass the filter `passes`.

    Where there is a filter, `extra` prompts more are answered at the same time, in case some do not pass. What turns
    out not to be needed is aborted, and its prompts are still the next ones of `source`. Without a filter, nothing has
    waited for the rewards. RunError where hardly any group passes.
    """
    prompts: list[Prompt] = []
    experiences: list[Experience] = []
    filtered: list[Prompt] = []
    generated_tokens = 0
    rewards = PendingRewards(rollout)
    while len(prompts) < wanted:
        missing, first_draw = wanted - len(prompts), source.position
        candidates = source.peek(missing + (extra if passes else 0))
        selection = Selection(len(candidates), rollout.sampling.n, missing, passes)
        async with aclosing(roll_out(rollout, candidates, rewards, first_draw, bool(passes))) as samples:
            async for number, experience in samples:
                selection.add(number, experience)
                if selection.enough:
                    break
        if passes:  # the chosen groups have their rewards, the others need none
            rewards.cancel()
        source.skip(selection.used)
        chosen = set(selection.chosen)
        experiences += selection.experiences()
        generated_tokens += selection.generated_tokens
        for group in range(selection.used):
            (prompts if group in chosen else filtered).append(candidates[group])
        if len(prompts) < wanted and len(filtered) > max(MOST_REJECTED * wanted, FEW_REJECTED):
            raise RunError(
                f"the filters rejected the samples of {len(filtered)} prompts and kept those of {len(prompts)}, in one "
                f"step of {wanted}; loosen query_filter_config or response_filter_config, or give other prompts"
            )
    return Batch(prompts, experiences, filtered, generated_tokens, rewards)


async def roll_out(
    rollout: Rollout,
    prompts: Sequence[Prompt],
    rewards: PendingRewards,
    first_draw: int,
    wait_for_rewards: bool = False,
) -> AsyncGenerator[tuple[int, Experience], None]:
    """Sample `sampling.n` responses a prompt; yield (number, experience) as each is finished and looked at.

    Sample k of prompt p has the number p · n + k. Leaving early (use `aclosing`) aborts what is still being written.

    Args:
        first_draw: how many prompts the run has drawn before; numbers the groups and seeds the samples.
        wait_for_rewards: a sample is yielded with its reward; else its reward is in flight.
    """
    n, sampler, temperature = rollout.sampling.n, rollout.sampler, rollout.sampling.temperature
    requests = [
        Request(position, prompt.tokens, sample_seed(rollout.seed, first_draw + position, sample))
        for position, prompt in enumerate(prompts)
        for sample in range(n)
    ]
    engines = [sampler.engine_of(request) for request in requests]
    logprobs = ChunkedLogprobs(rollout.frozen_models, temperature, rollout.chunk_samples, engines)
    models = rollout.frozen_models
    generated, read = Count("generated", len(requests)), Count("log-probs", len(requests))
    counts = [generated, *([read] if models.teachers or models.reference else []), rewards.scored]

    async with sampler.sample(requests, rollout.sampling, rollout.chunk_samples) as completions:

        async def run(number: int) -> tuple[int, Experience]:
            """Make one sample: all that happens between its request and its selection."""
            position, sample = divmod(number, n)
            completion = await completions[number]
            generated.one()
            experience = experience_of(prompts[position], first_draw + position, sample, completion)
            rewards.request(experience)
            experience = await logprobs.added_to(experience, engines[number])
            read.one()
            if wait_for_rewards:
                (experience,) = await rewards.added_to([experience])
            return number, experience

        runs = [asyncio.create_task(run(number)) for number in range(len(requests))]
        try:
            with _timed(rollout, completions), rollout.progress.showing(*counts):
                for finished in asyncio.as_completed(runs):
                    yield await finished
        finally:
            for unfinished in runs:
                unfinished.cancel()
            await asyncio.gather(*runs, return_exceptions=True)


class ChunkedLogprobs:
    """Has frozen models read samples in chunks: samples of one engine that were finished one after another."""

    def __init__(self, models: FrozenModels, temperature: float, chunk: int, engines: Sequence[int]) -> None:
        """`engines` says for every sample that will come which engine it comes from."""
        self._models, self._temperature, self._chunk = models, temperature, chunk
        self._missing = Counter(engines)
        self._waiting: dict[int, list[tuple[Experience, asyncio.Future[Experience]]]] = defaultdict(list)

    async def added_to(self, experience: Experience, engine: int) -> Experience:
        """Return the sample with its log-probs. The call that completes a chunk, or an engine, asks for all of it."""
        result: asyncio.Future[Experience] = asyncio.get_running_loop().create_future()
        self._waiting[engine].append((experience, result))
        self._missing[engine] -= 1
        if len(self._waiting[engine]) == self._chunk or not self._missing[engine]:
            chunk = self._waiting.pop(engine)
            read = await self._models.compute_logprobs([waiting for waiting, _ in chunk], self._temperature)
            for (_, future), one in zip(chunk, read, strict=True):
                future.set_result(one)
        return await result


@contextmanager
def _timed(rollout: Rollout, completions: Sequence["asyncio.Future[Completion]"]) -> Iterator[None]:
    """Count the time as `generate` until the last completion is there, and what is left as the frozen models'."""
    models = rollout.frozen_models
    with ExitStack() as generating:  # the phase that was opened first has the time of both
        generating.enter_context(rollout.clock.phase("generate"))
        asyncio.gather(*completions, return_exceptions=True).add_done_callback(lambda _: generating.close())
        with rollout.clock.phase("teacher" if models.teachers or models.reference else "reward"):
            yield


def sample_seed(seed: int, draw: int, sample: int) -> int:
    """Return a seed for one sample, which depends on the run's seed, the draw and the sample's number alone."""
    return int(np.random.SeedSequence([seed, draw, sample]).generate_state(1, np.uint32)[0] & 0x7FFFFFFF)


def experience_of(prompt: Prompt, draw: int, sample: int, completion: Completion) -> Experience:
    """Return sample number `sample` of the run's draw number `draw`, as the engine wrote it."""
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
