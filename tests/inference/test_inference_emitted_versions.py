"""The recorded version of each token is the version that the token states, over 1,000 updates at random moments."""

import asyncio
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emitting_model import FIRST, Emitting, spans
from inference_models import keeping_pause

from roll_opd.config.plan import SamplingPlan
from roll_opd.inference.tool_calls import HERMES, find_parser
from roll_opd.inference.vllm_requests import Completion
from roll_opd.workflows.endpoint.server import PolicyServer
from roll_opd.workflows.model_wrapper import ModelWrapper
from roll_opd.workflows.run_state import RUN, RunState

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

UPDATES = int(os.environ.get("UPDATES", "1000"))
REQUESTS, CONVERSATIONS, TURNS = 8, 2, 3
LONGEST = {"wait": 12, "continue": 40}  # tokens of an answer; with `wait` an update waits for all
PAUSES = (0.0, 0.005, 0.05)  # seconds between updates, at most
TOOL = {"type": "function", "function": {"name": "v0", "parameters": {"type": "object", "properties": {}}}}


class Client:
    """The engine for workflows, without Ray."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def generate(
        self, group: int, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: SamplingPlan
    ) -> list[Completion]:
        asked = [self._engine.generate(p.tolist(), sampling, s) for p, s in zip(prompts, seeds, strict=True)]
        return list(await asyncio.gather(*asked))

    async def weights_version(self) -> int:
        return self._engine.updates.version


def call_of(call: Any) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments or ""}
    return {"id": call.id, "type": "function", "function": function}


async def complete(client: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls of an answer."""
    done = await client.chat.completions.create(**options)
    return [call_of(call) for call in done.choices[0].message.tool_calls]


async def streamed(client: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls of a streamed answer, from the parts in its chunks."""
    calls: dict[int, dict[str, Any]] = {}
    async for chunk in await client.chat.completions.create(**options, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            if part.index in calls:
                calls[part.index]["function"]["arguments"] += part.function.arguments or ""
            else:
                calls[part.index] = call_of(part)
    return [calls[index] for index in sorted(calls)]


class Load:
    """Clients that ask until all updates are made, and the comparison of each answer."""

    def __init__(self, emitting: Emitting, seed: int) -> None:
        self.emitting, self.rng = emitting, random.Random(seed)
        self.longest = LONGEST[emitting.engine.updates._on_update]
        self.left = UPDATES
        self.tokens = self.split = self.turns = 0

    async def requests(self) -> None:
        engine = self.emitting.engine
        while self.left:
            prompt = [self.rng.randrange(2, 200) for _ in range(self.rng.randint(1, 200))]
            limit, seed = self.rng.randint(1, self.longest), self.rng.randrange(10**6)
            answer = await engine.generate(prompt, SamplingPlan(max_new_tokens=limit), seed)
            assert answer.versions == spans(answer.tokens.tolist())
            assert len(answer.tokens) == limit and answer.finish_reason == "length"
            self.tokens += limit
            self.split += len(answer.versions) > 1

    async def conversations(self, model: ModelWrapper, number: int) -> None:
        """Turns at the endpoint, half of them streamed; each token of an answer is a tool call, and gets a result."""
        streams = number % 2 == 0
        while self.left:
            RUN.set(RunState(number, (7, number), (0,), SamplingPlan(max_new_tokens=9)))
            client, messages = model.get_openai_async_client(), [{"role": "user", "content": f"{number}"}]
            seen: list[int] = []
            for _ in range(TURNS):
                options = {
                    "model": "m",
                    "messages": messages,
                    "tools": [TOOL],
                    "max_tokens": self.rng.randint(1, self.longest),
                }
                calls = await (streamed if streams else complete)(client, options)
                seen += [int(call["function"]["name"][1:]) for call in calls]
                messages += [
                    {"role": "assistant", "content": None, "tool_calls": calls},
                    {"role": "tool", "tool_call_id": calls[-1]["id"], "content": "9"},
                ]
            (branch,) = model.branches()
            tokens, sampled = branch.tokens[branch.prompt_length :].tolist(), branch.action_mask.tolist()
            assert branch.versions == spans(tokens, sampled)
            assert seen == [token - FIRST for token, of in zip(tokens, sampled, strict=True) if of]  # as the client saw
            assert sampled.count(False) >= TURNS - 1
            self.turns += TURNS
            self.tokens += len(seen)

    async def updates(self) -> None:
        while self.left:
            await asyncio.sleep(self.rng.random() * self.rng.choice(PAUSES))
            await self.emitting.update()
            self.left -= 1
            if self.left % 100 == 0:
                print(f"{self.left} updates left, {self.tokens} tokens", flush=True)

    async def run(self) -> None:
        loop, client, tokenizer = asyncio.get_running_loop(), Client(self.emitting.engine), self.emitting.tokenizer
        model = ModelWrapper(client, tokenizer, model_path="m", max_model_len=512, loop=loop)
        model.endpoint = PolicyServer(model, loop, find_parser(HERMES, tokenizer))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(REQUESTS):
                tasks.create_task(self.requests())
            for number in range(CONVERSATIONS):
                tasks.create_task(self.conversations(model, number))
            tasks.create_task(self.updates())


@pytest.fixture(params=["wait", "continue"])
def emitting(request: pytest.FixtureRequest, tmp_path: Path, warm: None) -> Iterator[Emitting]:
    engine = Emitting(tmp_path, on_update=request.param)
    yield engine
    engine.close()


def test_each_token_has_the_version_that_it_states(emitting: Emitting) -> None:
    load = Load(emitting, 1)
    emitting.run(asyncio.wait_for(load.run(), 1800))
    assert emitting.engine.updates.version == UPDATES
    print(f"{UPDATES} updates, {load.tokens} tokens, {load.split} answers of several versions, {load.turns} turns")
    assert load.tokens > UPDATES and load.turns
    assert bool(load.split) == (emitting.engine.updates._on_update == "continue")


@pytest.mark.parametrize("emitting", ["continue"], indirect=True)
@pytest.mark.parametrize("keeps_cache", [False, True])
def test_kept_values_are_seen(emitting: Emitting, keeps_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an update keeps the cache, an answer that continues states older weights: the control of the test above."""
    if keeps_cache:
        monkeypatch.setattr(emitting.engine.updates, "pause", keeping_pause(emitting.engine))

    async def interrupted() -> Completion:
        for attempt in range(1, 41):  # until the update is neither before the first token nor after the last one
            answering = asyncio.create_task(emitting.engine.generate([5] * 100, SamplingPlan(max_new_tokens=300), 0))
            await asyncio.sleep(0.05 * attempt)
            await emitting.update()
            answer = await answering
            if len(answer.versions) == 2:
                return answer
        raise AssertionError("no update was inside an answer")

    found = emitting.run(interrupted())
    stated = spans(found.tokens.tolist())
    print(f"cache kept: {keeps_cache}; recorded {found.versions}, stated {stated}")
    assert (found.versions == stated) == (not keeps_cache)
