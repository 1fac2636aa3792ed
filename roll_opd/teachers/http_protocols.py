"""Protocols of servers that return log-probs of given tokens: how to build a request's body and read an answer.

All log-probs are at temperature 1. An answer must match its request: it must be from the same model and have the same
number of tokens. If the server returns the tokens, they must be the same too. Log-probs must be finite and at most 0.

Tinker's service has its own client, the package `tinker`, version 0.38.0, with its own HTTP connections, session and
retries. As for other servers, `Endpoint` limits the duration and the number of requests, and repeats failed requests.

Legend: T tokens, P prompt tokens, K tokens of a top-k. Entry t of a [T-P] array belongs to token P+t.
"""

import asyncio
import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from roll_opd.base.failures import RunError, is_passing
from roll_opd.base.http_endpoint import Answer, AttemptFailed, Endpoint, RequestLimits
from roll_opd.base.installed import is_installed
from roll_opd.teachers.teacher_interface import Target

SMALLEST = -9990.0  # vLLM writes -9999 for a log-prob of -inf
ROUNDING = 1e-3  # the log-prob of probability 1 may be slightly above 0
WHOLE_VOCABULARY = -1  # vLLM's `prompt_logprobs` for all token ids


class BadAnswer(ValueError):
    """The answer of a server contradicts its request or has unusable values."""


@dataclass(frozen=True)
class Question:
    """A sequence whose log-probs are requested, and the requested targets of each response token."""

    tokens: np.ndarray  # int64 [T]
    prompt_length: int
    topk: int = 0  # number of the server's most likely tokens to return
    ids: np.ndarray | None = None  # int [T-P, K], tokens whose log-probs are requested

    @property
    def response(self) -> np.ndarray:
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True)
class Reply:
    """The values that were read from an answer."""

    logprobs: np.ndarray  # f32 [T-P]
    topk_ids: np.ndarray | None = None  # int32 [T-P, K], token ids of the top-k, or the requested `ids`
    topk_logprobs: np.ndarray | None = None  # f32 [T-P, K]


class HttpProtocol(Protocol):
    """How requests for log-probs are written for a server, and how its answers are read."""

    path: str  # path of requests, below the server's address
    listing: str  # path at which models are listed; empty: the server has no such list
    targets: frozenset[Target]

    def body(self, question: Question, model: str) -> dict[str, Any]:
        """Return the body of a request."""

    def read(self, question: Question, answer: Any) -> Reply:
        """Return the values of an answer. Raises BadAnswer if the answer contradicts the question."""


class VllmCompletions:
    """vLLM's /v1/completions with `prompt_logprobs`.

    For log-probs of given ids, the whole vocabulary must be requested, so the server needs `--max-logprobs -1`.
    """

    path, listing = "/v1/completions", "/v1/models"
    targets: frozenset[Target] = frozenset({"topk", "ids"})

    def body(self, question: Question, model: str) -> dict[str, Any]:
        most = WHOLE_VOCABULARY if question.ids is not None else question.topk
        return {"model": model, "prompt": question.tokens.tolist(), "max_tokens": 1, "prompt_logprobs": most}

    def read(self, question: Question, answer: Any) -> Reply:
        rows = _field(answer, "choices", 0, "prompt_logprobs")
        return _from_rows(question, _last_rows(rows, question))


class VllmTokens:
    """vLLM's /inference/v1/generate with `prompt_logprob_token_ids`.

    The server returns the log-probs as one array [T-P, 1+K]. Column 0 is for the tokens of the sequence, and the other
    columns are for the given ids.
    """

    path, listing = "/inference/v1/generate", "/v1/models"
    targets: frozenset[Target] = frozenset({"topk", "ids"})

    def body(self, question: Question, model: str) -> dict[str, Any]:
        own = question.response[:, None]
        rows = own if question.ids is None else np.concatenate([own, question.ids], 1)
        sampling: dict[str, Any] = {
            "max_tokens": 1,
            "prompt_logprob_token_ids": rows.tolist(),
            "prompt_logprob_start": question.prompt_length - 1,
        }
        if question.topk:
            sampling["prompt_logprobs"] = question.topk
        return {"model": model, "token_ids": question.tokens.tolist(), "sampling_params": sampling}

    def read(self, question: Question, answer: Any) -> Reply:
        text = _field(answer, "prompt_token_id_logprobs")
        try:
            array = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
        except (TypeError, ValueError, EOFError) as error:
            raise BadAnswer(f"prompt_token_id_logprobs is not an array: {error}") from None
        width = 1 + (0 if question.ids is None else question.ids.shape[1])
        if array.shape != (len(question.response), width):
            raise BadAnswer(f"log-probs of shape {array.shape} instead of {(len(question.response), width)}")
        logprobs = _checked(array[:, 0])
        if question.ids is not None:
            return Reply(logprobs, question.ids.astype(np.int32), _checked(array[:, 1:]))
        if not question.topk:
            return Reply(logprobs)
        found = _from_rows(question, _last_rows(_field(answer, "prompt_logprobs"), question))
        return Reply(logprobs, found.topk_ids, found.topk_logprobs)


