"""Test requests to a teacher's server at the start of a run.

The requests check the server's model, context length, tokenizer and top-k. They also check that all replicas return the
same log-probs, and that a resumed run has the model whose answers are stored. If a check fails, the run ends with an
error that gives the reason. If a server does not report a property, a warning is logged instead of the check.
"""

import asyncio
import itertools
import logging
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from roll_opd.base.failures import RunError, excerpt
from roll_opd.base.http_endpoint import Endpoint, GaveUp
from roll_opd.data.templates import load_tokenizer, token_ids
from roll_opd.teachers.answer_cache import TEXT, Fingerprint
from roll_opd.teachers.http_protocols import Question
from roll_opd.teachers.http_teacher import AGREEMENT, HttpScorer
from roll_opd.teachers.teacher_interface import Target

START_SECONDS = 900.0  # time in which a server must start to answer, and answer all test requests
# fractions of the fixed text that are scored at each address; sequences of other lengths are in other batches
SCORED = (1.0, 1.0, 0.75, 0.5)
WORDS = (
    *("", "a", " the", "Hello", "naïve", "東京", "🙂👍🏽", "e\u0301", "x=1;", "\n\n", "\t", "  ", "1234567", "<tag>"),
    *("'s", "éé"),
)

_log = logging.getLogger(__name__)


def probe_strings() -> list[str]:
    """Return 240 texts that tokenizers split differently.

    The texts mix scripts, digits, white space, emoji, combining marks and code.
    """
    return ["".join(pair) for pair in itertools.permutations(WORDS, 2)]


async def check_server(scorer: HttpScorer, tokenizer: Path, target: Target | None, topk: int, longest: int) -> None:
    """Check the servers of a teacher. Raises RunError for the first check that fails, or after `START_SECONDS`.

    Args:
        tokenizer: directory of the teacher's tokenizer.
        target: kind of the targets that the objective needs.
        topk: number of tokens per position in the targets.
        longest: number of tokens of the longest sequence to score.
    """
    try:
        async with asyncio.timeout(START_SECONDS):
            await _check(scorer, tokenizer, target, topk, longest)
    except TimeoutError:
        raise RunError(
            f"teacher {scorer.name}: {scorer.plan.location} has not answered the test requests in {START_SECONDS:g} s"
            f" ({scorer.last_failure or 'no failure'}); check the server's log"
        ) from None


async def _check(scorer: HttpScorer, tokenizer: Path, target: Target | None, topk: int, longest: int) -> None:
    if scorer.protocol.listing:
        await _find_model(scorer, longest)
        await _check_tokenizer(scorer, tokenizer)
    else:
        _log.warning("teacher %s: context length and tokenizer of %s are not checked", scorer.name, scorer.plan.server)
    (ids,) = token_ids(load_tokenizer(str(tokenizer)), [TEXT], [""])
    tokens = np.array(ids[:longest], np.int64)
    scorer.identify(await _fingerprint(scorer, tokens))
    if target == "topk":
        await scorer.ask(Question(tokens, 1, topk))
    elif target == "ids":
        wanted = np.tile(np.unique(tokens)[:topk], (len(tokens) - 1, 1))
        await scorer.ask(Question(tokens, 1, ids=np.resize(wanted, (len(tokens) - 1, topk))))


async def _find_model(scorer: HttpScorer, longest: int) -> None:
    """Check that each server lists the scorer's model, and that the model's context is long enough.

    If no model is configured and the server lists only one model, the scorer uses this model.
    """
    for url in scorer.plan.url:
        listed = _by_name(await _answer(scorer, _endpoint(scorer, url, scorer.protocol.listing, "GET"), None))
        if listed is None:
            _log.warning("teacher %s: %s lists no models; http.model_name is not checked", scorer.name, url)
            continue
        if not scorer.model and len(listed) == 1:
            scorer.model = next(iter(listed))
        if scorer.model not in listed:
            which = f"{scorer.model!r} is not on" if scorer.model else "choose a model of"
            names = excerpt(", ".join(sorted(listed)))
            raise RunError(f"teacher {scorer.name}: http.model_name: {which} {url}, which has the models {names}")
        length = listed[scorer.model]
        if length and length <= longest:  # the server generates one token in addition
            raise RunError(
                f"teacher {scorer.name}: {url} accepts at most {length} tokens, but sequences have up to {longest};"
                f" start the server with --max-model-len {longest + 1}"
            )


