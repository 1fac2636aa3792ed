"""Teachers behind an HTTP server: `HttpScorer` requests log-probs of token ids, with one request for each sequence.

If a request fails or times out, it is repeated until the server answers. If `http.retry_seconds` is set, the run ends
after this time without an answer. Meanwhile the run waits, and a warning is logged each minute. If an answer
contradicts its request, the request is also repeated; after `BAD_ANSWERS` such answers, the run ends. Therefore an
update never uses a missing or wrong log-prob.

Once a minute, the fixed text of the fingerprint is scored with the other sequences. If a server then has another model,
the run ends. Answers are stored only after the next of these checks.

Legend: T tokens, P prompt tokens, K tokens of a top-k.
"""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from roll_opd.base.addresses import below, server_root
from roll_opd.base.failures import EndpointError, RunError, excerpt
from roll_opd.base.http_endpoint import Endpoint, GaveUp, RequestLimits
from roll_opd.config.plan import HttpPlan, RunPlan, TeacherPlan
from roll_opd.models.model_info import read_model
from roll_opd.samples.sample import TargetRef
from roll_opd.teachers.answer_cache import FINGERPRINT, AnswerCache, Fingerprint, request_key
from roll_opd.teachers.http_protocols import PROTOCOLS, BadAnswer, Question, Reply, TinkerEndpoint
from roll_opd.teachers.teacher_interface import LOGPROBS, Target, TeacherAnswer, TokenSequence, Wanted
from roll_opd.teachers.teacher_registry import TeacherStart, register_teacher
from roll_opd.workers.target_refs import hold, opened

STALLED = 60.0  # seconds without an answer before a warning
CHECKED = 60.0  # seconds after which the model of the server is checked again
# nats per token; if two scorings of one sequence differ by more than this on average, they are from different weights
# or precisions
AGREEMENT = 0.05
BAD_ANSWERS = 3  # bad answers to one request after which the run ends
REPLICA_SECONDS = 20.0  # after failing for this time, a request goes to another address of the server
ADVICE = {
    **dict.fromkeys(("http_401", "http_403"), "check the key in http.api_key_env"),
    **dict.fromkeys(
        ("http_404", "http_405"),
        "check that http.server is the kind of the server; in http.url write its address before the API's path, such"
        " as http://host:8000 (or with /v1)",
    ),
}
REFUSED = {  # kind of a server -> remedy if it refuses a request of this kind
    "vllm_tokens": "if this vLLM has no prompt_logprob_token_ids (model runner V1, CPUs), write http.server: vllm",
    "vllm": "check http.model_name and --max-logprobs of the server",
}
TINKER_PATHS = ("/oai/api/v1", "/api/v1")  # the service's API for OpenAI's clients, and its own

_log = logging.getLogger(__name__)


@register_teacher("http")
def http_scorer(start: TeacherStart) -> "HttpScorer":
    """Return the scorer of a teacher that is reached over HTTP. Raises RunError if the API key is missing."""
    source = start.teacher.source
    assert isinstance(source, HttpPlan)
    vocabulary = source.vocab_size or read_model(start.model).vocab
    cache = AnswerCache(start.answers / f"{start.name}.sqlite") if start.answers else None
    return HttpScorer(start.name, source, vocabulary, cache)


