"""Sampling and scoring against Hugging Face, weight updates, and overlapping requests."""

import asyncio
import itertools
from contextlib import aclosing

import numpy as np
import pytest
import torch
from inference_models import Running, buckets_of, hf_logits, hf_logprobs, make_model, update_weights

from roll_opd.config.plan import SamplingPlan
from roll_opd.inference.vllm_requests import Completion

VERSIONS = itertools.count(1)
PROMPTS = [[5, 6, 7], [50, 40, 30, 20, 10], [3], list(range(2, 42))]


def load(running: Running, seed: int) -> torch.nn.Module:
    model = make_model(seed)
    running.run(update_weights(running.engine, buckets_of(model), next(VERSIONS)))
    return model


def test_prompt_logprobs_equal_hugging_face_after_every_update(shared_engine: Running) -> None:
    tokens = np.random.default_rng(0).integers(2, 99, 60).tolist()
    previous = None
    for seed in (1, 2, 3):
        expected = hf_logprobs(load(shared_engine, seed), tokens)
        found = shared_engine.run(shared_engine.engine.prompt_logprobs(tokens))
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
        assert previous is None or np.abs(expected - previous).max() > 0.1
        previous = expected


def test_an_engine_that_starts_leaves_its_event_loop_free(shared_engine: Running) -> None:
    """So the actor of a replaced engine refuses requests while its core starts."""
    assert shared_engine.blocked < 0.5


def test_logprobs_are_those_of_the_sampled_distribution(shared_engine: Running) -> None:
    model = load(shared_engine, seed=4)
    plan = SamplingPlan(max_new_tokens=16, temperature=0.7)
    for prompt, completion in zip(PROMPTS, shared_engine.batch(PROMPTS, plan, range(4)), strict=True):
        tokens = [*prompt, *completion.tokens.tolist()]
        at_temperature = hf_logprobs(model, tokens, 0.7)[len(prompt) - 1 :]
        np.testing.assert_allclose(completion.logprobs, at_temperature, atol=1e-5, rtol=0)
        assert np.abs(hf_logprobs(model, tokens)[len(prompt) - 1 :] - at_temperature).max() > 1e-2
        assert completion.tokens.dtype == np.int64 and completion.logprobs.dtype == np.float32


def test_top_k_logprobs_are_renormalised(shared_engine: Running) -> None:
    model = load(shared_engine, seed=5)
    [completion] = shared_engine.batch([[8, 9]], SamplingPlan(max_new_tokens=12, top_k=3), [0])
    tokens = [8, 9, *completion.tokens.tolist()]
    kept, index = hf_logits(model, tokens).topk(3)
    expected = torch.log_softmax(kept, dim=-1)[index == torch.tensor(tokens[1:])[:, None]].numpy()
    np.testing.assert_allclose(completion.logprobs, expected[-len(completion.tokens) :], atol=1e-5, rtol=0)


def test_greedy_takes_the_largest_logit_and_keeps_the_end(shared_engine: Running) -> None:
    model = load(shared_engine, seed=6)
    with torch.no_grad():  # favour the end token: some answers stop, some run into the limit
        model.lm_head.weight[1] *= 2.0
    shared_engine.run(update_weights(shared_engine.engine, buckets_of(model), next(VERSIONS)))
    prompts = [[first, first + 1] for first in range(2, 34)]
    completions = shared_engine.batch(prompts, SamplingPlan(max_new_tokens=12, temperature=0), range(32))
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = [*prompt, *completion.tokens.tolist()]
        greedy = hf_logits(model, tokens).argmax(dim=-1)[len(prompt) - 1 :]
        assert completion.tokens.tolist() == greedy.tolist()
        assert (completion.tokens[-1] == 1) == (completion.finish_reason == "stop")
        assert 1 not in completion.tokens[:-1]
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}


def test_a_seed_repeats_its_sample_in_any_company(shared_engine: Running) -> None:
    plan = SamplingPlan(max_new_tokens=16)
    together = shared_engine.batch([PROMPTS[0]] * 3 + PROMPTS[1:], plan, [11, 12, 11, 1, 2, 3])
    alone = shared_engine.run(shared_engine.engine.generate(PROMPTS[0], plan, 11))
    assert together[0].tokens.tolist() == together[2].tokens.tolist() == alone.tokens.tolist()
    assert together[0].tokens.tolist() != together[1].tokens.tolist()


def test_more_prompt_tokens_than_one_step_takes(shared_engine: Running) -> None:
    prompts = [np.random.default_rng(seed).integers(2, 99, 50).tolist() for seed in range(80)]
    completions = shared_engine.batch(prompts, SamplingPlan(max_new_tokens=4), range(80))
    assert len(completions) == 80 and all(len(completion.tokens) for completion in completions)


