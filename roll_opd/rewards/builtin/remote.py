"""`remote`: the reward is computed by an HTTP server of the user.

The server gets batches of samples and returns rewards.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from roll_opd.base.http_endpoint import Endpoint, GaveUp, RequestLimits
from roll_opd.rewards.interface import Failure, RewardError, RewardSample, Score, Scored
from roll_opd.rewards.reward_registry import register

ADVICE = {
    **dict.fromkeys(("http_401", "http_403"), "check headers"),
    "http_404": "write in url the whole URL that scores, such as http://host:8000/score",
    **dict.fromkeys(("http_400", "http_422"), "the server rejects the format of the samples; check the server log"),
    "broken_json": 'the server must return {"rewards": [...]}, one per sample',
}


@register("remote", keeps_time=True, asks_a_service=True, max_concurrency=4)  # a call has a batch
class Remote:
    """Client of a user's reward server."""

    def __init__(
        self,
        url: str = "",
        headers: Mapping[str, str] | None = None,
        request_seconds: float = 120,
        retry_seconds: float = 300,
        concurrency: int = 16,
        requests_per_minute: float | None = None,
    ) -> None:
        """Create the client; the keys are described in docs/rewards/remote.md."""
        if not url:
            raise RewardError("remote needs url; write the URL of the server, such as http://host:8000/score")
        limits = RequestLimits(request_seconds, retry_seconds, concurrency, requests_per_minute)
        self._endpoint = Endpoint(url, headers or {}, limits, ADVICE)

    async def score(self, samples: Sequence[RewardSample]) -> list[Scored]:
        """Score all samples with one request.

        Failed attempts are counted in the errors of the first sample.
        """
        if not samples:
            return []
        errors: Counter[str] = Counter()
        body = {"samples": [as_json(sample) for sample in samples]}
        scores: list[Scored]
        try:
            scores = list(await self._endpoint.ask(body, partial(read_rewards, count=len(samples)), errors))
        except GaveUp as error:
            scores = [Failure(error.kind, str(error), of_a_service=error.of_a_service)] * len(samples)
        return [replace(scores[0], errors=dict(errors)), *scores[1:]]


def as_json(sample: RewardSample) -> dict[str, Any]:
    """Return a sample as a JSON object for a request."""
    return {
        "id": sample.id,
        "prompt": sample.prompt,
        "response": sample.response,
        "ground_truth": sample.ground_truth,
        "tag": sample.tag,
        "extra": sample.extra,
    }


def read_rewards(answer: Any, count: int) -> list[Score]:
    """Parse the scores in an answer of the server; raise ValueError for an unusable answer.

    The answer is `{"rewards": [...]}` or a plain list, with `count` rewards.
    """
    rewards = answer.get("rewards") if isinstance(answer, dict) else answer
    if not isinstance(rewards, list):
        raise ValueError("no list of rewards")
    if len(rewards) != count:
        raise ValueError(f"{len(rewards)} rewards for {count} samples")
    return [_score(reward) for reward in rewards]


def _score(reward: Any) -> Score:
    """Parse the reward of one sample.

    A reward is a number, null, or {"reward": number or null, "parts": {name: number}, "reason": text}.
    """
    if not isinstance(reward, dict):
        return Score(None if reward is None else _number(reward))
    value, parts, reason = reward.get("reward"), reward.get("parts") or {}, reward.get("reason") or ""
    if "reward" not in reward or not isinstance(parts, dict) or not isinstance(reason, str):
        raise ValueError(f"a reward is {reward!r:.100}")
    numbers = {name: _number(part) for name, part in parts.items()}
    return Score(None if value is None else _number(value), numbers, reason)


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"a reward is {value!r:.100}, not a number")
    return float(value)
