"""The policy behind an OpenAI address: unmodified clients, their tokens and their errors."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from roll_opd.config.plan import SamplingPlan
from roll_opd.inference.tool_calls import HERMES, ToolCall, find_parser, read_hermes
from roll_opd.workflows.auxiliary import AuxiliaryModel, RemoteModel
from roll_opd.workflows.builtin.agent import AgentWorkflow
from roll_opd.workflows.endpoint import server
from roll_opd.workflows.endpoint.server import PolicyServer
from roll_opd.workflows.model_wrapper import ModelWrapper
from roll_opd.workflows.run_state import RUN, RunState
from roll_opd.workflows.workflow_experience import WorkflowError
from roll_opd.workflows.workflow_interface import Task
from tests.teachers.tokenizer_kinds import content
from tests.workflows.sampled import Sampled

MODEL = Path(__file__).parents[2] / "examples" / "demo" / "models" / "student"
WITH_TOOLS = (  # as Qwen's: tools in front, calls as JSON with spaces of its own
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ASKED = [{"role": "user", "content": "1+2="}]
CALLING = '<tool_call>{"name":"add",  "arguments":{"a":1,"b":2}}</tool_call><|end|>'  # no template writes it like this


class Served:
    """An endpoint with an engine whose answers are known."""

    def __init__(self, engine: Sampled, tokenizer: Any, **settings: Any) -> None:
        loop = asyncio.get_running_loop()
        self.model = ModelWrapper(engine, tokenizer, model_path="m", max_model_len=4000, loop=loop)
        self.endpoint = PolicyServer(self.model, loop, find_parser(HERMES, tokenizer), **settings)
        self.model.endpoint = self.endpoint
        self.engine = engine

    def run(self, number: int = 0) -> RunState:
        """Return a new run, to which the following requests of this task belong."""
        state = RunState(number, (7, number), (0,), SamplingPlan(max_new_tokens=9))
        RUN.set(state)
        return state


def served(script: Callable[[Served], Any], tokenizer: Any, *answers: str, **settings: Any) -> Any:
    async def run() -> Any:
        return await script(Served(Sampled(tokenizer, answers), tokenizer, **settings))

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.fixture
def tokenizer() -> Any:
    found = AutoTokenizer.from_pretrained(MODEL)
    found.chat_template = WITH_TOOLS
    return found


def by_hand(served: Served) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, mask and log-probs of a conversation without branches, from the engine's requests and answers."""
    *_, asked = served.engine.asked
    *_, last = served.engine.answered
    tokens = np.concatenate([asked, last.tokens])
    mask, logprobs = np.zeros(len(tokens), bool), np.zeros(len(tokens), np.float32)
    for prompt, completion in zip(served.engine.asked, served.engine.answered, strict=True):
        place = slice(len(prompt), len(prompt) + len(completion.tokens))
        np.testing.assert_array_equal(tokens[place], completion.tokens)
        mask[place], logprobs[place] = True, completion.logprobs
    return tokens, mask, logprobs


async def with_tools(complete: Callable[..., Any]) -> list[dict]:
    """Play three turns, the first of which calls a tool."""
    messages: list[dict] = [*ASKED]
    for turn in range(3):
        message = await complete(messages)
        messages.append(message)
        for call in message.get("tool_calls") or ():
            arguments = json.loads(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(sum(arguments.values()))})
        if turn == 1:
            messages.append({"role": "user", "content": "again"})
    return messages


async def plain(client: openai.AsyncOpenAI, messages: list[dict]) -> dict:
    done = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
    return done.choices[0].message.model_dump(exclude_none=True)


async def in_thread(client: openai.OpenAI, messages: list[dict]) -> dict:
    def ask() -> dict:
        done = client.chat.completions.create(model="m", messages=messages, tools=[ADD])
        return done.choices[0].message.model_dump(exclude_none=True)

    return await asyncio.to_thread(ask)


async def streamed(client: openai.AsyncOpenAI, messages: list[dict]) -> dict:
    async with client.chat.completions.stream(model="m", messages=messages, tools=[ADD]) as stream:
        done = await stream.get_final_completion()
    message = done.choices[0].message
    calls = [
        {"id": c.id, "type": "function", "function": c.function.model_dump(include={"name", "arguments"})}
        for c in message.tool_calls or ()
    ]
    return {"role": "assistant", "content": message.content, **({"tool_calls": calls} if calls else {})}