class Sglang:
    """SGLang's /generate with `return_logprob`.

    If the tokens have different lists of given ids, the request has the union of these lists. The temperature in a
    request applies to generated tokens and not to log-probs of given tokens. In the answer, `input_token_logprobs` has
    the id 0 instead of the last id of the model's vocabulary.
    """

    path, listing = "/generate", "/v1/models"
    targets: frozenset[Target] = frozenset({"topk", "ids"})

    def body(self, question: Question, model: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "input_ids": question.tokens.tolist(),
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": question.prompt_length - 1,
            "top_logprobs_num": question.topk,
        }
        if question.ids is not None:
            body["token_ids_logprob"] = np.unique(question.ids).tolist()
        return body

    def read(self, question: Question, answer: Any) -> Reply:
        logprobs, ids = _triples(_last_rows(_field(answer, "meta_info", "input_token_logprobs"), question))
        last = question.tokens.max()
        ids = np.where((np.array(ids) == 0) & (question.response == last), last, ids).tolist()
        _same_tokens(question, ids)
        if question.ids is not None:
            rows = _last_rows(_field(answer, "meta_info", "input_token_ids_logprobs"), question)
            found = [dict(zip(*reversed(_triples(row)), strict=True)) for row in rows]
            try:
                values = [[row[int(one)] for one in wanted] for row, wanted in zip(found, question.ids, strict=True)]
            except KeyError as error:
                raise BadAnswer(f"no log-prob of token {error}, which was requested") from None
            return Reply(_checked(logprobs), question.ids.astype(np.int32), _checked(values))
        if not question.topk:
            return Reply(_checked(logprobs))
        rows = _last_rows(_field(answer, "meta_info", "input_top_logprobs"), question)
        pairs = [_triples(row) for row in rows]
        if any(len(values) != question.topk for values, _ in pairs):
            raise BadAnswer(f"input_top_logprobs does not have {question.topk} tokens at each position")
        top = np.array([ids for _, ids in pairs], np.int32), _checked([values for values, _ in pairs])
        return Reply(_checked(logprobs), *top)


class OpenaiEcho:
    """Completions with `echo` (Together, Fireworks). They return the log-probs of the sequence's tokens.

    In a top-k, these servers return texts of tokens instead of ids. Several ids can have the same text, so targets are
    not supported.
    """

    path, listing = "/v1/completions", "/v1/models"
    targets: frozenset[Target] = frozenset()

    def body(self, question: Question, model: str) -> dict[str, Any]:
        prompt = question.tokens.tolist()
        return {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 1.0, "echo": True, "logprobs": 1}

    def read(self, question: Question, answer: Any) -> Reply:
        # Together AI returns the prompt's log-probs separately from the completion's
        kind = "prompt" if isinstance(answer, dict) and answer.get("prompt") else "choices"
        found = _field(answer, kind, 0, "logprobs")
        if isinstance(found.get("content") if isinstance(found, dict) else None, list):
            values = [_field(entry, "logprob") for entry in found["content"]]
            ids = [entry.get("token_id") for entry in found["content"]]
        else:
            values, ids = _field(found, "token_logprobs"), found.get("token_ids") or []
        total = len(question.tokens)
        if not isinstance(values, list) or not total <= len(values) <= total + 1:
            raise BadAnswer(f"log-probs of {len(values)} tokens instead of {total}; does the server echo the prompt?")
        if len(ids) >= total and None not in ids[:total]:
            _same_tokens(question, ids[question.prompt_length : total])
        return Reply(_checked(values[question.prompt_length : total]))


