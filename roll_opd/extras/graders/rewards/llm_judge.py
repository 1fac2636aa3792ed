"""`llm_judge`: the reward is read from the verdict of a language model on each response.

A `Complete` sends the requests to the model, see `roll_opd.extras.graders.judge_client`.
"""

import asyncio
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from roll_opd.base.http_endpoint import GaveUp, RequestLimits
from roll_opd.base.paths import find_path, places
from roll_opd.extras.graders.judge_client import ChatEndpoint, Complete, Messages
from roll_opd.extras.graders.judge_prompts import (
    JUDGE_PROMPTS,
    JudgePrompt,
    ReadVerdict,
    Verdict,
    VerdictCache,
    by_json,
    by_pattern,
    check_template,
    filled,
)
from roll_opd.rewards.interface import Failure, RewardError, RewardSample, Score, Scored
from roll_opd.rewards.reward_registry import register

VERDICT_ATTEMPTS = 3
RETRY_PROMPT = "No verdict can be read in that. Write only the verdict, in exactly the form that was asked for."
DEFAULT_KEY_ENV = "OPENAI_API_KEY"
# arguments only for a judge behind an API; all others apply to any judge
ENDPOINT_ARGUMENTS = """
    judge_model_name judge_api_url judge_api_key api_key_env temperature max_tokens extra_body request_seconds
    retry_seconds concurrency requests_per_minute
"""


@register(
    "llm_judge",
    keeps_time=True,
    asks_a_service=True,
    endpoint_arguments=frozenset(ENDPOINT_ARGUMENTS.split()),
)
class LLMJudge:
    """Score from 0 to 1, read from the verdict of a judge.

    The score is None if the row lacks a field that the prompt template needs.
    """

    def __init__(
        self,
        complete: Complete | None = None,
        /,
        judge_model_name: str = "",
        judge_api_url: str = "",
        judge_api_key: str = "",
        judge_model_type: Literal["api", "inference"] = "api",
        judge_prompt: str | None = None,
        prompt_file: str | None = None,
        system_prompt: str | None = None,
        verdict: Literal["json", "regex"] | None = None,
        verdict_key: str | Sequence[str] | None = None,
        pattern: str | None = None,
        min_score: float | None = None,
        max_score: float | None = None,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        extra_body: Mapping[str, Any] | None = None,
        api_key_env: str | None = None,
        cache_size: int = 10_000,
        request_seconds: float = 120,
        retry_seconds: float = 300,
        concurrency: int = 16,
        requests_per_minute: float | None = None,
    ) -> None:
        """Create the judge.

        The keys are described in docs/rewards/llm_judge.md. `complete` calls the judge if an inference engine of this
        run is the judge.
        """
        if judge_model_type not in ("api", "inference"):
            raise RewardError(f"judge_model_type: {judge_model_type!r} is not api or inference")
        if not isinstance(cache_size, int) or cache_size < 0:
            raise RewardError(f"cache_size: {cache_size!r} is not a number of verdicts; write 0 or more")
        prompt = _prompt(judge_prompt, prompt_file)
        self._template = prompt.template
        self._read = _reader(prompt, verdict, verdict_key, pattern, min_score, max_score)
        self._opening = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._verdicts: VerdictCache[Verdict] = VerdictCache(cache_size)
        if complete is None and judge_model_type == "api":
            complete = ChatEndpoint(
                judge_api_url,
                {"model": judge_model_name, "temperature": temperature, "max_tokens": max_tokens, **(extra_body or {})},
                _key(judge_api_key, api_key_env),
                RequestLimits(request_seconds, retry_seconds, concurrency, requests_per_minute),
            )
        self._complete: Any = complete  # None while only the arguments are checked

    async def score(self, samples: Sequence[RewardSample]) -> list[Scored]:
        """Return a score or a failure for each sample.

        The samples are judged concurrently.
        """
        return list(await asyncio.gather(*map(self._score, samples)))

    async def _score(self, sample: RewardSample) -> Scored:
        question = filled(self._template, sample)
        if question is None:
            return Score(None)
        messages = [*self._opening, {"role": "user", "content": question}]
        errors: Counter[str] = Counter()
        try:
            digest = hashlib.sha256(json.dumps(messages).encode()).hexdigest()
            verdict = await self._verdicts.get(digest, partial(self._judge, messages, errors))
        except GaveUp as error:
            return Failure(error.kind, str(error), dict(errors), error.of_a_service)
        return Score(verdict.value, verdict.parts, errors=dict(errors))

    async def _judge(self, messages: Messages, errors: Counter[str]) -> Verdict:
        """Request a verdict from the judge.

        If no verdict can be read, a retry sends the judge's answer and asks for the verdict only. A retry with the same
        prompt would probably give the same answer.
        """
        text = await self._complete(messages, errors)
        for _ in range(VERDICT_ATTEMPTS - 1):
            verdict = self._read(text)
            if verdict is not None:
                return verdict
            errors["no_verdict"] += 1
            again = [{"role": "assistant", "content": text}, {"role": "user", "content": RETRY_PROMPT}]
            text = await self._complete([*messages, *again], errors)
        verdict = self._read(text)
        if verdict is None:
            raise GaveUp(
                "no_verdict",
                f"no verdict in {VERDICT_ATTEMPTS} answers of the judge (the last answer ends in {text[-200:]!r});"
                " correct the prompt or its parsing (verdict, pattern, verdict_key, min_score, max_score), or raise"
                " max_tokens",
                of_a_service=False,
            )
        return verdict