def _by_name(answer: Any) -> dict[str, int | None] | None:
    """Return a map from each listed model to its context length, or None if the server lists no models."""
    try:
        return {str(model["id"]): model.get("max_model_len") for model in answer["data"]} or None
    except (KeyError, TypeError, AttributeError):
        return None


async def _check_tokenizer(scorer: HttpScorer, tokenizer: Path) -> None:
    """Compare the server's token ids of the probe strings with the token ids of the tokenizer files.

    Nothing is checked if the server has no endpoint that tokenizes. Raises RunError if the token ids differ.
    """
    probes = probe_strings()
    expected = token_ids(load_tokenizer(str(tokenizer)), probes, [""] * len(probes))
    for url in scorer.plan.url:
        endpoint = _endpoint(scorer, url, "/tokenize", "POST")
        body = {"model": scorer.model, "prompt": probes[0], "add_special_tokens": False}
        first = await _answer(scorer, endpoint, body)
        if not isinstance(first, dict) or "tokens" not in first:
            _log.warning(
                "teacher %s: %s has no endpoint that tokenizes, so the tokenizer of the server is not checked",
                scorer.name,
                url,
            )
            return
        answers = await asyncio.gather(*[_answer(scorer, endpoint, {**body, "prompt": probe}) for probe in probes])
        for probe, ids, answer in zip(probes, expected, answers, strict=True):
            found = answer.get("tokens") if isinstance(answer, dict) else None
            if found != list(ids):
                raise RunError(
                    f"teacher {scorer.name}: {url} splits {probe!r} into {excerpt(str(found))}, but {tokenizer} into"
                    f" {list(ids)}: the server has another tokenizer; give the directory of the server's tokenizer in"
                    " model_args.model_name_or_path"
                )


async def _fingerprint(scorer: HttpScorer, tokens: np.ndarray) -> Fingerprint:
    """Score the fixed text several times at each address, whole and cut, and return the fingerprint.

    Raises RunError if the log-probs differ too much.
    """
    lengths = [max(2, round(part * len(tokens))) for part in SCORED]
    scorings = [scorer.ask(Question(tokens[:n], 1), at) for at in range(len(scorer.plan.url)) for n in lengths]
    found = Fingerprint.of(tokens, [reply.logprobs for reply in await asyncio.gather(*scorings)])
    if found.spread > AGREEMENT:
        raise RunError(
            f"teacher {scorer.name}: repeated scoring of one sequence differs by {found.spread:.3g} nats per token: the"
            " replicas of the server have different weights or precision; use a dedicated deployment"
        )
    _log.info("teacher %s: repeated scoring differs by %.2g nats per token", scorer.name, found.spread)
    return found


def _endpoint(scorer: HttpScorer, url: str, path: str, method: Literal["POST", "GET"]) -> Endpoint:
    """Return a client for a path of a server. Its requests fail after at most `START_SECONDS`."""
    given = scorer.plan.retry_seconds
    return scorer.endpoint(url, path, method, START_SECONDS if given is None else min(START_SECONDS, given))


async def _answer(scorer: HttpScorer, endpoint: Endpoint, body: Any) -> Any:
    """Return the server's answer as JSON, or None if the server does not have the path.

    Raises RunError if the server does not answer.
    """
    try:
        return await endpoint.ask(body, lambda found: found, Counter())
    except GaveUp as error:
        if error.kind in ("http_404", "http_405", "http_501"):
            return None
        raise RunError(f"teacher {scorer.name}: {error}") from None
