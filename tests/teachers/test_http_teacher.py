"""Teachers behind a server: every protocol gives the model's log-probs, and faults of a server never change them."""

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import teacher_server

from roll_opd.base import http_endpoint
from roll_opd.base.failures import RunError
from roll_opd.cluster.startup_progress import StartupProgress
from roll_opd.config.plan import HttpPlan
from roll_opd.pipelines.start_roles import check_teachers
from roll_opd.planner.load_plan import load_plan
from roll_opd.teachers import http_checks, http_teacher
from roll_opd.teachers.answer_cache import AnswerCache
from roll_opd.teachers.http_checks import check_server, probe_strings
from roll_opd.teachers.http_protocols import PROTOCOLS, BadAnswer, Question
from roll_opd.teachers.http_teacher import HttpScorer, rest_logprobs
from roll_opd.teachers.scoring import Teacher
from roll_opd.teachers.teacher_interface import TokenSequence, Wanted
from roll_opd.teachers.views import SameTokens

TOKENIZER = Path("examples/demo/models/teacher")
SEQUENCES: list[TokenSequence] = [
    (np.random.default_rng(n).integers(0, 500, 6 + 3 * n), 1 + 2 * (n % 3)) for n in range(4)
]
KINDS = tuple(kind for kind in PROTOCOLS if kind != "tinker")  # its client is a package


@contextmanager
def serving(name: str = "toy") -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, teacher_server.__file__, name], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def servers() -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving()) for _ in range(2)]


@pytest.fixture
def url(servers: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(http_endpoint, "FIRST_DELAY", 0.02)
    for one in servers:
        asked(one, "/script", {})
    return servers[0]


def asked(url: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data)) as answer:
        return json.load(answer)


def scorer(*urls: str, server: Any = "vllm", cache: AnswerCache | None = None, **keys: Any) -> HttpScorer:
    plan = HttpPlan(name="teacher", url=urls, server=server, **{"model_name": "toy", "request_seconds": 5.0, **keys})
    return HttpScorer("toy_teacher", plan, 512, cache)


def naive(tokens: np.ndarray, prompt_length: int) -> np.ndarray:
    """The log-probs of all tokens at each response token, f64 [T-P, V]."""
    ids = tokens.tolist()
    return np.array([teacher_server.logprobs_after(ids[:n]) for n in range(prompt_length, len(ids))])


def scored(teacher: HttpScorer) -> list[np.ndarray]:
    return [answer.logprobs for answer in asyncio.run(teacher.score(SEQUENCES, 1.0))]


def assert_right(found: list[np.ndarray]) -> None:
    for (tokens, length), logprobs in zip(SEQUENCES, found, strict=True):
        expected = naive(tokens, length)[np.arange(len(tokens) - length), tokens[length:]]
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("server", KINDS)
def test_log_probs_are_the_models(url: str, server: str) -> None:
    teacher = scorer(url, server=server)
    assert_right(scored(teacher))
    assert teacher.drain_metrics()["opd/teacher/toy_teacher/tokens_sent"] == sum(len(t) for t, _ in SEQUENCES)


@pytest.mark.parametrize("server", [kind for kind in KINDS if PROTOCOLS[kind].targets])
def test_the_teachers_top_k_and_the_log_probs_of_given_ids_are_the_models(url: str, server: str) -> None:
    teacher, generator = scorer(url, server=server), np.random.default_rng(1)
    answers = asyncio.run(teacher.score(SEQUENCES, 1.0, Wanted(topk=5, fetched=True, vocab_size=512)))
    for (tokens, length), answer in zip(SEQUENCES, answers, strict=True):
        rows = naive(tokens, length)
        best = np.argsort(-rows, 1)[:, :5]
        assert np.array_equal(answer.arrays["topk_ids"], best)
        np.testing.assert_allclose(answer.arrays["topk_logprobs"], np.take_along_axis(rows, best, 1), atol=1e-5)
        np.testing.assert_allclose(
            answer.arrays["topk_rest"], np.log(1 - np.exp(np.take_along_axis(rows, best, 1)).sum(1)), atol=1e-4
        )
        ids = np.stack([generator.choice(512, 7, replace=False) for _ in rows])
        reply = asyncio.run(scorer(url, server=server).ask(Question(tokens, length, ids=ids)))
        assert reply.topk_ids is not None and reply.topk_logprobs is not None
        assert np.array_equal(reply.topk_ids, ids)
        np.testing.assert_allclose(reply.topk_logprobs, np.take_along_axis(rows, ids, 1), atol=1e-5)


