"""Test requests to a teacher's server at the start of a run. They check the model, context, tokenizer, temperature and
top-k, and that repeated scoring agrees across replicas.

If a check fails, the run does not start and the error gives the reason. A property that a server does not report is
logged and not checked.
"""

import asyncio
import itertools
import logging
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from roll_opd.base.failures import RunError
from roll_opd.data.templates import load_tokenizer, token_ids
from roll_opd.rewards.endpoint import Endpoint, GaveUp
from roll_opd.teachers.http_protocols import Question
from roll_opd.teachers.http_teacher import HttpScorer
from roll_opd.teachers.scorer import Target

START_SECONDS = 900.0  # in which a server must begin to answer
REPEATS = 4  # scorings of one sequence at each address
AGREEMENT = 0.05  # nats: a larger mean difference of two scorings of one sequence is another model or precision
SCALED = 0.02  # relative error of log-prob differences at another temperature
WORDS = (
    *("", "a", " the", "Hello", "naïve", "東京", "🙂👍🏽", "e\u0301", "x=1;", "\n\n", "\t", "  ", "1234567", "<tag>"),
    *("'s", "éé"),
)

_log = logging.getLogger(__name__)


def probe_strings() -> list[str]:
    """Return 240 texts that tokenizers split differently: scripts, digits, spaces, emoji, combining marks, code."""
    return ["".join(pair) for pair in itertools.permutations(WORDS, 2)]


async def check_server(
    scorer: HttpScorer, tokenizer: Path, temperature: float, target: Target | None, topk: int, longest: int
) -> None:
    """Check the servers of a teacher. RunError with the first failed check.

    Args:
        tokenizer: directory of the teacher's tokenizer.
        target: the kind of targets that the run's objective reads.
        longest: length of the longest sequence to score, in tokens.
    """
    await _find_model(scorer, longest)
    await _check_tokenizer(scorer, tokenizer)
    (ids,) = token_ids(load_tokenizer(str(tokenizer)), ["The sum of 12 and 30 is 42, not 43."], [False])
    tokens = np.array(ids, np.int64)
    await _check_repeats(scorer, Question(tokens, 1, temperature))
    if temperature != 1:
        await _check_temperature(scorer, tokens, temperature)
    if target == "topk":
        await scorer.ask(Question(tokens, 1, temperature, topk))
    elif target == "ids":
        wanted = np.tile(np.unique(tokens)[:topk], (len(tokens) - 1, 1))
        await scorer.ask(Question(tokens, 1, temperature, ids=np.resize(wanted, (len(tokens) - 1, topk))))


async def _find_model(scorer: HttpScorer, longest: int) -> None:
    """Set the scorer's model to the only listed one, or check that it is listed; check its context length."""
    for url in scorer.plan.url:
        listed = _by_name(await _answer(scorer, _endpoint(scorer, url, scorer.protocol.listing, "GET"), None))
        if listed is None:
            _log.warning("teacher %s: %s lists no models; http.model_name is not checked", scorer.name, url)
            continue
        if not scorer.model and len(listed) == 1:
            scorer.model = next(iter(listed))
        if scorer.model not in listed:
            which = f"{scorer.model!r} is not on" if scorer.model else "choose one of"
            names = ", ".join(sorted(listed))
            raise RunError(f"teacher {scorer.name}: http.model_name: {which} {url}, which has {names}")
        length = listed[scorer.model]
        if length and length <= longest:  # one token is generated
            raise RunError(
                f"teacher {scorer.name}: {url} takes at most {length} tokens, and sequences have up to {longest};"
                f" start the server with --max-model-len {longest + 1}"
            )


def _by_name(answer: Any) -> dict[str, int | None] | None:
    """Return model -> context length of the listed models; None if the server has no list."""
    try:
        return {str(model["id"]): model.get("max_model_len") for model in answer["data"]} or None
    except (KeyError, TypeError, AttributeError):
        return None


async def _check_tokenizer(scorer: HttpScorer, tokenizer: Path) -> None:
    """If the server tokenizes, compare its token ids of the probe strings with those from the tokenizer files."""
    probes = probe_strings()
    expected = token_ids(load_tokenizer(str(tokenizer)), probes, [False] * len(probes))
    for url in scorer.plan.url:
        endpoint = _endpoint(scorer, url.removesuffix("/v1"), "/tokenize", "POST")
        body = {"model": scorer.model, "prompt": probes[0], "add_special_tokens": False}
        first = await _answer(scorer, endpoint, body)
        if not isinstance(first, dict) or "tokens" not in first:
            _log.warning("teacher %s: %s does not tokenize; its tokenizer is not compared", scorer.name, url)
            return
        answers = await asyncio.gather(*[_answer(scorer, endpoint, {**body, "prompt": probe}) for probe in probes])
        for probe, ids, answer in zip(probes, expected, answers, strict=True):
            found = answer.get("tokens") if isinstance(answer, dict) else None
            if found != list(ids):
                raise RunError(
                    f"teacher {scorer.name}: {url} splits {probe!r} into {found}, and {tokenizer} into {list(ids)}:"
                    " the server has another tokenizer; give its directory in model_args.model_name_or_path"
                )


async def _check_repeats(scorer: HttpScorer, question: Question) -> None:
    """Score one sequence several times at each address, and compare the log-probs."""
    scorings = [scorer.ask(question, replica) for replica in range(len(scorer.plan.url)) for _ in range(REPEATS)]
    replies = np.stack([reply.logprobs for reply in await asyncio.gather(*scorings)]).astype(np.float64)
    worst = float(np.abs(replies - np.median(replies, 0)).mean(1).max())
    if worst > AGREEMENT:
        raise RunError(
            f"teacher {scorer.name}: repeated scoring of one sequence differs by {worst:.3g} nats a token: the replicas"
            " of the server have different weights or precision; use a dedicated deployment"
        )
    _log.info("teacher %s: repeated scoring differs by %.2g nats a token", scorer.name, worst)


async def _check_temperature(scorer: HttpScorer, tokens: np.ndarray, temperature: float) -> None:
    """Check that differences of log-probs scale with the temperature: log p(a) - log p(b) = (z(a) - z(b)) / t."""
    ids = np.tile(np.unique(tokens)[:2], (len(tokens) - 1, 1))
    plain, scaled = await asyncio.gather(*[scorer.ask(Question(tokens, 1, one, ids=ids)) for one in (1.0, temperature)])
    expected, found = (np.diff(np.asarray(one.topk_logprobs), axis=1)[:, 0] for one in (plain, scaled))
    error = np.abs(found * temperature - expected).mean() / max(float(np.abs(expected).mean()), 1e-6)
    if error > SCALED:
        raise RunError(
            f"teacher {scorer.name}: the server returns log-probs at temperature 1, and the student samples at"
            f" {temperature:g}; set generating_args.temperature: 1.0"
        )


def _endpoint(scorer: HttpScorer, url: str, path: str, method: Literal["POST", "GET"]) -> Endpoint:
    """Return a client of a path that gives up after `START_SECONDS`."""
    given = scorer.plan.retry_seconds
    return scorer.endpoint(url, path, method, START_SECONDS if given is None else min(START_SECONDS, given))


async def _answer(scorer: HttpScorer, endpoint: Endpoint, body: Any) -> Any:
    """Return a JSON answer; None if the server does not have the path. RunError if no server answers."""
    try:
        return await endpoint.ask(body, lambda found: found, Counter())
    except GaveUp as error:
        if error.kind in ("http_404", "http_405", "http_501"):
            return None
        raise RunError(f"teacher {scorer.name}: {error}") from None
