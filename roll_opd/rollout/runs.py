"""One step's batch: draw prompts, run the workflow, have frozen models and rewards look at its samples, select groups.

All runs are under way at once, and samples are worked on while others are still being written: a reward is requested
the moment its run hands it over, and waited for only where a filter reads it. Frozen models get samples in chunks, in
the order in which the runs on an engine end. A deterministic engine finishes what it was asked together in an order of
its own that no timing changes, so a deterministic run also packs them alike every time.

Groups count in the order in which their prompts were drawn, not in the order in which they are finished: a step's
batch is the first so many that pass, whatever the timing, and short answers are not preferred.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field

from roll_opd.actors.sampler import Sampler
from roll_opd.base.failures import RunError
from roll_opd.config.plan import SamplingPlan
from roll_opd.data.prompt_source import Prompt, TaskSource
from roll_opd.objective.group_filters import GroupFilter
from roll_opd.roles.reward_pool import RewardPool, RewardResult
from roll_opd.rollout.workflow import Model, SingleTurn, Task, Workflow
from roll_opd.samples.experience import Experience, changed
from roll_opd.teachers.frozen_models import FrozenModels
from roll_opd.tracking.clock import PhaseClock
from roll_opd.tracking.console import Count, Progress

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
    workflow: Workflow = field(default_factory=SingleTurn)
    is_eval: bool = False
    exclude_failed: bool = True  # False: a sample is learned from whatever becomes of its reward
    progress: Progress = field(default_factory=Progress)


class PendingRewards:
    """Reward requests in flight, by sample id."""

    def __init__(self, rollout: Rollout) -> None:
        self._pools, self._exclude_failed = rollout.reward_pools, rollout.exclude_failed
        self._requests: dict[str, asyncio.Future[RewardResult]] = {}
        self._progress, self.scored = rollout.progress, Count("scored")

    def request(self, experience: Experience) -> None:
        """Have a sample scored by the pool of its tag, if there is one and its run has not done so."""
        if experience.reward is not None:
            return
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
        return added if self._exclude_failed else changed(added, excluded=False)


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


class Selection:
    """Takes runs as they end; knows when the first `wanted` groups that pass are certain."""

    def __init__(self, groups: int, n: int, wanted: int, group_filter: GroupFilter | None) -> None:
        self._runs: list[dict[int, Sequence[Experience]]] = [{} for _ in range(groups)]  # by number in the group
        self._passed: list[bool | None] = [None] * groups  # None: not all of its runs have ended
        self._n, self._wanted, self._filter = n, wanted, group_filter
        self._used = 0
        self._chosen: list[int] = []

    def add(self, number: int, made: Sequence[Experience]) -> None:
        """Take what run `number % n` of group `number // n` made. A group that made nothing at all does not pass."""
        group, run = divmod(number, self._n)
        self._runs[group][run] = made
        if len(self._runs[group]) == self._n:
            samples = self._in_order(group)
            self._passed[group] = bool(samples) and (self._filter is None or self._filter(samples))
            self._advance()

    def _advance(self) -> None:
        """Count the groups behind the last one of `used` that are decided, as far as they are needed."""
        while self._used < len(self._passed) and not self.enough and self._passed[self._used] is not None:
            if self._passed[self._used]:
                self._chosen.append(self._used)
            self._used += 1

    @property
    def used(self) -> int:
        """Groups, from the first on, that are decided and needed; those behind them are as if never drawn."""
        return self._used

    @property
    def chosen(self) -> list[int]:
        """Numbers of the groups to learn from, at most `wanted`, ascending."""
        return self._chosen

    @property
    def enough(self) -> bool:
        """Whether nothing that is still being written can matter."""
        return len(self._chosen) == self._wanted

    @property
    def generated_tokens(self) -> int:
        """Action tokens of the `used` groups."""
        return sum(e.action_tokens for group in range(self.used) for e in self._in_order(group))

    def experiences(self) -> list[Experience]:
        """Return what the runs of the chosen groups made, in order."""
        return [experience for group in self.chosen for experience in self._in_order(group)]

    def _in_order(self, group: int) -> list[Experience]:
        return [experience for run in range(self._n) for experience in self._runs[group][run]]


async def fill_batch(
    source: TaskSource, wanted: int, rollout: Rollout, *, extra: int = 0, passes: GroupFilter | None = None
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
            async for number, made in samples:
                selection.add(number, made)
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
            if passes is None:
                raise RunError(
                    f"the runs at {len(filtered)} prompts made no sample, in one step of {wanted}; correct the workflow"
                    " (an agent that does not ask the model makes none), or give other prompts"
                )
            raise RunError(
                f"the filters rejected the samples of {len(filtered)} prompts and kept those of {len(prompts)}, in one "
                f"step of {wanted}; loosen query_filter_config or response_filter_config, give other prompts, or"
                " correct a workflow whose runs make nothing"
            )
    return Batch(prompts, experiences, filtered, generated_tokens, rewards)


async def roll_out(
    rollout: Rollout,
    prompts: Sequence[Prompt],
    rewards: PendingRewards,
    first_draw: int,
    wait_for_rewards: bool = False,
) -> AsyncGenerator[tuple[int, list[Experience]], None]:
    """Run the workflow `sampling.n` times a prompt; yield (number, experiences) as each is done and looked at.

    Run k of prompt p has the number p · n + k. Leaving early (use `aclosing`) aborts what is still being written.

    Args:
        first_draw: how many prompts the run has drawn before; numbers the groups and seeds the samples.
        wait_for_rewards: samples are yielded with their rewards; else those are in flight.
    """
    n, sampler, temperature = rollout.sampling.n, rollout.sampler, rollout.sampling.temperature
    engines = [sampler.engine_of(number // n) for number in range(len(prompts) * n)]
    logprobs = ChunkedLogprobs(rollout.frozen_models, temperature, rollout.chunk_samples, engines)
    models = rollout.frozen_models
    generated, read = Count("generated", len(engines)), Count("log-probs", len(engines))
    counts = [generated, *([read] if models.teachers or models.reference else []), rewards.scored]

    async with sampler.session(rollout.chunk_samples) as session:

        async def run(number: int) -> tuple[int, list[Experience]]:
            """All that happens between a prompt and the selection of what was made of it."""
            position, attempt = divmod(number, n)
            task = Task(prompts[position], first_draw + position, attempt, n, rollout.is_eval)
            model = Model(session, task, position, rollout.seed, rollout.sampling)
            made = await rollout.workflow.run(task, model)
            generated.one()
            if generated.done == generated.total:
                generating.close()
            for experience in made:
                rewards.request(experience)
            looked_at = await logprobs.added_to(made, engines[number])
            read.one()
            return number, await rewards.added_to(looked_at) if wait_for_rewards else looked_at

        with _timed(rollout) as generating, rollout.progress.showing(*counts):
            runs = [asyncio.create_task(run(number)) for number in range(len(engines))]
            try:
                for finished in asyncio.as_completed(runs):
                    yield await finished
            finally:
                for unfinished in runs:
                    unfinished.cancel()
                await asyncio.gather(*runs, return_exceptions=True)


class ChunkedLogprobs:
    """Has frozen models read samples in chunks: those of runs on one engine that ended one after another."""

    def __init__(self, models: FrozenModels, temperature: float, chunk: int, engines: Sequence[int]) -> None:
        """`engines` says for every run which engine it is on."""
        self._models, self._temperature, self._chunk = models, temperature, chunk
        self._under_way = Counter(engines)
        self._waiting: dict[int, list[tuple[Experience, asyncio.Future[Experience]]]] = defaultdict(list)

    async def added_to(self, experiences: Sequence[Experience], engine: int) -> list[Experience]:
        """Return what a run made, with its log-probs. To be called once a run.

        The call that completes a chunk, or is the last of an engine, asks for all that wait.
        """
        loop = asyncio.get_running_loop()
        results: list[asyncio.Future[Experience]] = [loop.create_future() for _ in experiences]
        self._waiting[engine] += zip(experiences, results, strict=True)
        self._under_way[engine] -= 1
        if len(self._waiting[engine]) >= self._chunk or not self._under_way[engine]:
            chunk = self._waiting.pop(engine)
            read = await self._models.compute_logprobs([waiting for waiting, _ in chunk], self._temperature)
            for (_, future), one in zip(chunk, read, strict=True):
                future.set_result(one)
        return [await result for result in results]


@contextmanager
def _timed(rollout: Rollout) -> Iterator[ExitStack]:
    """Count the time as `generate` until the stack that is given is closed, and what is left as the frozen models'."""
    models = rollout.frozen_models
    with ExitStack() as generating:  # the phase that was opened first has the time of both
        generating.enter_context(rollout.clock.phase("generate"))
        with rollout.clock.phase("teacher" if models.teachers or models.reference else "reward"):
            yield generating