def test_answers_in_the_form_of_sglangs_code_are_read() -> None:
    """SGLang 0.5.23's functions made these from the toy model: 511, the last id, is 0 among the sequence's tokens."""
    own = [[None, 40, None], [-8.5231819, 0, None], [-8.7321758, 3, None]]
    best = [
        None,
        [[-2.3915901, 233, None], [-2.6926813, 402, None]],
        [[-1.0368288, 105, None], [-2.8820510, 124, None]],
    ]
    given = [None, *([[a, 3, None], [b, 9, None]] for a, b in ((-11.8413773, -4.1232247), (-8.7321758, -7.5486979)))]
    facts: dict[str, Any] = {"prompt_tokens": 4, "output_token_logprobs": [], "input_token_logprobs": own}
    other = {"text": "", "output_ids": []}
    tokens, reader = np.array([5, 40, 511, 3]), PROTOCOLS["sglang"]
    top = reader.read(Question(tokens, 2, 2), other | {"meta_info": facts | {"input_top_logprobs": best}})
    ids = np.array([[3, 9], [9, 3]])
    named = reader.read(
        Question(tokens, 2, ids=ids), other | {"meta_info": facts | {"input_token_ids_logprobs": given}}
    )
    rows = naive(tokens, 2)
    for reply, wanted in ((top, np.argsort(-rows, 1)[:, :2]), (named, ids)):
        np.testing.assert_allclose(reply.logprobs, rows[[0, 1], tokens[2:]], atol=1e-6)
        assert np.array_equal(reply.topk_ids, wanted)
        np.testing.assert_allclose(reply.topk_logprobs, np.take_along_axis(rows, wanted, 1), atol=1e-6)
    with pytest.raises(BadAnswer, match="were not requested"):
        reader.read(Question(np.array([5, 40, 40, 511]), 2), {"meta_info": facts})


def test_a_temperature_that_servers_do_not_apply_is_refused(url: str) -> None:
    with pytest.raises(RunError, match=r"at temperature 1, not 0\.7"):
        asyncio.run(scorer(url).score(SEQUENCES, 0.7))
    assert not asked(url, "/seen")


def test_the_rest_of_a_top_k_that_has_everything_is_finite() -> None:
    assert np.isfinite(rest_logprobs(np.log(np.array([[0.5, 0.5], [0.7, 0.3000001]], np.float32)))).all()


@pytest.mark.parametrize(
    "fault", ["500", "503", "429", "reset", "cut", "alien", "slow", "other_model", "shift", "null"]
)
def test_a_failure_that_passes_changes_no_log_prob_and_loses_none(url: str, fault: str) -> None:
    teacher = scorer(url, request_seconds=1.0, concurrency=2)
    asked(url, "/script", {"faults": [fault, "", fault]})
    assert_right(scored(teacher))
    bill = teacher.drain_metrics()
    assert bill["opd/teacher/toy_teacher/failed_requests"] == 2
    assert bill["opd/teacher/toy_teacher/requests"] == len(SEQUENCES) + 2
    assert bill["opd/teacher/toy_teacher/tokens_sent"] > sum(len(tokens) for tokens, _ in SEQUENCES)


@pytest.mark.parametrize("fault", ["alien", "other_model", "shift", "short", "null", "inf", "above"])
def test_a_server_that_lies_ends_the_run_and_never_gives_a_log_prob(url: str, fault: str) -> None:
    asked(url, "/script", {"always": fault})
    with pytest.raises(RunError, match=r"toy_teacher: http://127.0.0.1:\d+/v1/completions answered 3 times"):
        scored(scorer(url))