@pytest.mark.parametrize("complete", [plain, in_thread, streamed])
def test_a_conversation_with_tools_is_what_was_sampled(tokenizer: Any, complete: Callable) -> None:
    async def script(served: Served) -> None:
        served.run()
        model = served.model
        client = model.get_openai_client() if complete is in_thread else model.get_openai_async_client()
        messages = await with_tools(lambda messages: complete(client, messages))
        assert [message["role"] for message in messages] == [
            "user",
            "assistant",
            "tool",
            "assistant",
            "user",
            "assistant",
        ]
        assert messages[2]["content"] == "3" and messages[-1]["content"] == "4"
        (branch,) = model.branches()
        tokens, mask, logprobs = by_hand(served)
        np.testing.assert_array_equal(branch.tokens.numpy(), tokens)
        np.testing.assert_array_equal(branch.action_mask.numpy(), mask[branch.prompt_length :])
        np.testing.assert_array_equal(branch.logprobs.numpy(), logprobs[branch.prompt_length :])
        assert CALLING in tokenizer.decode(tokens)
        assert served.endpoint.counts == {"200": 3}

    served(script, tokenizer, CALLING, "3<|end|>", "4<|end|>")


def test_many_conversations_at_once_do_not_mix(tokenizer: Any) -> None:
    async def one(served: Served, number: int) -> None:
        state = served.run(number)
        client = served.model.get_openai_async_client()
        messages = [{"role": "user", "content": f"{number}"}]
        for _ in range(3):
            done = await client.chat.completions.create(model="m", messages=messages)
            messages += [done.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "on"}]
        found = served.model.branches()
        assert len(state.turns.calls) == 3 and sum(int(made.action_mask.sum()) for made in found) == sum(
            len(call.completion.tokens) for call in state.turns.calls
        )
        assert all(
            tokenizer.decode(made.tokens[: made.prompt_length]).startswith(f"<|user|>{number}<") for made in found
        )

    async def script(served: Served) -> None:
        await asyncio.gather(*[asyncio.create_task(one(served, number)) for number in range(64)])
        assert served.endpoint.counts == {"200": 192}

    served(script, tokenizer)


def test_a_template_that_rewrites_the_past_is_a_new_branch(tokenizer: Any) -> None:
    async def script(served: Served) -> None:
        served.run()
        client = served.model.get_openai_async_client()
        await client.chat.completions.create(model="m", messages=ASKED)
        await client.chat.completions.create(model="m", messages=[{"role": "system", "content": "other"}, *ASKED])
        await client.chat.completions.create(
            model="m", messages=[*ASKED, {"role": "assistant", "content": "nobody said"}, *ASKED]
        )
        assert len(served.model.branches()) == 3

    served(script, tokenizer, "3<|end|>", "4<|end|>", "5<|end|>")


def test_what_a_client_can_ask_for(tokenizer: Any) -> None:
    async def script(served: Served) -> None:
        served.run()
        client = served.model.get_openai_async_client()
        options = {"n": 3, "temperature": 0.5, "max_completion_tokens": 5, "stop": "9", "logprobs": True, "seed": 3}
        done = await client.chat.completions.create(model="gpt", messages=ASKED, **options)
        assert [choice.message.content for choice in done.choices] == ["a", "b", "c"] and done.model == "gpt"
        for choice, completion in zip(done.choices, served.engine.answered, strict=True):
            assert [token.logprob for token in choice.logprobs.content] == completion.logprobs.tolist()
            assert choice.finish_reason == "stop"
        assert done.usage.completion_tokens == sum(len(c.tokens) for c in served.engine.answered)
        assert done.usage.prompt_tokens == len(served.engine.asked[0])
        pieces = [
            piece
            async for piece in await client.chat.completions.create(
                model="m", messages=ASKED, stream=True, logprobs=True, stream_options={"include_usage": True}
            )
        ]
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1]) == "d" * 200
        assert len(pieces) > 4 and pieces[-1].usage.completion_tokens == 201
        assert len(pieces[-2].choices[0].logprobs.content) == 201
        parts = [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "2="}]}]
        await client.chat.completions.create(model="m", messages=parts, tools=[ADD], tool_choice="none")
        np.testing.assert_array_equal(served.engine.asked[-1], served.engine.asked[0])
        assert [model.id async for model in await client.models.list()] == ["m"]

    served(script, tokenizer, "a9<|end|>", "b9", "c9<|end|>", "d" * 200 + "<|end|>", "3<|end|>")