class Tinker:
    """Requests of the package `tinker`, version 0.38.0: the arguments and arrays of its SamplingClient.

    Only the response is scored (`prompt_logprobs_last_n`), so that the service can take the prompt from its cache. In
    `prompt_logprobs` and in the top-k, the entries before the response are NaN or fill values.
    """

    path, listing = "", ""
    targets: frozenset[Target] = frozenset({"topk", "ids"})

    def body(self, question: Question, model: str) -> dict[str, Any]:
        body = {"prompt": question.tokens.tolist(), "last": len(question.response), "topk": question.topk}
        if question.ids is not None:
            unscored = np.full((question.prompt_length - 1, question.ids.shape[1]), -1)
            body["ids"] = np.concatenate([unscored, question.ids]).tolist()  # a row for each token except the first
        return body

    def read(self, question: Question, answer: Any) -> Reply:
        logprobs = _checked(_tail(answer, "prompt_logprobs", question))
        if question.ids is not None:
            return Reply(logprobs, question.ids.astype(np.int32), _checked(_tail(answer, "ids_logprobs", question)))
        if not question.topk:
            return Reply(logprobs)
        ids, values = (_tail(answer, f"topk_{kind}", question) for kind in ("ids", "logprobs"))
        if values.shape[1] != question.topk:
            raise BadAnswer(f"a token has {values.shape[1]} most likely tokens instead of {question.topk}")
        return Reply(logprobs, ids.astype(np.int32), _checked(values))


PROTOCOLS: Mapping[Literal["vllm", "vllm_tokens", "sglang", "openai", "tinker"], HttpProtocol] = {
    "vllm": VllmCompletions(),
    "vllm_tokens": VllmTokens(),
    "sglang": Sglang(),
    "openai": OpenaiEcho(),
    "tinker": Tinker(),
}


def _field(answer: Any, *path: str | int) -> Any:
    """Return the value at a path inside a JSON value. Raises BadAnswer if the value is missing."""
    value = answer
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            raise BadAnswer(f"the answer has no {'.'.join(map(str, path))}") from None
    if value is None:
        raise BadAnswer(f"{'.'.join(map(str, path))} of the answer is null")
    return value


def _last_rows(rows: Any, question: Question) -> list[Any]:
    """Return the rows of the response tokens.

    The last row belongs to the last token of the sequence. The first row may belong to a token of the prompt.
    """
    length, total = len(question.response), len(question.tokens)
    if not isinstance(rows, list) or not length <= len(rows) <= total:
        count = len(rows) if isinstance(rows, list) else "no"
        raise BadAnswer(f"the answer has log-probs of {count} tokens instead of {length} to {total} tokens")
    return rows[len(rows) - length :]


def _tail(answer: Any, name: str, question: Question) -> np.ndarray:
    """Return the rows of the response tokens from an array of the answer.

    The array has a row for each token of the sequence, or for each token except the first one.
    """
    array, total = np.asarray(_field(answer, name)), len(question.tokens)
    if not array.ndim or not total - 1 <= len(array) <= total:
        raise BadAnswer(f"{name} has shape {array.shape} instead of {total} rows")
    return array[len(array) - len(question.response) :]


def _from_rows(question: Question, rows: Sequence[Any]) -> Reply:
    """Return the values of vLLM's `prompt_logprobs`.

    For each token, `prompt_logprobs` has a map {id: {logprob, rank}}.
    """
    try:
        found = [{int(key): (item["logprob"], item.get("rank")) for key, item in row.items()} for row in rows]
        own = [row[int(token)][0] for row, token in zip(found, question.response, strict=True)]
        if question.ids is not None:
            values = [[row[int(one)][0] for one in wanted] for row, wanted in zip(found, question.ids, strict=True)]
            return Reply(_checked(own), question.ids.astype(np.int32), _checked(values))
    except KeyError as error:
        raise BadAnswer(f"no log-prob of token {error}: the server scored different tokens") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise BadAnswer(f"prompt_logprobs does not map token ids to log-probs: {error}") from None
    if not question.topk:
        return Reply(_checked(own))
    best = [sorted(row, key=lambda one, row=row: -row[one][0])[: question.topk] for row in found]  # type: ignore[misc]
    if any(len(ids) < question.topk for ids in best):
        raise BadAnswer(f"a token has fewer than {question.topk} most likely tokens")
    values = [[row[one][0] for one in ids] for row, ids in zip(found, best, strict=True)]
    return Reply(_checked(own), np.array(best, np.int32), _checked(values))


def _triples(rows: Any) -> tuple[list[Any], list[int]]:
    """Return (log-probs, ids) from SGLang's entries [log-prob, id, text]."""
    try:
        return [row[0] for row in rows], [int(row[1]) for row in rows]
    except (TypeError, ValueError, IndexError) as error:
        raise BadAnswer(f"entries are not [log-prob, id, text]: {error}") from None