@pytest.mark.parametrize("status", ["400", "401", "404"])
def test_a_refused_request_ends_the_run_without_a_repetition(url: str, status: str) -> None:
    asked(url, "/script", {"always": status})
    with pytest.raises(RunError, match=f"http_{status}"):
        asyncio.run(scorer(url).score(SEQUENCES[:1], 1.0))
    assert len(asked(url, "/seen")) == 1


def test_a_server_that_sleeps_stalls_with_a_warning_and_is_not_given_up(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_teacher, "STALLED", 0.2)
    asked(url, "/script", {"faults": ["slow"] * 6})
    assert_right(scored(scorer(url, request_seconds=0.5)))
    assert "toy_teacher: no answer for" in caplog.text and "the run waits" in caplog.text


def test_retry_seconds_ends_a_run_whose_server_is_gone() -> None:
    with serving() as gone:
        pass
    with pytest.raises(RunError, match="check that the server runs"):
        scored(scorer(gone, retry_seconds=0.3))


def test_a_replica_that_is_gone_leaves_its_requests_to_the_others(
    url: str, servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_teacher, "REPLICA_SECONDS", 0.1)
    with serving() as gone:
        pass
    assert_right(scored(scorer(gone, *servers)))
    assert_right(scored(scorer(*servers)))
    assert all(asked(one, "/seen") for one in servers)  # both take requests


def test_a_resumed_run_reads_answers_from_the_cache_and_others_from_the_server(url: str, tmp_path: Path) -> None:
    first = scorer(url, cache=AnswerCache(tmp_path / "answers"))
    before = scored(first)
    first.end()
    again = scorer(url, cache=AnswerCache(tmp_path / "answers"))
    assert all(np.array_equal(a, b) for a, b in zip(before, scored(again), strict=True))
    assert len(asked(url, "/seen")) == len(SEQUENCES)
    bill = again.drain_metrics()
    assert bill["opd/teacher/toy_teacher/cached_tokens"] and not bill["opd/teacher/toy_teacher/tokens_sent"]
    tokens, length = SEQUENCES[3]
    (other,) = asyncio.run(again.score([(tokens, length + 1)], 1.0))  # another request
    assert len(other.logprobs) == len(tokens) - length - 1 and len(asked(url, "/seen")) == len(SEQUENCES) + 1
    asyncio.run(again.score([(tokens, length + 1)], 1.0, Wanted(computed=True)))  # not from the cache
    assert len(asked(url, "/seen")) == len(SEQUENCES) + 2
    again.end()


def fingerprinted(url: str, answers: Path) -> HttpScorer:
    """A scorer after the checks of a start."""
    teacher = scorer(url, server="sglang", cache=AnswerCache(answers))
    asyncio.run(check_server(teacher, TOKENIZER, None, 0, 128))
    return teacher


def test_a_resume_refuses_another_model_and_admits_rounding(url: str, tmp_path: Path) -> None:
    """Each logit of other weights differs by a normal deviate with the standard deviation `weights`."""
    fingerprinted(url, tmp_path / "answers").end()
    for weights in (0.0, 3e-4):
        asked(url, "/script", {"weights": weights})
        fingerprinted(url, tmp_path / "answers").end()
    for weights in (0.03, 1.0, 0.03):  # a refused start does not replace the fingerprint
        asked(url, "/script", {"weights": weights})
        with pytest.raises(RunError, match="another model"):
            fingerprinted(url, tmp_path / "answers")
    (tmp_path / "answers").unlink()  # the remedy of the message
    fingerprinted(url, tmp_path / "answers").end()