def test_the_bytes_of_tokens_are_those_of_the_answer() -> None:
    """A character that is cut into tokens is joined again from their bytes; byte-level and SentencePiece."""
    for kind in ("byte_level", "bytes_only", "llama", "gemma", "unigram_bytes"):
        one = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content(kind))))
        one.chat_template, one.eos_token = WITH_TOOLS, "<|end|>"

        async def script(served: Served) -> Any:
            served.run()
            done = await served.model.get_openai_async_client().chat.completions.create(
                model="m",
                messages=ASKED,
                logprobs=True,
                extra_body={"audio": None, "top_logprobs": 0, "unheard_of": None},
            )
            return done.choices[0]

        choice = served(script, one, "é 龍🙂 x<|end|>")
        entries = choice.logprobs.content
        assert b"".join(bytes(entry.bytes) for entry in entries).strip() == "é 龍🙂 x<|end|>".encode(), kind
        assert choice.message.content.strip() == "é 龍🙂 x"
        assert all(entry.token.encode() == bytes(entry.bytes) for entry in entries if "\ufffd" not in entry.token), kind
        assert any("\ufffd" in entry.token for entry in entries), kind


WRONG = {
    "is not JSON": b"{",
    "expected an object": b"[]",
    "messages: is not a list": {"messages": "hello"},
    "at least one": {"messages": []},
    r"messages\[1\].role: 'robot' is not one of": {"messages": [*ASKED, {"role": "robot", "content": "x"}]},
    "only text parts": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    "content: is not a text": {"messages": [{"role": "user"}]},
    "arguments: is not JSON": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]
    },
    "temperature: is -1": {"messages": ASKED, "temperature": -1},
    "n: is 1000": {"messages": ASKED, "n": 1000},
    "max_tokens: is 0": {"messages": ASKED, "max_tokens": 0},
    "stop: ": {"messages": ASKED, "stop": [1]},
    "stop: '' is not": {"messages": ASKED, "stop": ""},
    "top_p: is 0": {"messages": ASKED, "top_p": 0},
    "repetition_penalty: is 0": {"messages": ASKED, "repetition_penalty": 0},
    "surrogates not allowed": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "function_call: .* is not supported": {"messages": ASKED, "function_call": {"name": "f"}},
    "chat_template_kwargs": {"messages": ASKED, "chat_template_kwargs": {"chat_template": "x"}},
    "chat_template_kwargs: is not": {"messages": ASKED, "chat_template_kwargs": {"tokenize": True}},
    "function.arguments: is not": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}]
    },
    "characters, which leaves no room": {"messages": [{"role": "user", "content": "12" * 3_500_000}]},
    "presence_penalty: 1 is not supported": {"messages": ASKED, "presence_penalty": 1},
    "top_logprobs": {"messages": ASKED, "top_logprobs": 5},
    "response_format": {"messages": ASKED, "response_format": {"type": "json_object"}},
    "tool_choice: only auto and none": {"messages": ASKED, "tools": [ADD], "tool_choice": "required"},
    "tools: is not": {"messages": ASKED, "tools": "add"},
    "temprature: is not a known parameter": {"messages": ASKED, "temprature": 1},
    "leaves no room": {"messages": [{"role": "user", "content": "1" * 5000}]},
}


@pytest.mark.parametrize(
    ("what", "messages", "tools"),
    [
        ("the message of role 'system'", [{"role": "system", "content": "Be brief."}, *ASKED], None),
        ("the tool 'add'", ASKED, [ADD]),
        (None, [*ASKED, {"role": "assistant", "content": "3"}, *ASKED], None),
    ],
)
def test_what_a_template_drops_is_refused(tokenizer: Any, what: str | None, messages: list, tools: list | None) -> None:
    """As in files; at the endpoint and in `chat`."""
    kept = "{% for message in messages if message.role in ('user', 'assistant') %}"
    tokenizer.chat_template = kept + "<|user|>{{ message.content }}{% endfor %}"

    async def script(served: Served) -> None:
        served.run()
        asked = {"messages": messages, **({"tools": tools} if tools else {})}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {served.model.api_key}"}) as http:
            answer = await http.post(f"{served.model.base_url}/chat/completions", json=asked)
        if what is None:
            assert answer.status_code == 200
            assert len(await served.model.chat_async(messages)) == 1
            return
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(f"the chat template leaves out {what}; ")
        with pytest.raises(ValueError, match=f"the chat template leaves out {what}"):
            await served.model.chat_async(messages, tools=tools)

    served(script, tokenizer, "1", "2")


