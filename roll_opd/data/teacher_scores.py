"""A teacher's scores of one answer in a teacher file, and checks that the scores are consistent.

Legend: P prompt tokens, R response tokens, K tokens of a top-k. Entry t of an array belongs to response token t.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

REST_FLOOR = 1e-8  # smallest probability of the tokens outside a top-k, if there is no `topk_rest`
PLACEHOLDER = -1e3  # lower than any log-prob of a softmax; formats write such values as placeholders
FEWEST_POSITIONS = 4  # number of positions that decide whether a top-k is renormalised
# a softmax gives the tokens outside the top-k at least 1 / SHARE_OF_LAST of the smallest probability in the top-k
SHARE_OF_LAST = 100


@dataclass(frozen=True)
class TeacherScores:
    """The scores of one answer. An array that is not in the file is None."""

    prompt_ids: np.ndarray  # int64 [P]
    response_ids: np.ndarray  # int64 [R]
    logprobs: np.ndarray | None = None  # f32 [R], log-probs of the response tokens
    topk_ids: np.ndarray | None = None  # int32 [R, K]
    topk_logprobs: np.ndarray | None = None  # f32 [R, K], log-probs of the top-k, not renormalised
    topk_rest: np.ndarray | None = None  # f32 [R], log-prob of all other tokens together
    mask: np.ndarray | None = None  # bool [R], true for tokens in the loss; None: all
    teacher: str = ""
    tokenizer: str = ""  # fingerprint of the tokenizer; empty: unknown
    temperature: float = 1.0  # divisor of the logits
    error: float = 1e-6  # relative error of probabilities: 1e-6 for f32, 1e-3 for f16, 0.02 for quantised values


@dataclass(frozen=True)
class Expected:
    """The values that a run expects in every row."""

    vocab_size: int  # token ids of the student
    tokenizer: str = ""  # fingerprint of the student's tokenizer; empty: unknown
    temperature: float = 1.0
    teacher: str = ""  # name of the teacher; empty: any
    topk: int | None = None  # size of the top-k that the objective reads; None: it reads the log-probs of the response


def problem(scores: TeacherScores, expected: Expected) -> str | None:
    """Return a sentence about the first inconsistency in a row, or None if the row is consistent."""
    with np.errstate(over="ignore", invalid="ignore"):
        return next(_problems(scores, expected), None)


def with_rest(scores: TeacherScores) -> np.ndarray | None:
    """Return the log-prob of all tokens outside the top-k together, f32 [R], or None without a top-k.

    This is `topk_rest` if the file has it. Otherwise it is computed as log(1 - Σp), where Σp is the sum of the top-k
    probabilities. The smallest computed value is log(`REST_FLOOR`).
    """
    if scores.topk_logprobs is None or scores.topk_rest is not None:
        return scores.topk_rest
    mass = np.exp(scores.topk_logprobs.astype(np.float64)).sum(1)
    return np.log(np.maximum(1 - mass, REST_FLOOR)).astype(np.float32)


def narrowed(scores: TeacherScores, k: int) -> dict[str, np.ndarray]:
    """Return the `k` most likely tokens of a checked row, as a dict: `topk_ids`, `topk_logprobs` and `topk_rest`."""
    ids, logprobs, rest = scores.topk_ids, scores.topk_logprobs, with_rest(scores)
    assert ids is not None and logprobs is not None and rest is not None
    if ids.shape[1] > k:
        order = np.argsort(-logprobs, axis=1, kind="stable")
        sorted_f64 = np.take_along_axis(logprobs, order, 1).astype(np.float64)
        dropped = np.exp(sorted_f64[:, k:]).sum(1) + np.exp(rest.astype(np.float64))
        ids, logprobs = np.take_along_axis(ids, order, 1)[:, :k], sorted_f64[:, :k]
        rest = np.log(np.maximum(dropped, REST_FLOOR))
    return {
        "topk_ids": ids.astype(np.int32),
        "topk_logprobs": logprobs.astype(np.float32),
        "topk_rest": rest.astype(np.float32),
    }


def _problems(scores: TeacherScores, expected: Expected) -> Iterator[str]:
    yield from _wrong_origin(scores, expected)
    yield from _wrong_lengths(scores, expected)
    yield from _wrong_ids(scores, expected.vocab_size)
    for name in ("logprobs", "topk_logprobs", "topk_rest"):
        values = getattr(scores, name)
        if values is not None:
            yield from _not_logprobs(f"teacher_{name}", values, scores.error)
    if scores.topk_logprobs is not None:
        yield from _wrong_topk(scores)


def _wrong_origin(scores: TeacherScores, expected: Expected) -> Iterator[str]:
    if expected.tokenizer and scores.tokenizer and scores.tokenizer != expected.tokenizer:
        yield f"it was scored with the tokenizer {scores.tokenizer}, but the student's is {expected.tokenizer}"
    if abs(scores.temperature - expected.temperature) > 1e-6:
        yield f"it was scored at temperature {scores.temperature:g}, but the run samples at {expected.temperature:g}"
    if expected.teacher and scores.teacher != expected.teacher:
        yield f"its teacher is {scores.teacher!r}, but teacher.name is {expected.teacher!r}"


def _wrong_lengths(scores: TeacherScores, expected: Expected) -> Iterator[str]:
    tokens = len(scores.response_ids)
    if not len(scores.prompt_ids) or not tokens:
        yield f"it has {len(scores.prompt_ids)} prompt and {tokens} response tokens; it needs at least one of each"
    arrays = (scores.logprobs, scores.topk_ids, scores.topk_logprobs, scores.topk_rest, scores.mask)
    names = ("teacher_logprobs", "teacher_topk_ids", "teacher_topk_logprobs", "teacher_topk_rest", "loss_mask")
    for name, values in zip(names, arrays, strict=True):
        if values is not None and len(values) != tokens:
            yield f"{len(values)} entries of {name} for {tokens} response tokens"
    if (scores.topk_ids is None) != (scores.topk_logprobs is None):
        yield "teacher_topk_ids and teacher_topk_logprobs must both be present, but one is missing"
    if scores.topk_ids is not None and scores.topk_logprobs is not None:
        shapes = scores.topk_ids.shape, scores.topk_logprobs.shape
        if shapes[0] != shapes[1] or len(shapes[0]) != 2 or not shapes[0][1]:
            yield f"teacher_topk_ids has shape {shapes[0]}, teacher_topk_logprobs {shapes[1]}"
    if expected.topk and scores.topk_ids is None:
        yield "it has no top-k, which opd_objective: topk needs; use opd_objective: sampled, or score with --topk"
    if expected.topk and scores.topk_ids is not None and scores.topk_ids.shape[-1] < expected.topk:
        yield f"its top-k has {scores.topk_ids.shape[-1]} tokens, but opd_topk is {expected.topk}"
    if not expected.topk and scores.logprobs is None:
        yield "it has no teacher_logprobs, which opd_objective: sampled needs; use opd_objective: topk"


def _wrong_ids(scores: TeacherScores, vocab_size: int) -> Iterator[str]:
    arrays = {"prompt id": scores.prompt_ids, "response id": scores.response_ids, "top-k id": scores.topk_ids}
    for name, ids in arrays.items():
        if ids is None or not ids.size:
            continue
        worst = int(ids.min()) if ids.min() < 0 else int(ids.max())
        if not 0 <= worst < vocab_size:
            yield f"{name} {worst} is outside the student's vocabulary of {vocab_size}"


def _not_logprobs(name: str, values: np.ndarray, error: float) -> Iterator[str]:
    """Yield a sentence for each kind of value that cannot be a log-prob.

    Values of `topk_rest` have no lower bound, but they must be finite.
    """
    flat = values.reshape(len(values), -1)
    wrong = {
        "is not finite: an overflow of f16, or not computed": ~np.isfinite(flat),
        "is a placeholder instead of a log-prob": flat <= (-np.inf if name.endswith("rest") else PLACEHOLDER),
        "is positive: a logit or a probability": flat > 10 * error,
    }
    if name.endswith("rest"):
        wrong["is not finite: an overflow of f16, or not computed"] = np.isnan(flat) | (flat == np.inf)
    for meaning, found in wrong.items():
        if found.any():
            token, place = np.argwhere(found)[0]
            yield f"{name} {flat[token, place]:g} at response token {token} {meaning}"


def _wrong_topk(scores: TeacherScores) -> Iterator[str]:
    assert scores.topk_ids is not None and scores.topk_logprobs is not None
    ids, logprobs = scores.topk_ids, scores.topk_logprobs.astype(np.float64)
    ordered = np.sort(ids, axis=1)
    if (repeated := (ordered[:, 1:] == ordered[:, :-1]).any(1)).any():
        yield f"a token is twice in the top-k of response token {int(np.argmax(repeated))}"
    mass, last = np.exp(logprobs).sum(1), np.exp(logprobs.min(1))
    tolerance = max(1e-3, 5 * scores.error)
    if (over := mass > 1 + tolerance).any():
        token = int(np.argmax(over))
        yield f"the top-k of response token {token} has the probability {mass[token]:.4f}"
    if scores.topk_rest is not None:
        whole = mass + np.exp(scores.topk_rest.astype(np.float64))
        if (wrong := np.abs(whole - 1) > tolerance).any():
            token = int(np.argmax(wrong))
            yield (
                f"top-k and teacher_topk_rest of response token {token} sum to {whole[token]:.4f}: the top-k is"
                " renormalised, or comes from another computation"
            )
    elif _is_renormalised(mass, last, scores.error):
        yield (
            "its top-k is renormalised: the probabilities sum to 1 at every token, although the least likely of them"
            " is far above 0; write the log-probs over the whole vocabulary"
        )
    if scores.logprobs is not None:
        yield from _contradictions(scores, tolerance)


def _is_renormalised(mass: np.ndarray, last: np.ndarray, error: float) -> bool:
    """Whether the top-k is renormalised: its probabilities sum to 1, although other tokens must have some probability.

    The least likely token of the top-k has the probability `last`. The many tokens outside the top-k are assumed to
    have at least `last` / `SHARE_OF_LAST` in total. Positions where this bound is below the precision `error` are
    ignored.
    """
    decides = last / SHARE_OF_LAST > error
    return int(decides.sum()) >= FEWEST_POSITIONS and bool((np.abs(1 - mass) <= error * 2)[decides].all())


def _contradictions(scores: TeacherScores, tolerance: float) -> Iterator[str]:
    """Yield a sentence if the log-prob of a response token contradicts the top-k."""
    assert scores.logprobs is not None and scores.topk_ids is not None and scores.topk_logprobs is not None
    hit = scores.topk_ids == scores.response_ids[:, None]
    own = scores.logprobs.astype(np.float64)
    inside = np.where(hit, scores.topk_logprobs, 0).sum(1)
    # proportional to the log-prob, as rounding errors in f16 are
    limit = 2 * tolerance * np.maximum(1, np.abs(own))
    differs = np.where(hit.any(1), np.abs(inside - own) > limit, own > scores.topk_logprobs.min(1) + limit)
    if differs.any():
        token = int(np.argmax(differs))
        missing = "above the lowest log-prob of its top-k, which does not contain the token"
        there = f"{inside[token]:.4f} in its top-k" if hit[token].any() else missing
        yield (
            f"the log-prob of response token {token} is {own[token]:.4f}, but {there}: one of the two is shifted,"
            " renormalised or at another temperature"
        )