def _prompt(name: str | None, file: str | None) -> JudgePrompt:
    if file is None:
        if name is not None and name not in JUDGE_PROMPTS:
            known = ", ".join(JUDGE_PROMPTS)
            raise RewardError(f"judge_prompt: {name!r} is not known; use one of {known}, or your own prompt_file")
        return JUDGE_PROMPTS[name or "match"]
    if name is not None:
        raise RewardError("judge_prompt and prompt_file are both set; remove one of the two")
    path = find_path(file)
    if path is None or not path.is_file():
        raise RewardError(f"prompt_file: no file {file!r} in {places()}; set the path of a text file")
    try:
        template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RewardError(f"prompt_file: {path} cannot be read: {error}") from error
    check_template(template, f"prompt_file {path}")
    return JudgePrompt(template)


def _reader(
    prompt: JudgePrompt,
    verdict: str | None,
    key: str | Sequence[str] | None,
    pattern: str | None,
    low: float | None,
    high: float | None,
) -> ReadVerdict:
    """Return the parser of the verdict.

    Values that are not configured are the defaults of the judge's prompt.
    """
    low, high = (prompt.min_score if low is None else low), (prompt.max_score if high is None else high)
    if not low < high:
        raise RewardError(f"min_score {low!r} is not below max_score {high!r}; write the range of the judge's scores")
    verdict = verdict or ("regex" if pattern is not None else "json" if key is not None else prompt.verdict)
    if verdict == "json":
        key = key or prompt.verdict_key
        return by_json([key] if isinstance(key, str) else list(key), low, high)
    if verdict != "regex":
        raise RewardError(f"verdict: {verdict!r} is not json or regex")
    try:
        return by_pattern(re.compile(pattern or prompt.pattern), low, high)
    except re.error as error:
        raise RewardError(f"pattern: {pattern!r} is not a regular expression: {error}") from None


def _key(written: str, variable: str | None) -> str:
    """Return the API key from the configuration, or else from the environment.

    The result is empty if neither has a key. Raises `RewardError` if the configured environment variable is not set.
    """
    if written:
        return written.strip()
    if variable is not None and not os.environ.get(variable):
        raise RewardError(f"api_key_env: the environment variable {variable} is not set here; set it before the launch")
    return os.environ.get(variable or DEFAULT_KEY_ENV, "").strip()