def _same_tokens(question: Question, ids: Sequence[int]) -> None:
    if not np.array_equal(np.asarray(ids), question.response):
        raise BadAnswer("the server returned log-probs of tokens that were not requested")


def _checked(values: Any) -> np.ndarray:
    """Return log-probs as f32. Raises BadAnswer for a value that is missing, not finite, or above 0."""
    try:
        array = np.array(values, np.float64)
    except (TypeError, ValueError):
        raise BadAnswer("log-probs are not numbers, or rows of log-probs differ in length") from None
    if not (np.isfinite(array) & (array > SMALLEST) & (array < ROUNDING)).all():
        raise BadAnswer("a log-prob is missing, not finite, or above 0")
    return array.astype(np.float32)


WEIGHTS = "tinker://"  # prefix of paths of saved weights; other names are base models


class TinkerEndpoint(Endpoint):
    """An `Endpoint` that sends the request bodies of `http_protocols.Tinker` and returns the answers."""

    def __init__(
        self,
        url: str,
        model: str,
        key: str,
        limits: RequestLimits,
        advice: Mapping[str, str],
        *,
        gives_up: bool = True,
    ) -> None:
        """Create the endpoint. Raises RunError if the package `tinker` is not installed.

        Args:
            model: name of a base model, or path of saved weights, such as tinker://RUN/sampler_weights/NAME.
            key: the API key. If it is empty, the package reads the key from the environment variable TINKER_API_KEY.
        """
        if not is_installed("tinker"):
            raise RunError("http.server: tinker requires the package tinker; run pip install tinker")
        super().__init__(url, {"X-API-Key": key} if key else {}, limits, advice, gives_up=gives_up)
        self._model, self._key = model, key
        self._sampler: Any = None
        self._starting: asyncio.Future[Any] | None = None

    def _connect(self) -> None:
        self._starting = None  # a future of another event loop

    async def _exchange(self, content: bytes, read: Callable[[Any], Answer]) -> Answer:
        """Implement `Endpoint._exchange` with a request of Tinker's SamplingClient."""
        try:
            async with asyncio.timeout(self._limits.request_seconds):
                return read(await _sampled(await self._started(), json.loads(content)))
        except TimeoutError:
            raise AttemptFailed("timeout", f"no response in {self._limits.request_seconds:g} s") from None
        except Exception as error:  # the package raises errors of many kinds
            kind, again = _kind(error)
            raise AttemptFailed(kind, self._excerpt(f"{type(error).__name__} {error}"), again) from None

    async def _started(self) -> Any:
        """Return the `SamplingClient`. The first call starts a session with the service."""
        if self._sampler is None:
            if self._starting is None or self._starting.done():
                self._starting = asyncio.ensure_future(asyncio.to_thread(self._start))
            self._sampler = await asyncio.shield(self._starting)
        return self._sampler

    def _start(self) -> Any:
        import tinker

        service = tinker.ServiceClient(base_url=str(self._url), api_key=self._key or None)
        kind = "model_path" if self._model.startswith(WEIGHTS) else "base_model"
        return service.create_sampling_client(**{kind: self._model}).result()


async def _sampled(sampler: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Send a request and return the arrays of the answer."""
    from tinker import types

    ids = None if "ids" not in body else types.TensorData.from_numpy(np.array(body["ids"], np.int64))
    answer = await sampler.sample(
        prompt=types.ModelInput.from_ints(body["prompt"]),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=body["topk"],
        target_prompt_logprobs=ids,
        prompt_logprobs_last_n=body["last"],
    )
    topk, given = answer.topk_prompt_logprobs_np, answer.target_prompt_logprobs
    return {
        "prompt_logprobs": answer.prompt_logprobs_np,
        "topk_ids": topk and topk.token_ids,
        "topk_logprobs": topk and topk.logprobs,
        "ids_logprobs": given and given.to_numpy(),
    }


def _kind(error: Exception) -> tuple[str, bool]:
    """Return (kind of a failure, whether another attempt may succeed)."""
    import tinker

    if isinstance(error, tinker.APIStatusError):
        status = error.status_code
        return f"http_{status}", status == 409 or is_passing(status)
    if isinstance(error, tinker.APIConnectionError):
        return "connect", True
    if isinstance(error, tinker.RequestFailedError):
        refused = error.category is tinker.types.RequestErrorCategory.User
        return ("refused", False) if refused else ("failed", True)
    return "tinker", False  # a request that the package refuses, or an answer that it cannot read