def test_stop_strings_end_a_response(shared_engine: Running) -> None:
    plan = SamplingPlan(max_new_tokens=20)
    free = shared_engine.run(shared_engine.engine.generate([4, 5], plan, 1))
    word = f"w{free.tokens[3]}"
    stopped = shared_engine.run(shared_engine.engine.generate([4, 5], SamplingPlan(max_new_tokens=20, stop=(word,)), 1))
    assert stopped.finish_reason == "stop"
    assert stopped.tokens.tolist() == free.tokens[: len(stopped.tokens)].tolist()
    assert len(stopped.tokens) <= 4


def test_a_response_belongs_to_one_version_of_the_weights(shared_engine: Running) -> None:
    models = {}
    first = next(VERSIONS)
    models[first] = make_model(20)
    second = next(VERSIONS)
    models[second] = make_model(21)
    plan = SamplingPlan(max_new_tokens=40)
    prompts = [[token, token + 1] for token in range(2, 50)]
    engine = shared_engine.engine

    async def overlap() -> list:
        await update_weights(engine, buckets_of(models[first]), first)
        updating = None
        found = []
        async for index, completion in engine.generate_batch(prompts, plan, range(48)):
            found.append((prompts[index], completion))
            if updating is None:
                updating = asyncio.create_task(update_weights(engine, buckets_of(models[second]), second))
        await updating
        async for index, completion in engine.generate_batch(prompts[:2], plan, range(2)):
            found.append((prompts[index], completion))
        return found

    found = shared_engine.run(overlap())
    assert all(len(completion.versions) == 1 for _, completion in found)
    assert all(completion.versions[0][1] == len(completion.tokens) for _, completion in found)
    assert {completion.versions[0][0] for _, completion in found} == {first, second}
    for prompt, completion in found:
        tokens = [*prompt, *completion.tokens.tolist()]
        expected = hf_logprobs(models[completion.versions[0][0]], tokens)[len(prompt) - 1 :]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)


def test_tokens_sampled_before_and_after_an_update_have_its_two_versions(shared_engine: Running) -> None:
    """For requests that continue through the update: first tokens do not have the version of the last tokens."""
    engine, sampling = shared_engine.engine, SamplingPlan(max_new_tokens=50)
    before = engine.updates.version

    async def interrupted(delay: float, after: int) -> list[Completion]:
        async def all_of() -> list[Completion]:
            return [completion async for _, completion in engine.generate_batch(PROMPTS, sampling, range(4))]

        await engine._llm.update_weight_version(str(before))
        running = asyncio.create_task(all_of())
        await asyncio.sleep(delay)
        await engine.updates.pause("keep")
        await engine._llm.update_weight_version(str(after))
        await engine._llm.resume_generation()
        return await running

    split = []
    for attempt in range(40):
        after = before + 1 + attempt
        for completion in shared_engine.run(interrupted(0.002 * (1 + attempt), after)):
            versions = completion.versions
            assert sum(tokens for _, tokens in versions) == len(completion.tokens)
            assert [version for version, _ in versions] in ([before], [before, after], [after])
            split += [versions] if len(versions) == 2 else []
        if split:
            break
    shared_engine.run(engine._llm.update_weight_version(str(before)))
    assert split


def test_leaving_a_batch_early_aborts_the_rest(shared_engine: Running) -> None:
    async def first_only() -> None:
        plan = SamplingPlan(max_new_tokens=50)
        async with aclosing(shared_engine.engine.generate_batch(PROMPTS, plan, range(4))) as completions:
            async for _ in completions:
                break

    shared_engine.run(first_only())
    assert len(shared_engine.batch(PROMPTS, SamplingPlan(max_new_tokens=4), range(4))) == 4


def test_weights_may_come_in_another_precision(shared_engine: Running) -> None:
    model = make_model(7)
    buckets = [{name: weight.bfloat16() for name, weight in bucket.items()} for bucket in buckets_of(model)]
    shared_engine.run(update_weights(shared_engine.engine, buckets, next(VERSIONS)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    tokens = list(range(2, 40))
    found = shared_engine.run(shared_engine.engine.prompt_logprobs(tokens))
    np.testing.assert_allclose(found, hf_logprobs(model, tokens), atol=1e-5, rtol=0)


@pytest.mark.parametrize("prompt", [[], [2] * 64])
def test_a_prompt_without_room_for_a_response_is_refused(shared_engine: Running, prompt: list[int]) -> None:
    with pytest.raises(ValueError, match=r"prompt 0 has .* expected 1 to 63"):
        shared_engine.run(shared_engine.engine.generate(prompt, SamplingPlan(), 0))