def test_a_wrong_request_is_refused_and_disturbs_no_other(tokenizer: Any) -> None:
    async def script(served: Served) -> None:
        served.run()
        url, key = served.model.base_url, served.model.api_key
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}) as http:
            for message, asked in WRONG.items():
                body = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
                answer = await http.post(f"{url}/chat/completions", content=body)
                assert answer.status_code == 400, message
                with pytest.raises(ValueError, match=message):
                    raise ValueError(answer.json()["error"]["message"])
            junk = {"Content-Encoding": "gzip"}
            answer = await http.post(f"{url}/chat/completions", content=b"junk", headers=junk)
            assert answer.status_code == 400 and "cannot be read" in answer.json()["error"]["message"]
            for path, status in (("chat/completions", 405), ("elsewhere", 404)):
                answer = await http.get(f"{url}/{path}")
                assert answer.status_code == status and answer.json()["error"]["message"]
        assert not served.engine.asked
        client = served.model.get_openai_async_client()
        assert (await client.chat.completions.create(model="m", messages=ASKED)).choices[0].message.content == "3"

    served(script, tokenizer, "3<|end|>")


def test_an_endpoint_answers_the_keys_of_its_runs_alone(tokenizer: Any) -> None:
    async def script(served: Served) -> None:
        other = served.model.api_key if served.run(0) else ""
        one = served.run(1)
        session = served.endpoint.session(one)
        address = served.model.api_address
        named, header = f"{address}/sessions/{session.id}", {"X-Session-Id": session.id}

        async def status(url: str, key: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
            async with httpx.AsyncClient(timeout=20) as http:
                sent = {"Authorization": f"Bearer {key}".encode("latin-1"), **(headers or {})}
                answer = await http.post(
                    f"{url}/v1/chat/completions", json={"messages": ASKED}, headers=list(sent.items())
                )
            return answer.status_code, answer.json().get("error", {}).get("message", "")

        assert served.model.session_url == f"{named}/v1"
        for url, key, headers in ((address, session.key, None), (named, "house", None), (address, "house", header)):
            assert (await status(url, key, headers))[0] == 200
        assert len(one.turns.calls) == 3
        assert (await status(address, "wrong\xff"))[0] == 401
        assert (await status(address, "wrong"))[0] == 401 and (await status(named, "wrong"))[0] == 401
        code, message = await status(address, "house")
        assert code == 400 and "no session is named" in message
        assert (await status(f"{address}/sessions/nobody", "house"))[0] == 404
        assert (await status(named, other))[0] == 403
        # a key of its own says which session: the header may have another meaning, but not another session's
        assert (await status(address, session.key, {"X-Session-ID": "of a router"}))[0] == 200
        theirs = served.endpoint._by_key[other].id
        assert (await status(address, session.key, {"X-Session-ID": theirs}))[0] == 403
        assert len(one.turns.calls) == 4
        served.endpoint.close(one)
        for url, key in ((address, session.key), (named, "house")):
            code, message = await status(url, key)
            assert code == 410 and "closed" in message
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{address}/health")).json() == {"status": "ok"}
        assert len(one.turns.calls) == 4

    served(script, tokenizer, key="house")


def test_a_huge_body_is_refused(tokenizer: Any) -> None:
    async def script(served: Served) -> None:
        served.run()
        client = served.model.get_openai_async_client().with_options(max_retries=0)
        huge = [{"role": "user", "content": "x" * 50_000_000}]
        with pytest.raises(openai.APIStatusError) as refused:
            await client.chat.completions.create(model="m", messages=huge)
        assert refused.value.status_code == 413 and "the maximum is 8388608" in str(refused.value)

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(50):
                yield b"x" * 1_000_000

        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {served.model.api_key}"}) as http:
            url = f"{served.model.base_url}/chat/completions"
            assert (await http.post(url, content=pieces())).status_code == 413  # its length is not sent before
        await client.chat.completions.create(model="m", messages=ASKED)

    served(script, tokenizer, "3<|end|>")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disappears_is_counted_and_leaves_nothing(tokenizer: Any, stream: bool) -> None:
    async def script(served: Served) -> None:
        state = served.run()
        client = served.model.get_openai_async_client().with_options(max_retries=0)
        served.engine.pause.clear()
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="m", messages=ASKED, stream=stream, timeout=0.3)
        for _ in range(100):
            if served.endpoint.counts[server.ABANDONED]:
                break
            await asyncio.sleep(0.02)
        assert served.endpoint.counts == {server.ABANDONED: 1} and not state.turns.calls and not state.history
        served.engine.pause.set()
        await client.chat.completions.create(model="m", messages=ASKED)
        assert len(served.model.branches()) == 1

    served(script, tokenizer, "3<|end|>")


