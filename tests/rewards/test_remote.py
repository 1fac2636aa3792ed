"""The remote reward with a real server, and all of its failures."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from scripted_server import ScriptedServer, attempts_failed, scored

from roll_opd.base.frozen import FrozenDict
from roll_opd.rewards.builtin.remote import Remote, read_rewards
from roll_opd.rewards.interface import Failure, RewardError, RewardSample, Score
from roll_opd.rewards.reward_registry import resolve

Serve = Callable[..., ScriptedServer]
SAMPLES = [RewardSample(f"s{n}", "x" * n, str(n), "t") for n in range(60)]


def lengths(body: Any) -> dict[str, Any]:
    return {"rewards": [len(sample["response"]) for sample in body["samples"]]}


@pytest.mark.slow
def test_no_sample_is_lost_and_each_error_is_counted(serve: Serve) -> None:
    faults = ["429", "429 after 1", "500", "502", "cut", "alien", "half", "reset", "stall", *[None] * 20]
    random.Random(0).shuffle(faults)
    server = serve(lengths, faults, seconds=0.02)
    scores = scored(Remote(server.url, request_seconds=2, concurrency=4), SAMPLES, at_once=3)
    assert scores == [Score(float(n), errors=score.errors) for n, score in enumerate(scores)]
    assert sum(server.wrong.values()) == 9
    assert attempts_failed(scores) == server.wrong
    assert len(server.bodies) == 20 + 9


def test_a_remote_reward_is_sent_this_request(serve: Serve) -> None:
    server = serve(lengths)
    row = FrozenDict({"test_cases": [{"in": "1"}], "raw": b"\xff"})
    sample = RewardSample("a", "\ud800", None, "code", row, read_prompt=lambda: "Write it.")
    assert scored(Remote(server.url + "/score?v=1", {"X-Token": "abc"}), [sample]) == [Score(1.0)]
    assert server.headers[0]["X-Token"] == "abc"
    assert server.bodies == [
        {
            "samples": [
                {
                    "id": "a",
                    "prompt": "Write it.",
                    "response": "\ud800",
                    "ground_truth": None,
                    "tag": "code",
                    "extra": {"test_cases": [{"in": "1"}], "raw": "b'\\xff'"},
                }
            ]
        }
    ]


@pytest.mark.parametrize(
    "answer",
    [
        [1, None, {"reward": 0.5, "parts": {"form": 1}, "reason": "late"}],
        {"rewards": [True, {"reward": None}, {"reward": 0.5, "parts": {"form": 1}, "reason": "late"}], "took": 3},
    ],
)
def test_every_form_of_a_remote_answer_is_read(answer: Any) -> None:
    assert read_rewards(answer, 3) == [Score(1.0), Score(None), Score(0.5, {"form": 1.0}, "late")]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        1.0,
        "1",
        {},
        {"rewards": 1},
        [],
        [1, 2],
        ["1"],
        [float("nan")],
        [[1]],
        [{}],
        [{"parts": {"a": 1}}],
        [{"reward": "1"}],
        [{"reward": 1, "parts": [1]}],
        [{"reward": 1, "parts": {"a": None}}],
        [{"reward": 1, "reason": 3}],
    ],
)
def test_anything_else_is_no_answer(answer: Any) -> None:
    with pytest.raises(ValueError, match="reward"):
        read_rewards(answer, 1)


def test_a_batch_fails_as_a_whole_and_its_attempts_count_once(serve: Serve) -> None:
    server = serve(lambda body: [1.0])
    scores = scored(Remote(server.url, retry_seconds=1), SAMPLES[:2], at_once=2)
    assert [type(score) for score in scores] == [Failure, Failure]
    assert scores[0].kind == scores[1].kind == "broken_json"
    assert scores[0].errors == {"broken_json": len(server.bodies) - 1} and scores[1].errors == {}
    assert "1 rewards for 2 samples" in scores[0].message


def test_an_error_that_only_the_user_can_correct_ends_the_attempts(serve: Serve) -> None:
    server = serve(lengths, ["401"])
    [failure] = scored(Remote(server.url, {"Authorization": "Token hidden"}), SAMPLES[:1])
    assert failure.kind == "http_401" and "check headers" in failure.message and "hidden" not in failure.message
    assert len(server.bodies) == 1


def test_rolls_name_finds_the_remote_reward() -> None:
    path = "roll.pipeline.rlvr.rewards.remote_reward_system_worker.RemoteRewardSystemWorker"
    with pytest.raises(RewardError, match="remote needs url"):
        resolve(path)
    assert resolve(path, {"url": "http://h"})
