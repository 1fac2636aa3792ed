"""Conversations of several turns: the sampled tokens are trained on, each of them once."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import ContextPlan, SamplingPlan
from roll_opd.data.dataset import Prompt
from roll_opd.samples.call_settings import CALL_SETTINGS, UNKNOWN, call_row
from roll_opd.workflows.model_wrapper import ModelWrapper, Responses
from roll_opd.workflows.run_state import RUN, RunState, TeacherContexts
from roll_opd.workflows.workflow_experience import Experience, TokenLimits, trained
from tests.each import each
from tests.workflows.sampled import Sampled

MODEL = Path(__file__).parents[2] / "examples" / "demo" / "models" / "student"
THINKING = (  # writes what an assistant thought, up to "=", in the last turn alone, as Qwen3's does
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content.split('=')[-1] if m.role == 'assistant' and not loop.last else m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def play(engine: Sampled, tokenizer: Any, script: Callable[[ModelWrapper], Awaitable[Any]], runs: int = 1) -> Any:
    async def run() -> Any:
        model = ModelWrapper(engine, tokenizer, model_path="m", max_model_len=2000, loop=asyncio.get_running_loop())
        RUN.set(RunState(0, (7, 0), tuple(range(runs)), SamplingPlan(max_new_tokens=9)))
        return await script(model)

    return contextvars.copy_context().run(asyncio.run, run())


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


async def three_turns(model: ModelWrapper) -> tuple[list, list]:
    messages = [{"role": "user", "content": "123+456="}]
    for question in ("7+8=", "9+1=", None):
        (response,) = await model.chat_async(messages)
        messages.append({"role": "assistant", "content": response.response_text})
        if question:
            messages.append({"role": "user", "content": question})
    return messages, [model.branches(), model.convert_messages_to_experience(messages)]


def test_a_conversation_goes_on_with_the_tokens_that_were_sampled(tokenizer: Any) -> None:
    """Two tokenisations of one text: "57", sampled as two tokens, remains two tokens."""
    engine = Sampled(tokenizer, ["3+6+0=9,2+5+0=7<|end|>", "15<|end|>", "10<|end|>"])
    messages, ((branch,), whole) = play(engine, tokenizer, three_turns)
    for made in (branch, whole):
        tokens = made.tokens.numpy()
        assert made.prompt_length == len(engine.asked[0]) and made.response_text == "10"
        sampled = np.concatenate([completion.tokens for completion in engine.answered])
        mask = made.action_mask.numpy()
        np.testing.assert_array_equal(tokens[made.prompt_length :][mask], sampled)
        logprobs = np.concatenate([completion.logprobs for completion in engine.answered])
        np.testing.assert_array_equal(made.logprobs.numpy()[mask], logprobs)
        assert not made.logprobs.numpy()[~mask].any()
        for prompt in engine.asked:
            np.testing.assert_array_equal(tokens[: len(prompt)], prompt)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(branch.tokens) == text.rstrip()


def test_a_conversation_has_the_versions_of_its_responses_and_none_between(tokenizer: Any) -> None:
    """Weights may change between two turns."""
    engine = Sampled(tokenizer, ["579<|end|>", "15<|end|>", "10<|end|>"], versions=[3, 3, 5])
    _, ((branch,), _) = play(engine, tokenizer, three_turns)
    versions = [version for version, tokens in branch.versions for _ in range(tokens)]
    sampled = [version for version, one in zip([3, 3, 5], engine.answered, strict=True) for _ in one.tokens]
    mask = branch.action_mask.numpy()
    assert len(versions) == len(mask)
    assert [version for version, is_sampled in zip(versions, mask, strict=True) if is_sampled] == sampled
    assert {version for version, is_sampled in zip(versions, mask, strict=True) if not is_sampled} == {None}


@each("seed", range(40))
def test_sampled_text_is_never_made_tokens_again(tokenizer: Any, seed: int) -> None:
    """A turn continues any sampled tokens exactly or not at all, also special tokens and partial characters."""
    engine = Sampled(tokenizer, seed=seed)
    _, (branches, _) = play(engine, tokenizer, unconverted)
    for prompt, completion in zip(engine.asked, engine.answered, strict=True):
        sampled = np.concatenate([prompt, completion.tokens])
        learning = 0
        for branch in branches:
            tokens, mask = branch.tokens.numpy(), branch.action_mask.numpy()
            place = slice(len(prompt) - branch.prompt_length, len(sampled) - branch.prompt_length)
            if np.array_equal(tokens[: len(sampled)], sampled) and mask[place].all():
                np.testing.assert_array_equal(branch.logprobs.numpy()[place], completion.logprobs)
                learning += 1
        assert learning == 1
    assert sum(int(branch.action_mask.sum()) for branch in branches) == sum(len(c.tokens) for c in engine.answered)


async def unconverted(model: ModelWrapper) -> tuple[list, list]:
    messages = [{"role": "user", "content": "1+1="}]
    for question in ("2+2=", "3+3=", "4+4="):
        (response,) = await model.chat_async(messages)
        messages += [{"role": "assistant", "content": response.response_text}, {"role": "user", "content": question}]
    return messages, [model.branches(), None]


def test_a_template_that_rewrites_the_past_begins_new_branches(tokenizer: Any) -> None:
    tokenizer.chat_template = THINKING
    engine = Sampled(tokenizer, ["1+1=2<|end|>", "2<|end|>", "3+3=6<|end|>"])
    _, (branches, whole) = play(engine, tokenizer, three_turns)
    # the first answer has lost its thought by the second turn, which the third one continues
    assert [branch.prompt_length for branch in branches] == [len(engine.asked[0]), len(engine.asked[1])]
    assert [int(branch.action_mask.sum()) for branch in branches] == [
        len(engine.answered[0].tokens),
        len(engine.answered[1].tokens) + len(engine.answered[2].tokens),
    ]
    np.testing.assert_array_equal(whole.tokens.numpy(), branches[1].tokens.numpy())


def test_what_branches_have_in_common_is_learned_from_once(tokenizer: Any) -> None:
    async def fork(model: ModelWrapper) -> list:
        (first,) = await model.chat_async([{"role": "user", "content": "1+1="}])
        past = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": first.response_text}]
        for question in ("2+2=", "3+3="):
            await model.chat_async([*past, {"role": "user", "content": question}])
        return model.branches()

    engine = Sampled(tokenizer, ["2<|end|>", "4<|end|>", "6<|end|>"])
    one, other = play(engine, tokenizer, fork)
    sizes = [len(completion.tokens) for completion in engine.answered]
    assert [int(branch.action_mask.sum()) for branch in (one, other)] == [sizes[0] + sizes[1], sizes[2]]
    assert one.prompt_length == other.prompt_length == len(engine.asked[0])


def test_messages_that_nobody_sampled_are_no_experience(tokenizer: Any) -> None:
    async def invent(model: ModelWrapper) -> None:
        await model.chat_async([{"role": "user", "content": "1+1="}])
        model.convert_messages_to_experience(
            [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "made up"}]
        )

    with pytest.raises(ValueError, match="was sampled by this run"):
        play(Sampled(tokenizer, ["2<|end|>"]), tokenizer, invent)


def test_calls_take_the_options_of_trinitys_model(tokenizer: Any) -> None:
    async def script(model: ModelWrapper) -> None:
        messages = [{"role": "user", "content": "1+1="}]
        several = await model.chat_async(messages, n=3, temperature=0.5, max_tokens=4, stop="x", logprobs=True)
        assert (
            isinstance(several, Responses) and len(several) == 3 and several.response_text == several[0].response_text
        )
        texts = await model.generate_async(["1+1=", "2+2="], n=2)
        assert [text.prompt_text for text in texts] == ["1+1=", "1+1=", "2+2=", "2+2="]
        assert len(model.extract_experience_from_history()) == 7 and not model.history
        assert (await model.logprobs_async([1, 2, 3])).tolist() == [-1.0, -2.0] and await model.model_version_async == 3
        (begun,) = await model.chat_async([*messages, {"role": "assistant", "content": "It is"}])
        assert begun.prompt_text.endswith("It is")
        with pytest.raises(TypeError, match="unknown option 'temprature'"):
            await model.chat_async(messages, temprature=1)
        for refused in ("top_logprobs", "min_p", "logit_bias", "presence_penalty", "bad_words"):
            with pytest.raises(TypeError, match=refused):
                await model.chat_async(messages, **{refused: 1})
        with pytest.raises(ValueError, match="leaves no room"):
            await model.generate_async("1" * 3000)
        with pytest.raises(RuntimeError, match="_async"):
            model.chat(messages)

    play(Sampled(tokenizer), tokenizer, script)


def test_samples_have_the_settings_of_their_calls(tokenizer: Any) -> None:
    """In a conversation, in a response of its own, and in experiences that a workflow makes from tokens."""
    own = call_row(SamplingPlan(temperature=0.5, top_k=7), SamplingPlan())

    def same(rows: np.ndarray | None, row: np.ndarray) -> bool:
        return rows is not None and np.array_equal(rows, np.tile(row, (len(rows), 1)), equal_nan=True)

    async def script(model: ModelWrapper) -> None:
        def column(made: Experience) -> np.ndarray | None:
            limits, prompt = TokenLimits(2000, len(tokenizer)), Prompt("a", 0, "", np.array([1]))
            used = RUN.get().settings
            return trained(made, limits, prompt, 0, 0, 0, settings=used).columns.get(CALL_SETTINGS)

        def rebuilt(made: Experience) -> Experience:
            return Experience(tokens=made.tokens, prompt_length=made.prompt_length, logprobs=made.logprobs)

        messages = [{"role": "user", "content": "1+1="}]
        (plain,) = await model.chat_async(messages, temperature=1.0, n=1)
        assert column(plain) is None and column(rebuilt(plain)) is None
        messages += [{"role": "assistant", "content": plain.response_text}, {"role": "user", "content": "2+2="}]
        (cold,) = await model.chat_async(messages, temperature=0.5, top_k=7)
        assert same(column(cold), own)
        (talk,) = model.branches()
        rows, count = column(talk), len(cold.tokens) - cold.prompt_length
        assert rows is not None and same(rows[-count:], own) and np.isnan(rows[:-count]).all()
        assert same(column(rebuilt(cold)), UNKNOWN)  # the calls of the run have different settings
        RUN.get().settings = {own.tobytes()}
        assert same(column(rebuilt(cold)), own)

    play(Sampled(tokenizer, ["2<|end|>", "4<|end|>"]), tokenizer, script)


def test_seeds_differ_by_run_and_call_and_begin_as_those_of_a_single_turn() -> None:
    from roll_opd.rollout.workflow_protocol import sample_seed

    states = [RunState(0, (7, draw), (run,), SamplingPlan()) for draw in range(3) for run in range(4)]
    seeds = [[state.seeds(1)[0] for _ in range(5)] for state in states] + [state.seeds(6) for state in states]
    assert len({seed for row in seeds for seed in row}) == 12 * 11
    assert [row[0] for row in seeds[:12]] == [sample_seed(7, draw, run) for draw in range(3) for run in range(4)]
    together = RunState(0, (7, 2), (0, 1, 2, 3), SamplingPlan())
    assert together.seeds(4) == [sample_seed(7, 2, run) for run in range(4)]


def test_a_teacher_reads_its_own_words_around_what_was_asked_first(tokenizer: Any) -> None:
    """Each experience starts with a prompt of the run; teachers cannot score prompts that the run did not send."""
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + tokenizer.chat_template
    hint = ContextPlan(hint="{prompt} ({ground_truth}, {n})", name="t", key="teacher", prompt_length=60)
    row = Prompt("p", 0, "tag", np.array([1]), "8", FrozenDict({"n": 5}))

    async def script(model: ModelWrapper) -> None:
        contexts = TeacherContexts([hint], tokenizer)
        await three_turns(model)
        (branch,) = model.branches()
        (text,) = await model.generate_async("1+1=")
        run = RUN.get()
        for made, asked in ((branch, "<|user|>123+456= (8, 5)<|end|><|assistant|>"), (text, "1+1= (8, 5)")):
            tokens = made.tokens[: made.prompt_length].numpy()
            (read,) = contexts.prompts(tokens, run, row).values()
            assert tokenizer.decode(read) == asked
        assert TeacherContexts([], tokenizer).prompts(tokens, run, row) == {}
        with pytest.raises(ValueError, match="was never sent to the model"):
            contexts.prompts(tokens[1:], run, row)
        with pytest.raises(ValueError, match="no 'n' in the row"):
            contexts.prompts(tokens, run, replace(row, extra=FrozenDict()))
        with pytest.raises(ValueError, match="61 tokens for teacher, but its prompt_length is 60"):
            contexts.prompts(tokens, run, replace(row, ground_truth="8" * (60 - len(read) + 2)))
        tools = [{"type": "function", "function": {"name": "add"}}]
        (called,) = await model.chat_async([{"role": "user", "content": "9="}], tools=tools)
        begun = [{"role": "user", "content": "8="}, {"role": "assistant", "content": "8"}]
        (ended,) = await model.chat_async(begun)
        for made, reported in ((called, "with tools"), (ended, "ends in an assistant message")):
            with pytest.raises(ValueError, match=reported):
                contexts.prompts(made.tokens[: made.prompt_length].numpy(), run, row)

    play(Sampled(tokenizer), tokenizer, script)