@pytest.mark.parametrize("stream", [False, True])
def test_a_run_that_ends_closes_what_is_under_way(
    tokenizer: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KEEPALIVE_SECONDS", 0.05)

    async def script(served: Served) -> None:
        state = served.run()
        client = served.model.get_openai_async_client().with_options(max_retries=0)
        served.engine.pause.clear()

        async def ask() -> None:
            answer = await client.chat.completions.create(model="m", messages=ASKED, stream=stream)
            if stream:
                [_ async for _ in answer]

        asking = asyncio.create_task(ask())
        await asyncio.sleep(0.3)
        served.endpoint.close(state)
        with pytest.raises(openai.APIError, match="the session is closed"):
            await asking

    served(script, tokenizer)


def test_a_reward_can_be_posted(tokenizer: Any) -> None:
    async def script(served: Served) -> None:
        state = served.run()
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {served.model.api_key}"}) as http:
            url = f"{served.model.base_url}/reward"
            for text in (b"[" * 100_000, b"1" + b"0" * 400):
                assert (await http.post(url, content=text)).status_code == 400
            for body in ({}, {"reward": "1"}, {"reward": 1, "color": 2}, {"reward": 1, "metrics": {"a": "b"}}, "x"):
                assert (await http.post(url, json=body)).status_code == 400
            assert (await http.post(url, content=b'{"reward": NaN}')).status_code == 400 and state.reward is None
            assert (await http.post(url, json={"reward": 0.5, "metrics": {"steps": 3}})).json() == {"reward": 0.5}
        assert served.model.reward == 0.5 and state.metrics == {"steps": 3}

    served(script, tokenizer)


def test_too_many_requests_are_asked_to_retry(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONCURRENT_REQUESTS", 2)

    async def script(served: Served) -> None:
        served.run()
        client = served.model.get_openai_async_client().with_options(max_retries=0)
        served.engine.pause.clear()
        waiting = [asyncio.create_task(client.chat.completions.create(model="m", messages=ASKED)) for _ in range(2)]
        await asyncio.sleep(0.3)
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="m", messages=ASKED)
        served.engine.pause.set()
        await asyncio.gather(*waiting)
        assert served.endpoint.counts == {"200": 2, "429": 1}

    served(script, tokenizer)


def test_an_address_in_use_is_reported(tokenizer: Any) -> None:
    async def script(one: Served) -> None:
        other = Served(one.engine, tokenizer, port=int(one.endpoint.address.rpartition(":")[2]))
        with pytest.raises(WorkflowError, match="set another endpoint_host or endpoint_port"):
            _ = other.endpoint.address

    served(script, tokenizer)


F, G = (f'<tool_call>{{"name": "{name}"}}</tool_call>' for name in "fg")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("just text", "just text", []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>', "", [ToolCall("f", '{"a": "é"}')]),
        ('so <tool_call>{"name":"f"}</tool_call> <tool_call>{"name":"f"}</tool_call>', "so", [ToolCall("f", "{}")] * 2),
        ("<tool_call>{not json}</tool_call>", "<tool_call>{not json}</tool_call>", []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ('<tool_call>{"name": "f"}', '<tool_call>{"name": "f"}', []),
        (f"<think>as {F}?</think>no", f"<think>as {F}?</think>no", []),
        (f"<think>as {F}?</think>so {F}", f"<think>as {F}?</think>so", [ToolCall("f", "{}")]),
        (f"opened by the template {F}</think>\n{F}", "opened by the template " + F + "</think>", [ToolCall("f", "{}")]),
        (f"<think>never closed {F}", f"<think>never closed {F}", []),
        (f"{F}<think>again {G}?</think>{G}", "", [ToolCall("f", "{}"), ToolCall("g", "{}")]),
        (f"[THINK]{F}[/THINK]{G}", f"[THINK]{F}[/THINK]", [ToolCall("g", "{}")]),
        (f"<think>the form is <tool_call></think>{F}", "<think>the form is <tool_call></think>", [ToolCall("f", "{}")]),
        (f"<tool_call>{{x</tool_call>{F}{G}", "<tool_call>{x</tool_call>", [ToolCall("f", "{}"), ToolCall("g", "{}")]),
        (f'<tool_call>{{"name": {F}', '<tool_call>{"name":', [ToolCall("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [ToolCall("f", "{}")]),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", [ToolCall("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [ToolCall("f", '{"a": 1}')]),
    ],
)  # fmt: skip
def test_tool_calls_as_hermes_writes_them(text: str, content: str, calls: list[ToolCall]) -> None:
    assert read_hermes(text, [ADD]) == (content, calls)


AGENT = """
import json, os, sys, time, urllib.request
row = json.load(sys.stdin)
assert sys.argv[1:] == [os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]]

def post(path, body):
    headers = {"Authorization": "Bearer " + sys.argv[2], "Content-Type": "application/json"}
    request = urllib.request.Request(sys.argv[1] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

messages = [{"role": "user", "content": row["question"]}]
for _ in range(2):
    messages.append(post("/chat/completions", {"messages": messages})["choices"][0]["message"])
    messages.append({"role": "user", "content": "on"})
if row["does"] == "post":
    post("/reward", {"reward": 0.25})
elif row["does"] == "fail":
    sys.exit("no idea")
elif row["does"] == "hang":
    time.sleep(600)
else:
    print("working ...\\n" + row["does"])
"""


def agent(served: Served, does: str, **arguments: Any) -> AgentWorkflow:
    served.run()
    row = {"question": "1+2=", "does": does}
    return AgentWorkflow(model=served.model, task=Task(raw_task=row, workflow_args=arguments))


@pytest.mark.parametrize(
    ("does", "reward", "metrics"),
    [
        ("1", 1.0, {}),
        ('{"reward": 0.5, "metrics": {"steps": 2}}', 0.5, {"steps": 2}),
        ("post", 0.25, {}),
        ("all done", None, {}),
    ],
)
@pytest.mark.parametrize("kind", ["branch", "call"])
def test_a_program_is_an_agent(tokenizer: Any, does: str, reward: float | None, metrics: dict, kind: str) -> None:
    async def script(served: Served) -> None:
        command = [sys.executable, "-c", AGENT, "{base_url}", "{api_key}"]
        made = await agent(served, does, command=command, experiences=kind).run_async()
        assert len(made) == (2 if kind == "call" else 1) and {one.reward for one in made} == {reward}
        assert RUN.get().metrics == metrics
        for one in made:
            assert one.response_text == "4" or kind == "call"

    served(script, tokenizer, "3<|end|>", "4<|end|>")


def test_a_program_that_fails_is_reported_and_one_that_is_not_awaited_is_ended(tokenizer: Any) -> None:
    async def script(served: Served) -> None:
        command = [sys.executable, "-c", AGENT, "{base_url}", "{api_key}"]
        with pytest.raises(RuntimeError, match="exit code 1: no idea"):
            await agent(served, "fail", command=command).run_async()
        hanging = asyncio.create_task(agent(served, "hang", command=command).run_async())
        while len(served.engine.answered) < 4:
            await asyncio.sleep(0.05)
        alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        children = [child for child in alive if AGENT in child.cmdline()]
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert children and not psutil.wait_procs(children, timeout=10)[1]
        with pytest.raises(ValueError, match=r"expected agent .* or command"):
            await agent(served, "").run_async()

    served(script, tokenizer, "3<|end|>", "4<|end|>", "5<|end|>", "6<|end|>")


def test_an_answer_that_cannot_be_sent_is_not_learned_from(tokenizer: Any) -> None:
    """For any reason: the client repeats the request, and only the answer that it received is trained on."""

    async def script(served: Served) -> None:
        state = served.run()

        def broken(text: str, tools: Any) -> Any:
            raise KeyError("broken")

        served.endpoint._parse, parse = broken, served.endpoint._parse
        client = served.model.get_openai_async_client().with_options(max_retries=1)
        with pytest.raises(openai.InternalServerError, match="KeyError"):
            await client.chat.completions.create(model="m", messages=ASKED, tools=[ADD])
        assert not state.turns.calls and not state.history
        served.endpoint._parse = parse
        await client.chat.completions.create(model="m", messages=ASKED, tools=[ADD])
        assert len(served.model.branches()) == 1

    served(script, tokenizer)


def test_an_engine_that_fails_in_a_stream_is_reported_in_it(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEPALIVE_SECONDS", 0.05)

    async def script(served: Served) -> None:
        state = served.run()

        async def generate(*_: Any) -> Any:
            await asyncio.sleep(0.3)
            raise RuntimeError("the engine is gone")

        served.engine.generate = generate  # type: ignore[method-assign]
        client = served.model.get_openai_async_client().with_options(max_retries=0)
        with pytest.raises(openai.APIError, match="the engine is gone"):
            async for _ in await client.chat.completions.create(model="m", messages=ASKED, stream=True):
                pass
        assert served.endpoint.counts["500"] == 1 and not state.history

    served(script, tokenizer)


def test_a_task_that_outlives_its_run_is_reported(tokenizer: Any) -> None:
    """A client that was left over has no new session, and the model does not answer it either."""

    async def script(served: Served) -> None:
        state = served.run()
        client = served.model.get_openai_async_client()
        await client.chat.completions.create(model="m", messages=ASKED)
        served.endpoint.close(state)
        for ask in (client.chat.completions.create(model="m", messages=ASKED), served.model.chat_async(ASKED)):
            with pytest.raises(RuntimeError, match="run that has ended"):
                await ask
        assert not served.endpoint._by_key and len(state.history) == 1

    served(script, tokenizer)


def test_a_client_that_would_stop_the_loop_is_reported(tokenizer: Any) -> None:
    async def script(served: Served) -> None:
        served.run()
        with pytest.raises(RuntimeError, match="would block all other runs"):
            served.model.get_openai_client().chat.completions.create(model="m", messages=ASKED)

    served(script, tokenizer)


def test_proxies_of_the_environment_are_not_asked(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def script(served: Served) -> None:
        served.run()
        await served.model.get_openai_async_client().chat.completions.create(model="m", messages=ASKED)
        command = [sys.executable, "-c", AGENT, "{base_url}", "{api_key}"]
        (made,) = await agent(served, "1", command=command).run_async()
        assert made.reward == 1

    served(script, tokenizer)


def test_developers_speak_as_the_system_and_special_tokens_mark_calls(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})

    async def script(served: Served) -> None:
        served.run()
        client = served.model.get_openai_async_client()
        messages: list[Any] = [{"role": "developer", "content": "add"}, *ASKED]
        done = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
        assert "<|system|>add<|end|>" in tokenizer.decode(served.engine.asked[0])
        (call,) = done.choices[0].message.tool_calls
        assert call.function.name == "add" and not done.choices[0].message.content
        messages += [done.choices[0].message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "3"}]
        await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
        assert len(served.model.branches()) == 1

    served(script, tokenizer, CALLING, "3<|end|>")


def test_a_thought_that_the_template_opens_and_nobody_closes_holds_no_call(tokenizer: Any) -> None:
    tokenizer.chat_template = tokenizer.chat_template.replace("<|assistant|>", "<|assistant|><think>\n")
    call = CALLING.removesuffix("<|end|>")

    async def script(served: Served) -> None:
        served.run()
        client = served.model.get_openai_async_client()
        for calls in (0, 1, 0):
            done = await client.chat.completions.create(model="m", messages=ASKED, tools=[ADD])
            assert len(done.choices[0].message.tool_calls or ()) == calls

    served(script, tokenizer, f"perhaps {call}<|end|>", f"so</think>{CALLING}", f"perhaps {call}</think>3<|end|>")


def test_a_token_that_ends_a_turn_is_not_written_twice(tokenizer: Any) -> None:
    """Also one that is special, and none of the tokenizer's few with a name of their own."""
    tokenizer.eos_token = "<|user|>"

    async def script(served: Served) -> None:
        served.run()
        client = served.model.get_openai_async_client()
        messages: list[Any] = [*ASKED]
        for _ in range(2):
            done = await client.chat.completions.create(model="m", messages=messages)
            messages += [done.choices[0].message.model_dump(exclude_none=True), *ASKED]
        (branch,) = served.model.branches()
        assert "<|end|><|end|>" not in tokenizer.decode(branch.tokens)

    served(script, tokenizer, "3<|end|>", "4<|end|>")


def test_models_say_how_a_client_is_to_ask_them(tokenizer: Any) -> None:
    """As Trinity-RFT's adapter of agents makes its models of auxiliary ones."""

    async def script(served: Served) -> None:
        loop = asyncio.get_running_loop()
        sampling = SamplingPlan(max_new_tokens=5, temperature=0.25, top_p=0.5)
        of_engine = {"model_path": "there", "max_model_len": 400, "loop": loop, "name": "judge"}
        judge = AuxiliaryModel(0, sampling, served.engine, tokenizer, **of_engine)
        judge.endpoint = PolicyServer(judge, loop, read_hermes)
        state = served.run()
        assert judge.generate_kwargs == {"temperature": 0.25, "top_p": 0.5, "max_tokens": 5}
        client = judge.get_openai_async_client()
        await client.chat.completions.create(model=client.model_path, messages=ASKED, **judge.generate_kwargs)
        policy = served.model
        assert policy.generate_kwargs["max_tokens"] == state.sampling.max_new_tokens and policy.config.name is None
        for end in ("", "/", "/v1", "/v1/", "/v1/completions", "/v1/chat/completions"):
            assert RemoteModel("large", f"http://x{end}", "key").base_url == "http://x/v1"
        remote = RemoteModel("large", "http://x/v1", "key", "user")
        assert remote.generate_kwargs == {} and remote.model_path == "large"
        for model, name in ((judge, "judge"), (remote, "user")):
            assert model.config.name == model.model_config.name == name
        assert [model.model_name for model in (judge, policy, remote)] == ["there", policy.model_path, "large"]
        judge.endpoint.close(state)

    served(script, tokenizer)


def test_the_length_of_messages_is_that_of_the_prompt(tokenizer: Any) -> None:
    """The tokens are those that `chat` would send; for another model than the policy, the template decides."""

    async def script(served: Served) -> None:
        state = served.run()
        loop = asyncio.get_running_loop()
        judge = AuxiliaryModel(
            0, SamplingPlan(), served.engine, tokenizer, model_path="j", max_model_len=400, loop=loop
        )
        messages: list[Any] = [*ASKED]
        for _ in range(3):
            length = await served.model.get_message_token_len(messages)
            written = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert await judge.get_message_token_len(messages) == len(written)
            (response,) = await served.model.chat_async(messages)
            assert response.prompt_length == length
            messages += [{"role": "assistant", "content": response.response_text}, *ASKED]
        assert len(messages) == 7 and state.calls == 3 and state.auxiliary_calls == 0

    served(script, tokenizer)


def test_auxiliary_models_keep_nothing(tokenizer: Any) -> None:
    """Sessions are those of the run, and to look changes no seed."""

    async def script(served: Served) -> None:
        loop = asyncio.get_running_loop()
        judge = AuxiliaryModel(
            0, SamplingPlan(max_new_tokens=5), served.engine, tokenizer, model_path="j", max_model_len=400, loop=loop
        )
        judge.endpoint = PolicyServer(judge, loop, read_hermes)
        state = served.run()
        client = judge.get_openai_async_client()
        for _ in range(3):
            await client.chat.completions.create(model="j", messages=ASKED)
            assert not judge.history and not judge.branches() and judge.api_key
        await judge.chat_async(ASKED)
        assert state.auxiliary_calls == 4 and not state.history and len(judge.endpoint._by_key) == 1
        judge.endpoint.close(state)
        assert not judge.endpoint._by_key

    served(script, tokenizer)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"command": "python agent.py"},
        {"command": []},
        {"agent": "a.b", "command": ["x"]},
        {"agent": "a.b", "experiences": "row"},
        {"agent": "a.b", "agnet": 1},
    ],
)
def test_impossible_agents_are_reported(tokenizer: Any, arguments: dict) -> None:
    async def script(served: Served) -> None:
        workflow = agent(served, "1", **arguments)
        with pytest.raises(ValueError, match=r"expected agent .* or command"):
            await workflow.run_async()

    served(script, tokenizer)


def test_a_reward_that_is_none_fails_the_run(tokenizer: Any) -> None:
    async def script(served: Served) -> None:
        command = [sys.executable, "-c", AGENT, "{base_url}", "{api_key}"]
        for said in ('{"reward": 1, "answer": "x"}', "1" + "0" * 400):
            with pytest.raises(ValueError, match="expected"):
                await agent(served, said, command=command).run_async()

    served(script, tokenizer)
