"""Ray actor that scores responses with the rewards of one domain. Also contains the client of a local judge model."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import cache, partial
from itertools import cycle
from typing import Any
from zlib import crc32

import numpy as np
import ray

from roll_opd.config.plan import RewardPlan, RolloutPlan
from roll_opd.data.templates import load_plain_tokenizer, load_tokenizer, token_ids
from roll_opd.rewards.interface import RewardError, RewardSample, Scored
from roll_opd.rewards.reward_caller import Caller, weighted
from roll_opd.rewards.reward_registry import resolve
from roll_opd.samples.sample import Sample
from roll_opd.samples.transport import Compact
from roll_opd.workers.batched_calls import Answers, coalesced
from roll_opd.workers.sampler import Request

# The plan's `max_concurrency` limits calls. This limit is higher, because each hung call keeps its thread.
MAX_THREADS = 10_000
# While calls are quick, they run sequentially with growing sizes, because threads of one interpreter would only
# alternate. After a slower call, or after this time, the remaining calls run concurrently.
QUICK_CALL_S = 0.02
SEQUENTIAL_S = 0.1


# The plan limits the concurrency of calls. Ray's limit is higher, so that `alive` never waits.
@ray.remote(max_concurrency=MAX_THREADS)  # type: ignore[call-overload]  # Ray's types miss this option of actors
class RewardWorker:
    """Process that runs the rewards of one domain."""

    _plan: RewardPlan
    _callers: dict[str, Caller]
    _weights: dict[str, float]
    _tokenizer: Any

    async def setup(self, plan: RewardPlan, model_path: str, engines: Sequence[ray.actor.ActorHandle] = ()) -> None:
        """Resolve the rewards and load the tokenizer.

        Args:
            engines: engines of the judge model.
        """
        self._plan = plan
        threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix=plan.domain)
        judge = {plan.terms[0].name: (LocalModel(plan.engine, engines),)} if plan.engine else {}
        self._callers = {
            term.name: Caller(
                term.name,
                resolve(term.worker, term.args, *judge.get(term.name, ())),
                threads,
                term.timeout,
                plan.max_concurrency,
            )
            for term in plan.terms
        }
        self._weights = {term.name: term.weight for term in plan.terms}
        self._tokenizer = load_tokenizer(model_path)

    async def alive(self) -> None:
        """Return immediately, as a health check."""

    async def run(self, experiences: Sequence[Sample]) -> AsyncIterator[Compact]:
        """Score samples; yield the scores as `Answers`.

        Each `Answers` contains the scores that arrived in a short interval.
        """
        async with aclosing(coalesced(self._calls(self._samples(experiences)))) as answers:
            async for burst in answers:
                scores = [scored for call in burst for scored in call]
                yield Compact(Answers(scores, hung=any(caller.hung for caller in self._callers.values())))

    async def _calls(self, samples: Sequence[RewardSample]) -> AsyncGenerator[list[tuple[int, Scored]], None]:
        """Call the rewards for all samples; yield the scores of each call.

        A call gets as few samples as possible while all calls can still run at the same time. Calls of a fast reward
        get more samples, because the overhead of many small calls would take longer than the reward.
        """
        needed = -(-len(samples) // self._plan.max_concurrency)
        calls: set[asyncio.Task[list[tuple[int, Scored]]]] = set()
        start, wanted, is_quick, sequential_until = 0, needed, True, time.monotonic() + SEQUENTIAL_S
        try:
            while start < len(samples):
                size = min(wanted, self._plan.batch_size)
                calls.add(asyncio.create_task(self._call(start, samples[start : start + size])))
                start += size
                if is_quick and time.monotonic() < sequential_until:
                    done, calls = await asyncio.wait(calls, timeout=QUICK_CALL_S)
                    is_quick = bool(done)
                    wanted = 2 * size if is_quick else needed
                    for call in done:
                        yield call.result()
            for next_call in asyncio.as_completed(calls):
                yield await next_call
        finally:
            for task in calls:
                task.cancel()

    async def _call(self, first: int, samples: Sequence[RewardSample]) -> list[tuple[int, Scored]]:
        scores = await asyncio.gather(*[caller.score(samples) for caller in self._callers.values()])
        if self._plan.is_weighted:
            by_sample = [dict(zip(self._callers, each, strict=True)) for each in zip(*scores, strict=True)]
            scores = [[weighted(each, self._weights) for each in by_sample]]
        return list(enumerate(scores[0], first))

    def _samples(self, experiences: Sequence[Sample]) -> list[RewardSample]:
        @cache  # samples of a group share their prompt
        def read_prompt(tokens: bytes) -> str:
            return self._tokenizer.decode(np.frombuffer(tokens, np.int64), skip_special_tokens=True)

        texts = self._tokenizer.batch_decode([e.response_tokens for e in experiences], skip_special_tokens=True)
        return [
            RewardSample(
                e.id,
                text,
                e.ground_truth,
                e.tag,
                e.extra,
                e,
                partial(read_prompt, e.prompt_tokens.astype(np.int64).tobytes()),
            )
            for e, text in zip(experiences, texts, strict=True)
        ]


class LocalModel:
    """Client of a judge model's vLLM engines (see `roll_opd.rewards.endpoint.Complete`)."""

    def __init__(self, plan: RolloutPlan, engines: Sequence[ray.actor.ActorHandle]) -> None:
        """Send requests to `engines` in turn (round-robin), with the sampling settings of `plan`.

        `engines` are `RolloutWorker` actors.
        """
        self._plan = plan
        self._tokenizer: Any = load_plain_tokenizer(plan.model.path)
        if not self._tokenizer.chat_template:
            raise RewardError(
                f"{plan.name}: the tokenizer of {plan.model.path} has no chat template; use a chat model as judge"
            )
        self._engines = cycle(engines)

    async def __call__(self, messages: Sequence[Mapping[str, str]], errors: Counter[str]) -> str:
        """Return the model's response to `messages`.

        Errors of the engine are raised without Ray's wrapper: for example, ValueError if a prompt is too long.

        Raises:
            RewardError: if the engine has died. This error ends the run.
        """
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        tokens = np.array(token_ids(self._tokenizer, [text], [None])[0])
        request = Request(0, tokens, seed=crc32(text.encode()) & 0x7FFFFFFF)  # equal prompts have equal responses
        generate: Any = next(self._engines).generate
        stream = generate.options(num_returns="streaming").remote(Compact([request]), self._plan.sampling)
        try:
            async for answers in stream:
                ((_, completion),) = await answers
                return self._tokenizer.decode(completion.tokens, skip_special_tokens=True)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayActorError as error:
            raise RewardError(f"{self._plan.name}: the judge's engine has died: {error}") from None
        raise RuntimeError(f"the engine of {self._plan.name} returned no response")
