"""The judge with a real server that is slow, refuses, disconnects, writes invalid answers, ends and restarts."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer, attempts_failed, scored

from roll_opd.base.addresses import chat_url
from roll_opd.base.frozen import FrozenDict
from roll_opd.base.http_endpoint import DOWN_AFTER
from roll_opd.extras.graders.rewards.llm_judge import LLMJudge
from roll_opd.rewards.interface import Failure, RewardError, RewardSample, Score
from roll_opd.rewards.reward_registry import resolve

Serve = Callable[..., ScriptedServer]
FAULTS = ("429", "429 after 1", "500", "503", "408", "cut", "alien", "half", "reset", "stall")


def said(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def compare(body: Any) -> dict[str, Any]:
    """Return the answer of a correct judge to `QUESTION`; the first answer to a repeated question is unreadable."""
    first, *again = [message["content"] for message in body["messages"]]
    response, _, truth = first.partition("|")
    if not again and response.endswith("9"):
        return said("Well.")
    return said("YES" if response == truth else "NO")


QUESTION = "{response}|{ground_truth}"
SAMPLES = [RewardSample(f"s{n}", str(n), str(n + n % 3), "t") for n in range(120)]
TRUTHS = [float(n % 3 == 0) for n in range(120)]
WITHOUT_VERDICT = sum(sample.response.endswith("9") for sample in SAMPLES)


@pytest.fixture
def judge(tmp_path: Path) -> Callable[..., LLMJudge]:
    def made(server: ScriptedServer, **keys: Any) -> LLMJudge:
        if "judge_prompt" not in keys:
            (tmp_path / "prompt.txt").write_text(QUESTION)
            keys["prompt_file"] = str(tmp_path / "prompt.txt")
        return LLMJudge(judge_model_name="judge", judge_api_url=server.url, **keys)

    return made


def values(scores: list[Any]) -> list[float | None]:
    assert not [score for score in scores if isinstance(score, Failure)]
    return [score.value for score in scores]


@pytest.mark.slow
def test_no_sample_is_lost_and_each_error_is_counted(serve: Serve, judge: Callable[..., LLMJudge]) -> None:
    faults: list[str | None] = [*FAULTS, *FAULTS, *[None] * 40]
    random.Random(0).shuffle(faults)
    server = serve(compare, faults, seconds=0.02)
    scores = scored(judge(server, concurrency=8, request_seconds=2), SAMPLES)
    assert values(scores) == TRUTHS
    assert server.wrong["timeout"] == 2 and server.wrong["http_429"] == 4
    assert attempts_failed(scores) == server.wrong + Counter(no_verdict=WITHOUT_VERDICT)
    assert server.most_at_once <= 8 + server.wrong["timeout"]  # a request that is given up goes on in the server


@pytest.mark.slow
def test_an_endpoint_that_dies_and_comes_back(serve: Serve, judge: Callable[..., LLMJudge]) -> None:
    server = serve(compare, seconds=0.1)
    away = 3.0

    def outage() -> None:
        while len(server.times) < 40:
            time.sleep(0.01)
        server.die()
        time.sleep(away)
        server.start()

    other = threading.Thread(target=outage)
    other.start()
    began = time.monotonic()
    scores = scored(judge(server, concurrency=8), SAMPLES)
    other.join()
    assert values(scores) == TRUTHS
    failed = attempts_failed(scores)
    assert failed.pop("no_verdict") == WITHOUT_VERDICT
    assert set(failed) == {"connect"}
    assert failed["connect"] <= 2 * 8 + 10, "all that waited hammered a dead server"
    assert time.monotonic() - began < away + 120 * 0.1 / 8 + 8


@pytest.mark.slow
def test_an_endpoint_that_stays_away_is_given_up(serve: Serve, judge: Callable[..., LLMJudge]) -> None:
    server = serve(compare, ["500"] * 1000)
    began = time.monotonic()
    scores = scored(judge(server, retry_seconds=2, concurrency=4), SAMPLES)
    assert time.monotonic() - began < 2 + 5
    assert {type(score) for score in scores} == {Failure}
    kinds = Counter(score.kind for score in scores)
    assert set(kinds) == {"http_500", "down"} and "last with http_500" in scores[-1].message
    assert attempts_failed(scores)["http_500"] == len(server.times) < DOWN_AFTER + 4 + 10
    server._faults = iter(())
    assert values(scored(judge(server), SAMPLES)) == TRUTHS


def test_an_error_that_only_the_user_can_correct_ends_the_attempts(
    serve: Serve, judge: Callable[..., LLMJudge], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(compare, ["401", "401", "404"])
    monkeypatch.setenv("MY_KEY", "sk-very-secret\n")
    refused = scored(judge(server, api_key_env="MY_KEY", concurrency=1), SAMPLES[:3])
    assert [score.kind for score in refused] == ["http_401", "http_401", "http_404"]
    assert len(server.times) == 3
    assert server.headers[0]["Authorization"] == "Bearer sk-very-secret"
    assert "check judge_api_key" in refused[0].message and "judge_model_name" in refused[2].message
    assert "went wrong, *** ***" in refused[0].message, "the server says the key back, and a message must not"


@pytest.mark.parametrize("as_date", [False, True])
def test_retry_after_holds_for_all(serve: Serve, judge: Callable[..., LLMJudge], as_date: bool) -> None:
    until = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=3)  # a date is in whole seconds
    held_until = time.monotonic() + (until - datetime.now(UTC)).total_seconds()
    server = serve(compare, [f"429 after {format_datetime(until, usegmt=True) if as_date else 1}"])
    assert values(scored(judge(server, concurrency=1), SAMPLES[:5])) == TRUTHS[:5]
    if not as_date:
        held_until = server.times[0] + 1
    assert -0.1 <= server.times[1] - held_until < 2
    assert server.times[-1] - server.times[1] < 1


def test_requests_to_a_judge_keep_the_rate(serve: Serve, judge: Callable[..., LLMJudge]) -> None:
    """No request arrives before its turn; on a busy machine some arrive late, and then closer together."""
    server = serve(compare, ["500", "500"])
    reward, began = judge(server, requests_per_minute=1200, concurrency=4), time.monotonic()
    assert values(scored(reward, SAMPLES[:30])) == TRUTHS[:30]
    assert len(server.times) == 30 + 2 + 3  # two errors, three second questions
    for number, arrived in enumerate(sorted(server.times)):
        assert arrived - began >= number * 0.05 - 0.001, number


def test_no_more_at_once_than_allowed(serve: Serve, judge: Callable[..., LLMJudge]) -> None:
    server = serve(compare, seconds=0.05)
    assert values(scored(judge(server, concurrency=5), SAMPLES[:40])) == TRUTHS[:40]
    assert server.most_at_once == 5


def test_the_same_question_is_asked_once(serve: Serve, judge: Callable[..., LLMJudge]) -> None:
    server = serve(compare, ["500"], seconds=0.05)
    same = [RewardSample(f"s{n}", "7", "7", "t") for n in range(10)]
    reward = judge(server)
    scores = scored(reward, same)
    assert values(scores) == [1.0] * 10 and attempts_failed(scores) == {"http_500": 1}
    assert values(scored(reward, same)) == [1.0] * 10
    assert len(server.times) == 2
    assert values(scored(judge(server, cache_size=0), same)) == [1.0] * 10
    assert len(server.times) == 12


def test_the_least_recently_used_verdict_is_forgotten(serve: Serve, judge: Callable[..., LLMJudge]) -> None:
    server = serve(compare)
    reward = judge(server, cache_size=2, concurrency=1)
    for n in (1, 2, 1, 3, 1, 2):  # 3 pushes 2 out
        scored(reward, [SAMPLES[n]])
    assert [body["messages"][0]["content"][0] for body in server.bodies] == ["1", "2", "3", "2"]


def test_a_judge_without_a_verdict_fails_after_three_answers(serve: Serve, judge: Callable[..., LLMJudge]) -> None:
    server = serve(lambda body: said("I would rather not say."))
    [failure] = scored(judge(server), SAMPLES[:1])
    assert (failure.kind, failure.errors) == ("no_verdict", {"no_verdict": 2})
    assert "rather not say" in failure.message and "max_tokens" in failure.message
    assert [len(body["messages"]) for body in server.bodies] == [1, 3, 3]


def test_a_judge_is_sent_this_request(serve: Serve, judge: Callable[..., LLMJudge]) -> None:
    server = serve(lambda body: said('Good. {"score": 4}'))
    extra = FrozenDict({"max_tokens": None, "max_completion_tokens": 50, "chat_template_kwargs": {"a": [1]}})
    reward = judge(server, system_prompt="Be strict.", extra_body=extra, verdict_key=("score",), max_score=5)
    assert scored(reward, SAMPLES[:1]) == [Score(0.8)]
    assert server.bodies == [
        {
            "model": "judge",
            "temperature": 0.0,
            "max_completion_tokens": 50,
            "chat_template_kwargs": {"a": [1]},
            "messages": [{"role": "system", "content": "Be strict."}, {"role": "user", "content": "0|0"}],
        }
    ]
    assert "Authorization" not in server.headers[0]


def test_rows_that_lack_what_is_asked_about_are_not_judged(serve: Serve, judge: Callable[..., LLMJudge]) -> None:
    server = serve(lambda body: said("YES"))
    assert scored(judge(server), [RewardSample("a", "7", None, "t")]) == [Score(None)]
    assert server.bodies == []


@pytest.mark.parametrize("name", ["Qwen2.5-7B-Instruct-RLVR-prompt", "match"])
def test_the_prompt_under_rolls_name(name: str, serve: Serve, judge: Callable[..., LLMJudge]) -> None:
    server = serve(lambda body: said("Yes."))
    sample = RewardSample("a", "x {prompt} YES", "{response}", "t", read_prompt=lambda: "What is {x}?")
    assert scored(judge(server, judge_prompt=name), [sample]) == [Score(1.0)]
    [body] = server.bodies
    lines = body["messages"][0]["content"].splitlines()
    assert lines[lines.index("The question:") + 1] == "What is {x}?"
    assert lines[lines.index("The reference answer:") + 1] == "{response}"
    at = lines.index("x {prompt} YES")
    assert lines[at - 1] == lines[at + 1] and len(lines[at - 1]) == 18  # the boundary


def test_another_model_can_be_asked() -> None:
    async def complete(messages: list[dict[str, str]], errors: Counter[str]) -> str:
        errors["restarted"] += 1
        return "YES" if "7" in messages[-1]["content"] else "NO"

    reward = LLMJudge(complete, judge_model_type="inference", judge_prompt="match")
    samples = [RewardSample("a", answer, "5", "t", read_prompt=lambda: "3+4") for answer in "75"]
    assert [score.errors for score in scored(reward, samples)] == [{"restarted": 1}] * 2


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("http://h:1", "http://h:1/v1/chat/completions"),
        ("http://h:1/", "http://h:1/v1/chat/completions"),
        ("http://h:1/v1/", "http://h:1/v1/chat/completions"),
        ("http://h:1/v1/chat/completions", "http://h:1/v1/chat/completions"),
        ("https://h/api/paas/v4", "https://h/api/paas/v4/chat/completions"),
        ("https://h/openai?api-version=1", "https://h/openai/chat/completions?api-version=1"),
    ],
)
def test_every_form_of_a_judges_url_gives_its_chat_url(url: str, whole: str) -> None:
    assert chat_url(url) == whole


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"judge_api_url": ""}, "needs judge_api_url"),
        ({"judge_model_name": ""}, "judge_model_name"),
        ({"judge_api_url": "host:8000"}, "'host:8000' is not an address"),
        ({"judge_api_url": "http://user:hidden@"}, "is not an address"),
        ({"judge_api_key": "sk-\u00e4"}, "header Authorization"),
        ({"judge_model_type": "local"}, "is not api or inference"),
        ({"judge_prompt": "mine"}, "judge_prompt: 'mine' is not known; use one of match"),
        ({"prompt_file": "absent.txt"}, "prompt_file: no file 'absent.txt'"),
        ({"prompt_file": "setup.py"}, "has no {response}"),
        ({"prompt_file": "a", "judge_prompt": "match"}, "remove one"),
        ({"verdict": "xml"}, "is not json or regex"),
        ({"pattern": "("}, "not a regular expression"),
        ({"min_score": 1}, "min_score 1 is not below max_score 1"),
        ({"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY is not set"),
        ({"cache_size": -1}, "cache_size: -1"),
        ({"concurrency": 0}, "concurrency: 0 is not a positive integer"),
        ({"concurrency": 1.5}, "concurrency: 1.5"),
        ({"requests_per_minute": "9"}, "requests_per_minute: '9' is not a positive number"),
        ({"retry_seconds": float("inf")}, "retry_seconds: inf"),
    ],
)
def test_what_is_written_wrong_is_said(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message) as raised:
        resolve("llm_judge", {"judge_model_name": "m", "judge_api_url": "http://h", **keys})
    assert not any(secret in str(raised.value) for secret in ("sk-", "hidden"))


def test_a_key_is_not_shown_when_another_argument_is_wrong() -> None:
    with pytest.raises(RewardError, match="cannot be created with") as raised:
        resolve("llm_judge", {"judge_api_key": "sk-secret", "nonsense": 1})
    assert "sk-secret" not in str(raised.value)