class HttpScorer:
    """A `TeacherScorer` for one server, or for several servers of the same model."""

    is_exact = False  # a server's load determines its batches, which determine the rounding

    def __init__(self, name: str, plan: HttpPlan, vocab_size: int, cache: AnswerCache | None = None) -> None:
        """Create the scorer and its clients. The API key is read from the environment.

        Raises RunError if the environment variable of the API key is not set.

        Args:
            name: the teacher's name.
            plan: settings of the servers.
            vocab_size: number of token ids that the teacher has.
            cache: on-disk cache of answers, used after a resume.
        """
        self.name, self.plan, self._cache = name, plan, cache
        self.protocol = PROTOCOLS[plan.server]
        self.targets: frozenset[Target] = self.protocol.targets
        self.model = plan.model_name or ""  # if empty, the checks at the start set it to the listed model
        self._counts: Counter[str] = Counter()  # since the last report
        self._vocab_size = vocab_size
        try:
            self._endpoints = [self._scoring_endpoint(url) for url in plan.url]
        except EndpointError as error:  # an address or a proxy that cannot be used
            raise RunError(f"teacher {name}: {error}") from None
        self._busy = [0] * len(self._endpoints)
        self._answered = self._checked = time.monotonic()
        self._fingerprint: Fingerprint | None = None
        self._fresh: dict[bytes, dict[str, np.ndarray]] = {}  # answers since the last check of the model

    async def check(self, plan: RunPlan, teacher: TeacherPlan) -> None:
        """Check the servers at the start of a run. Raises RunError for the first problem."""
        from roll_opd.teachers.http_checks import check_server  # which imports this module

        assert plan.rollout is not None
        objective, context = plan.objective, teacher.context
        target: Target | None = None
        if objective.opd_objective == "topk":
            target = "ids" if objective.opd_topk_source == "student" else "topk"
        topk = objective.opd_topk
        if teacher.prefix_topk:
            target, topk = "topk", teacher.prefix_topk
        new = plan.rollout.sampling.max_new_tokens
        longest = max(plan.rollout.max_model_len, context.prompt_length + new if context else 0)
        await check_server(self, Path(self.plan.tokenizer or plan.student.model.path), target, topk, longest)

    @property
    def last_failure(self) -> str:
        """The last failure of an address that fails; empty if none fails."""
        return next((one.last_failure for one in self._endpoints if one.is_failing), "")

    def identify(self, found: Fingerprint) -> None:
        """Compare the model of the server with the model of the stored answers, and remember the model.

        Raises RunError if it is another model.
        """
        stored = self._cache.read(FINGERPRINT) if self._cache else None
        if self._cache and stored:
            differs, tolerance = found.difference(Fingerprint.from_arrays(stored))
            if differs > tolerance:
                raise RunError(
                    f"teacher {self.name}: {self.plan.location} has another model than at the start of this run: the"
                    f" log-probs of a fixed text differ by {differs:.2g} nats per token, more than {tolerance:.2g};"
                    " start the server with the former model and precision, or, to train on with the present model,"
                    f" remove {self._cache.path}"
                )
        elif self._cache:
            self._cache.write({FINGERPRINT: found.arrays()})
        self._fingerprint, self._checked = found, time.monotonic()

    def endpoint(
        self, url: str, path: str, method: Literal["POST", "GET"] = "POST", retry_seconds: float | None = None
    ) -> Endpoint:
        """Return the client for a path on a server.

        Args:
            url: address of the server.
            path: path on the server.
            method: HTTP method of the requests.
            retry_seconds: time limit for retries. If None, the limit in the plan is used; with several servers, it is
                at most `REPLICA_SECONDS`.
        """
        key, (limits, gives_up) = self._api_key(), self._limits(retry_seconds)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        root, refused = server_root(url, self.protocol.path), REFUSED.get(self.plan.server)
        advice = ADVICE | dict.fromkeys(("http_400", "http_422", "http_501"), refused) if refused else ADVICE
        return Endpoint(below(root, path), headers, limits, advice, method=method, gives_up=gives_up)

    def _scoring_endpoint(self, url: str) -> Endpoint:
        if self.plan.server != "tinker":
            return self.endpoint(url, self.protocol.path)
        limits, gives_up = self._limits(None)
        return TinkerEndpoint(
            server_root(url, *TINKER_PATHS), self.model, self._api_key(), limits, ADVICE, gives_up=gives_up
        )

    def _limits(self, retry_seconds: float | None) -> tuple[RequestLimits, bool]:
        """Return (limits of requests, whether retries have a time limit)."""
        plan = self.plan
        given = [plan.retry_seconds, REPLICA_SECONDS if len(plan.url) > 1 else None]
        limit = min((one for one in given if one is not None), default=None) if retry_seconds is None else retry_seconds
        return RequestLimits(plan.request_seconds, limit or 0, plan.concurrency), limit is not None

    async def score(
        self, sequences: Sequence[TokenSequence], temperature: float, wanted: Wanted = LOGPROBS
    ) -> list[TeacherAnswer]:
        """Implement `TeacherScorer.score` with one request for each sequence."""
        self._check(sequences, temperature, wanted)
        ids = _given_ids(wanted)
        questions = [
            Question(tokens, length, wanted.topk or 0, ids[n] if ids else None)
            for n, (tokens, length) in enumerate(sequences)
        ]
        replies = await self._all_answers(questions, wanted.computed)
        return [_as_answer(*one, wanted) for one in zip(questions, replies, strict=True)]

    async def ask(self, question: Question, replica: int | None = None) -> Reply:
        """Return a server's answer to one question.

        Args:
            replica: index of the address to use. If None, the least busy address is used.
        """
        if not len(question.response):
            return _empty(question)
        body, bad = self.protocol.body(question, self.model), 0
        began = time.monotonic()
        while True:
            number = self._least_busy() if replica is None else replica
            self._busy[number] += 1
            repeated: Counter[str] = Counter()
            try:
                answer = await self._endpoints[number].ask(body, lambda found: found, repeated)
                reply = self.protocol.read(question, self._of_model(answer))
                self._answered = time.monotonic()
                return reply
            except BadAnswer as error:
                bad += 1
                self._counts["failed_requests"] += 1
                if bad >= BAD_ANSWERS:
                    url = self._endpoints[number].shown_url
                    raise RunError(
                        f"teacher {self.name}: {url} answered {bad} times with unusable values:"
                        f" {excerpt(str(error))}; check the model of the server, and check that http.server is the"
                        " kind of the server"
                    ) from None
            except GaveUp as error:
                limit = self.plan.retry_seconds
                over = limit is not None and time.monotonic() - began >= limit
                if over or replica is not None or len(self._endpoints) == 1 or not error.of_a_service:
                    raise RunError(f"teacher {self.name}: {error}") from None
            finally:
                self._busy[number] -= 1
                self._counts["failed_requests"] += repeated.total()
                self._counts["requests"] += 1 + repeated.total()
                self._counts["tokens_sent"] += (1 + repeated.total()) * len(question.tokens)

    def drain_metrics(self) -> dict[str, float]:
        """Return the counts of requests and tokens since the last call."""
        counts, self._counts = self._counts, Counter()
        return {
            f"opd/teacher/{self.name}/requests": float(counts["requests"]),
            f"opd/teacher/{self.name}/tokens_sent": float(counts["tokens_sent"]),
            f"opd/teacher/{self.name}/cached_tokens": float(counts["cached_tokens"]),
            f"opd/teacher/{self.name}/failed_requests": float(counts["failed_requests"]),
        }

    def end(self) -> None:
        """Store the last answers and close the cache. The connections close when the event loop closes."""
        self._store()
        if self._cache:
            self._cache.close()

    async def _all_answers(self, questions: Sequence[Question], computed: bool) -> list[Reply]:
        """Return the answers, from the cache or from the server. If one request fails, the others are cancelled.

        Args:
            computed: whether all answers come from the server.
        """
        keys = [request_key(one.tokens, one.ids, one.prompt_length, one.topk) for one in questions]
        found = {n: reply for n, key in enumerate(keys) if not computed and (reply := self._cached(key))}
        self._counts["cached_tokens"] += sum(len(questions[n].tokens) for n in found)
        missing = [n for n in range(len(questions)) if n not in found]
        self._answered = time.monotonic()
        tasks = [asyncio.ensure_future(self._kept(keys[n], questions[n])) for n in missing]
        check = asyncio.ensure_future(self._same_model())
        watch = asyncio.ensure_future(self._watched(len(missing)))
        try:
            replies, _ = await asyncio.gather(asyncio.gather(*tasks), check)
            found.update(zip(missing, replies, strict=True))
        finally:
            for task in (watch, check, *tasks):
                task.cancel()
        return [found[n] for n in range(len(questions))]

    async def _kept(self, key: bytes, question: Question) -> Reply:
        reply = await self.ask(question)
        if self._cache:
            self._fresh[key] = {name: value for name, value in vars(reply).items() if value is not None}
        return reply

    async def _same_model(self) -> None:
        """Score the fixed text again if the last check was some time ago. Raises RunError if the model has changed."""
        if self._fingerprint is None or time.monotonic() - self._checked < CHECKED:
            return
        self._checked = time.monotonic()
        tokens = self._fingerprint.tokens
        reply = await self.ask(Question(tokens, 1))
        differs, tolerance = self._fingerprint.difference(Fingerprint(tokens, reply.logprobs, 0.0))
        if differs > max(tolerance, AGREEMENT):  # a server under load rounds in more ways than at the start
            self._fresh = {}
            raise RunError(
                f"teacher {self.name}: {self.plan.location} has got another model during the run: the log-probs of a"
                f" fixed text differ by {differs:.2g} nats per token; start the server with the former model, and"
                " continue from the last checkpoint"
            )
        self._store()

    def _store(self) -> None:
        if self._cache and self._fresh:
            self._cache.write(self._fresh)
            self._fresh = {}

    async def _watched(self, requests: int) -> None:
        """Log a warning for each minute in which no request was answered."""
        while requests:
            await asyncio.sleep(STALLED)
            silent = time.monotonic() - self._answered
            if silent >= STALLED:
                _log.warning(
                    "teacher %s: no answer for %.0f s from %s; the run waits", self.name, silent, self.plan.location
                )

    def _cached(self, key: bytes) -> Reply | None:
        arrays = self._fresh.get(key) or (self._cache.read(key) if self._cache else None)
        return Reply(**arrays) if arrays else None

    def _least_busy(self) -> int:
        return min(range(len(self._busy)), key=lambda n: (self._endpoints[n].is_failing, self._busy[n]))

    def _of_model(self, answer: Any) -> Any:
        """Return `answer`. Raises BadAnswer if the answer names another model than the request."""
        named = answer.get("model") if isinstance(answer, dict) else None
        if self.model and isinstance(named, str) and named != self.model:
            raise BadAnswer(f"the answer is from model {named!r}, not {self.model!r}")
        return answer

    def _check(self, sequences: Sequence[TokenSequence], temperature: float, wanted: Wanted) -> None:
        if temperature != 1:
            raise RunError(
                f"teacher {self.name}: servers return log-probs at temperature 1, not {temperature:g}; set"
                " generating_args.temperature: 1.0"
            )
        if wanted.target and wanted.target not in self.targets:
            raise RunError(
                f"teacher {self.name}: a server of kind {self.plan.server} cannot return {wanted.target}; use"
                " opd_objective: sampled, or a server of another kind (http.server)"
            )
        largest = max((int(tokens.max()) for tokens, _ in sequences), default=0)
        if largest >= self._vocab_size:
            raise RunError(
                f"token {largest} is outside {self.name}'s vocabulary of {self._vocab_size} tokens; use a teacher with"
                " the same vocabulary"
            )

    def _api_key(self) -> str:
        variable = self.plan.api_key_env
        if variable is None:
            return ""
        key = os.environ.get(variable, "").strip()
        if not key:
            raise RunError(f"{self.plan.name}.http.api_key_env: the environment variable {variable} is not set here")
        return key


