"""Teachers in Tinker's service: the package `tinker` with a local server that implements its protocol."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from teacher_server import logprobs_after

from roll_opd.base import http_endpoint
from roll_opd.base.failures import RunError
from roll_opd.config.plan import HttpPlan
from roll_opd.teachers.http_protocols import Question, Reply
from roll_opd.teachers.http_teacher import HttpScorer

pytest.importorskip("tinker", reason="needs tinker (pip install tinker)")
pytestmark = pytest.mark.nightly

TOKENS = [np.random.default_rng(n).integers(0, 500, 9 + 3 * n) for n in range(3)]
LENGTHS = (1, 3, 8)  # of prompts


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from tinker_server import tinker_service

    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("TOY_KEY", "tml-very-secret-word")
    monkeypatch.setattr(http_endpoint, "FIRST_DELAY", 0.02)
    with tinker_service() as server:
        yield server


def scorer(service: Any, model: str = "org/toy", **keys: Any) -> HttpScorer:
    settings = {"request_seconds": 20.0, "api_key_env": "TOY_KEY", **keys}
    plan = HttpPlan(name="teacher", url=(service.url,), server="tinker", model_name=model, **settings)
    return HttpScorer("toy_teacher", plan, 512)


def naive(number: int) -> np.ndarray:
    """The log-probs of all tokens at each response token, f64 [T-P, V]."""
    ids = TOKENS[number].tolist()
    return np.array([logprobs_after(ids[:n]) for n in range(LENGTHS[number], len(ids))])


def scored(teacher: HttpScorer) -> list[np.ndarray]:
    answers = asyncio.run(teacher.score(list(zip(TOKENS, LENGTHS, strict=True)), 1.0))
    return [answer.logprobs for answer in answers]


def assert_right(found: list[np.ndarray]) -> None:
    for n, logprobs in enumerate(found):
        response = TOKENS[n][LENGTHS[n] :]
        np.testing.assert_allclose(logprobs, naive(n)[np.arange(len(response)), response], atol=1e-5)


@pytest.mark.parametrize("model", ["org/toy", "tinker://run/sampler_weights/toy"])
def test_log_probs_are_the_models(service: Any, model: str) -> None:
    teacher = scorer(service, model)
    assert_right(scored(teacher))
    (created,) = [body for path, _, body in service.seen if path == "create_sampling_session"]
    assert created["base_model" if model == "org/toy" else "model_path"] == model
    assert all(headers["X-API-Key"] == "tml-very-secret-word" for path, headers, _ in service.seen if path == "asample")
    assert teacher.drain_metrics()["opd/teacher/toy_teacher/tokens_sent"] == sum(map(len, TOKENS))


def test_the_top_k_and_the_log_probs_of_given_ids_are_the_models(service: Any) -> None:
    generator, teacher = np.random.default_rng(1), scorer(service)
    given = [np.stack([generator.choice(512, 7, replace=False) for _ in naive(n)]) for n in range(3)]

    async def both() -> list[tuple[Reply, Reply]]:
        pairs = list(zip(TOKENS, LENGTHS, strict=True))
        top = await asyncio.gather(*[teacher.ask(Question(*pair, topk=5)) for pair in pairs])
        named = [teacher.ask(Question(*pair, ids=ids)) for pair, ids in zip(pairs, given, strict=True)]
        return list(zip(top, await asyncio.gather(*named), strict=True))

    for n, replies in enumerate(asyncio.run(both())):
        for reply, ids in zip(replies, (np.argsort(-naive(n), 1)[:, :5], given[n]), strict=True):
            assert np.array_equal(reply.topk_ids, ids)
            np.testing.assert_allclose(reply.topk_logprobs, np.take_along_axis(naive(n), ids, 1), atol=1e-5)


@pytest.mark.parametrize("fault", ["server", "short", "slow"])
def test_a_failure_that_passes_changes_no_log_prob(service: Any, fault: str) -> None:
    service.script[:] = [fault]
    teacher = scorer(service, concurrency=1, request_seconds=1.0 if fault == "slow" else 20.0)
    asyncio.run(teacher._endpoints[0]._started())
    assert_right(scored(teacher))
    assert teacher.drain_metrics()["opd/teacher/toy_teacher/failed_requests"] == 1


@pytest.mark.parametrize("fault", ["400", "401", "user"])
def test_a_refused_request_ends_the_run_without_the_key_in_the_message(service: Any, fault: str) -> None:
    service.script[:] = [fault] * 9
    with pytest.raises(RunError, match=f"http_{fault}" if fault.isdigit() else "refused") as refused:
        scored(scorer(service, concurrency=1))
    assert "very-secret" not in str(refused.value)
    assert len([path for path, *_ in service.seen if path == "asample"]) == 1


def test_a_server_that_lies_ends_the_run(service: Any) -> None:
    service.script[:] = ["short"] * 99
    with pytest.raises(RunError, match="answered 3 times with unusable values"):
        scored(scorer(service))


def test_a_model_that_the_service_does_not_have_ends_the_run(service: Any) -> None:
    with pytest.raises(RunError, match="toy_teacher"):
        scored(scorer(service, "org/another"))