def test_another_model_during_a_run_leaves_no_stored_answer(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = fingerprinted(url, tmp_path / "answers")
    monkeypatch.setattr(http_teacher, "CHECKED", 0.0)
    asked(url, "/script", {"weights": 1.0})
    with pytest.raises(RunError, match="another model during the run"):
        scored(teacher)
    teacher.end()
    asked(url, "/script", {})
    assert_right(scored(fingerprinted(url, tmp_path / "answers")))


def test_the_key_reaches_the_server_and_no_message_or_file(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_KEY", "very-secret-word")
    cache = AnswerCache(tmp_path / "answers")
    teacher = scorer(url, api_key_env="TOY_KEY", cache=cache)
    scored(teacher)
    cache.close()
    assert asked(url, "/seen")[0]["headers"]["Authorization"] == "Bearer very-secret-word"
    assert b"very-secret" not in (tmp_path / "answers").read_bytes() and "very-secret" not in repr(teacher.plan)
    asked(url, "/script", {"always": "403"})
    with pytest.raises(RunError) as refused:
        scored(scorer(url, api_key_env="TOY_KEY"))
    assert "very-secret" not in str(refused.value) and "api_key_env" in str(refused.value)
    monkeypatch.delenv("TOY_KEY")
    with pytest.raises(RunError, match="TOY_KEY is not set"):
        scorer(url, api_key_env="TOY_KEY")


def test_the_start_checks_find_the_model_and_accept_a_sound_server(url: str) -> None:
    teacher = scorer(url, server="sglang", model_name=None)
    asyncio.run(check_server(teacher, TOKENIZER, "ids", 4, 128))
    assert teacher.model == "toy"
    assert_right(scored(teacher))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ({"models": ["another"]}, "'toy' is not on"),
        ({"longest": 64}, "at most 64 tokens"),
        ({"tokenize": [1, 2, 3]}, "another tokenizer"),
        ({"always": "noise"}, "replicas"),
    ],
)
def test_the_start_checks_refuse_a_server_with_the_reason(url: str, script: dict[str, Any], reason: str) -> None:
    asked(url, "/script", script)
    with pytest.raises(RunError, match=reason):
        asyncio.run(check_server(scorer(url, server="sglang"), TOKENIZER, None, 0, 128))


def test_a_server_without_log_probs_of_given_ids_is_found_at_the_start(url: str) -> None:
    for status in ("400", "501"):
        asked(url, "/script", {"always": status})
        with pytest.raises(RunError, match=r"write http\.server: vllm"):
            asyncio.run(check_server(scorer(url, server="vllm_tokens"), TOKENIZER, "ids", 4, 128))


def test_a_server_that_fails_at_every_test_request_ends_the_start(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_checks, "START_SECONDS", 2.0)  # a slow machine loads the tokenizer in 0.5 s
    asked(url, "/script", {"always": "500"})
    with pytest.raises(RunError, match=r"has not answered .*http_500"):
        asyncio.run(check_server(scorer(url), TOKENIZER, None, 0, 128))


def test_replicas_with_different_weights_are_refused(url: str, servers: list[str]) -> None:
    asked(servers[1], "/script", {"always": "noise"})
    with pytest.raises(RunError, match="replicas"):
        asyncio.run(check_server(scorer(*servers), TOKENIZER, None, 0, 128))


def test_probe_strings_differ_and_are_at_least_200() -> None:
    assert len(set(probe_strings())) >= 200


@pytest.mark.parametrize(("rule", "topk"), [("prefix", 20), ("whole", None)])
def test_the_start_checks_the_top_k_that_log_probs_of_single_tokens_need(url: str, rule: str, topk: int | None) -> None:
    section = f"+teacher={{http: {{url: '{url}', model_name: toy}}}}"
    model = "+teacher.model_args.model_name_or_path=examples/demo/models/other_tokenizer"
    overrides = ["~teacher", section, model, "teacher_tokenizer_check=align", f"++opd_chunk_credit={rule}"]
    plan = load_plan("demo", "onpolicy_distill", overrides, pure=True, runnable=False)
    teacher = Teacher(plan.teachers[0], scorer(url), SameTokens("teacher"))
    asyncio.run(check_teachers(plan, [teacher], StartupProgress(say=lambda line: None)))
    requested = {one["body"]["prompt_logprobs"] for one in asked(url, "/seen")}
    assert requested == {0, topk or 0}
    if topk:
        asked(url, "/script", {"faults": ["", "", "400"]})
        with pytest.raises(RunError, match="400"):
            asyncio.run(check_teachers(plan, [teacher], StartupProgress(say=lambda line: None)))