def _given_ids(wanted: Wanted) -> list[np.ndarray]:
    """Return the arrays to which `wanted.ids` refers."""
    if not wanted.ids:
        return []
    held = opened([{"ids": one} for one in wanted.ids], [range(len(wanted.ids))])
    return [arrays["ids"]["topk_ids"] for arrays in held]


def _as_answer(question: Question, reply: Reply, wanted: Wanted) -> TeacherAnswer:
    """Return the log-probs and targets of a reply, in the form that `wanted` requests."""
    if reply.topk_ids is None or reply.topk_logprobs is None:
        return TeacherAnswer(reply.logprobs)
    if wanted.vocab_size and reply.topk_ids.size and int(reply.topk_ids.max()) >= wanted.vocab_size:
        raise RunError(
            f"the teacher's top-k has token {int(reply.topk_ids.max())}, but the student has only {wanted.vocab_size}"
            " token ids; use opd_topk_source: student"
        )
    arrays = {
        "topk_ids": reply.topk_ids,
        "topk_logprobs": reply.topk_logprobs,
        "topk_rest": rest_logprobs(reply.topk_logprobs),
        **({"plain_logprobs": reply.topk_logprobs} if wanted.plain else {}),
    }
    if wanted.fetched:
        return TeacherAnswer(reply.logprobs, arrays={"logprobs": reply.logprobs, **arrays})
    hits = (reply.topk_ids == question.response[:, None]).any(1)
    held: TargetRef = hold({0: arrays})[0]
    return TeacherAnswer(reply.logprobs, TargetRef(held.bundle, held.place, held.columns, hits))


def rest_logprobs(topk_logprobs: np.ndarray) -> np.ndarray:
    """Return the log-prob of all tokens outside the top-k together, f32 [N].

    Args:
        topk_logprobs: f32 [N, K], log-probs of K distinct tokens.
    """
    inside = np.exp(topk_logprobs.astype(np.float64)).sum(-1)
    smallest = np.finfo(np.float32).eps  # rounding can make the sum slightly larger than 1
    return np.log(np.maximum(1 - inside, smallest)).astype(np.float32)


def _empty(question: Question) -> Reply:
    """Return the reply for a sequence without response tokens."""
    width = question.topk if question.ids is None else question.ids.shape[1]
    none = np.zeros((0, width), np.float32)
    return Reply(none[:, 0] if width else np.zeros(0, np.float32), none.astype(np.int32), none)
