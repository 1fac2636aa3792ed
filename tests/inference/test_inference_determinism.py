"""Deterministic mode: a repeated batch gives the same bits, whatever the earlier requests and their timing."""

import asyncio
from typing import Any

import numpy as np
from inference_models import Running

from roll_opd.config.plan import SamplingPlan
from roll_opd.inference.vllm_requests import Completion

PROMPTS = [np.random.default_rng(seed).integers(2, 99, 3 + seed % 20).tolist() for seed in range(64)]
BATCH = ([prompt for prompt in PROMPTS for _ in range(2)], SamplingPlan(max_new_tokens=24), range(128))


def bits(completions: list[Completion]) -> list[tuple[bytes, bytes, str]]:
    return [(c.tokens.tobytes(), c.logprobs.tobytes(), c.finish_reason) for c in completions]


def submit_slowly(running: Running) -> list[bool]:
    """Let requests trickle in, as on a busy machine; returns whether the scheduler was paused at each."""
    llm = running.engine._llm
    add_request, paused = llm.add_request, []

    async def add_late(*arguments: Any, **options: Any) -> Any:
        if len(paused) % 40 == 0:
            await asyncio.sleep(0.05)
        paused.append(await llm.is_paused())
        return await add_request(*arguments, **options)

    llm.add_request = add_late
    return paused


def test_a_batch_gives_the_same_bits(tiny_model_path: str, warm: None) -> None:
    """For new engines, see the runs that are killed and resumed."""
    running = Running(tiny_model_path, deterministic=True, engine_args={"max_num_seqs": 48})
    first = running.batch(*BATCH)
    assert len(set(bits(first))) > 64  # the samples are not all alike
    assert bits(running.batch(*BATCH)) == bits(first)
    running.batch(PROMPTS[5:9], SamplingPlan(max_new_tokens=7, temperature=0), range(4))
    assert bits(running.batch(*BATCH)) == bits(first)
    paused = submit_slowly(running)
    assert bits(running.batch(*BATCH)) == bits(first)
    word = f"w{first[0].tokens[4]}"
    stopped = running.run(running.engine.generate(PROMPTS[0], SamplingPlan(max_new_tokens=24, stop=(word,)), 0))
    assert stopped.finish_reason == "stop" and len(stopped.tokens) <= 5
    assert all(paused)  # no step can have depended on when a request came
    running.close()
