"""An HTTP server of the policy, in the process of the runs that it answers: a session is a run.

Its answers are `ModelWrapper.answer`'s, so that what a client is told is what the run's tree of calls has. It starts
when a run first asks for its address, or with the process where it has a port of its own.
"""

import asyncio
import contextvars
import json
import logging
import secrets
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from jinja2 import TemplateError

from roll_opd.base.thoughts import after_thoughts, opens_a_thought
from roll_opd.inference.tool_calls import ToolCallParser
from roll_opd.workflows.call_tree import Call, without_end, without_special, written
from roll_opd.workflows.endpoint.chat import Answer, ChatRequest, Refusal, as_message, completion, read_request, stream
from roll_opd.workflows.model import RUN, ModelWrapper, RunState
from roll_opd.workflows.workflow_errors import NoRoomError, WorkflowError
from roll_opd.workflows.workflow_experience import Experience

MOST_BODY = 8 << 20  # bytes of a request
MARK_TOKENS = 32  # at the end of a prompt, searched for an opened thought
MOST_UNDER_WAY = 1024  # requests; what comes beyond is told to come again
READ_SECONDS = 60  # that a request's body may take
ALIVE_SECONDS = 10  # between signs of life of a stream that has nothing to say yet
CLOSED_KEPT = 20_000  # keys and ids of sessions that have ended, and are still told from those that never were
ABANDONED = "abandoned"  # counted beside statuses of HTTP: who asked was gone before the answer
SESSION_HEADER = "X-Session-Id"

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Answered = list[tuple[Experience, Call]]


class _StreamedError(Exception):
    """What went wrong has been said in a stream."""

    def __init__(self, response: web.StreamResponse) -> None:
        """`response` is the stream, which is to be ended."""
        self.response = response


@dataclass(eq=False)
class Session:
    """What a run's clients need to know."""

    run: RunState
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    key: str = field(default_factory=lambda: f"sk-{secrets.token_hex(24)}")
    under_way: set[asyncio.Task] = field(default_factory=set)


class Endpoint:
    """The server of one process. Sessions are told apart by their key, or with the server's key by URL or header."""

    def __init__(
        self,
        model: ModelWrapper,
        loop: asyncio.AbstractEventLoop,
        parse: ToolCallParser,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        key: str | None = None,
    ) -> None:
        """`parse` finds tool calls in a response; port 0 is any; without `key` only sessions' own are taken."""
        self.counts: Counter[str] = Counter()  # requests by status, and the abandoned
        self._model, self._loop, self._host, self._port, self._key = model, loop, host, port, key
        self._parse = parse
        self._by_key: dict[str, Session] = {}
        self._by_id: dict[str, Session] = {}
        self._of_run: dict[int, Session] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()  # keys and ids
        self._under_way = 0
        self._address: str | None = None
        self._starting = threading.Lock()
        self._tasks: set[asyncio.Task] = set()

    @property
    def address(self) -> str:
        """Its URL, without the `/v1`. It is started where it has not been. WorkflowError where its port is taken."""
        with self._starting:
            if self._address is None:
                family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
                try:
                    listening = socket.create_server((self._host, self._port), family=family, backlog=1024)
                except OSError as error:
                    raise WorkflowError(
                        f"the endpoint cannot listen on {self._host}, port {self._port}: {error}; give another"
                        " endpoint_host or endpoint_port"
                    ) from error
                host, port = listening.getsockname()[:2]
                reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
                self._address = f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"
                # in a context of its own: the server outlives the run that asks first
                self._loop.call_soon_threadsafe(self._begin, listening, context=contextvars.Context())
            return self._address

    def session(self, run: RunState) -> Session:
        """Return a run's session; the first time it is opened."""
        with self._starting:
            if run.ended:
                raise RuntimeError("the run has ended, and its session with it")
            if id(run) not in self._of_run:
                session = Session(run)
                self._of_run[id(run)] = self._by_key[session.key] = self._by_id[session.id] = session
            return self._of_run[id(run)]

    def close(self, run: RunState) -> None:
        """End a run's session, if it has one: its requests under way are refused, as are those to come."""
        with self._starting:
            run.ended = True
            session = self._of_run.pop(id(run), None)
            if session is None:
                return
            del self._by_key[session.key], self._by_id[session.id]
        self._closed |= dict.fromkeys((session.key, session.id))
        while len(self._closed) > CLOSED_KEPT:
            self._closed.popitem(last=False)
        for task in session.under_way:
            task.cancel()

    def _begin(self, listening: socket.socket) -> None:
        task = asyncio.ensure_future(self._serve(listening))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, listening: socket.socket) -> None:
        app = web.Application(client_max_size=MOST_BODY, middlewares=[self._accounted])
        for prefix in ("", "/sessions/{session}"):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_post(f"{prefix}/v1/reward", self._reward)
        app.router.add_get("/health", self._health)
        # a client that goes away cancels what was being done for it
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.SockSite(runner, listening).start()

    @web.middleware
    async def _accounted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer what goes wrong as OpenAI's servers do, and count."""
        response: web.StreamResponse
        try:
            if self._under_way >= MOST_UNDER_WAY:
                raise Refusal(429, f"{MOST_UNDER_WAY} requests are under way; try again later", code="busy")
            self._under_way += 1
            try:
                response = await handler(request)
            finally:
                self._under_way -= 1
        except _StreamedError as told:
            return told.response
        except Refusal as refusal:
            response = web.json_response(refusal.body, status=refusal.status)
        except web.HTTPException as error:
            what = f"{request.method} {request.path}: {error.reason}"
            response = web.json_response(Refusal(error.status, what).body, status=error.status)
        except (asyncio.CancelledError, ConnectionResetError):
            self.counts[ABANDONED] += 1
            raise
        except Exception as error:
            log.exception("a request to the policy's endpoint failed")
            failure = Refusal(500, f"{type(error).__name__}: {error}")
            response = web.json_response(failure.body, status=500)
        self.counts[str(response.status)] += 1
        return response

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        self._session_of(request)
        model = {"id": self._model.model_path, "object": "model", "created": 0, "owned_by": "roll_opd"}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.Response:
        """Take the reward of a session's run, and numbers to log with it."""
        session = self._session_of(request)
        body = await self._body(request)
        try:
            session.run.take_reward(body)
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        return web.json_response({"reward": session.run.reward})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        asked = read_request(await self._body(request))
        RUN.set(session.run)
        work = asyncio.ensure_future(self._answer(asked))
        session.under_way.add(work)
        delivered = False
        try:
            if asked.stream:
                response = await self._stream(request, asked, session, work)
            else:
                answered = await self._of_session(session, work)
                response = web.json_response(completion(*self._arguments(session, asked, answered)))
                if request.transport is None or request.transport.is_closing():
                    raise ConnectionResetError
            delivered = True
            return response
        finally:
            work.cancel()
            session.under_way.discard(work)
            if not delivered and work.done() and not work.cancelled() and work.exception() is None:
                self._model.forget(work.result())  # nobody got it: it is not learned from

    async def _answer(self, asked: ChatRequest) -> Answered:
        """Have the model answer; Refusal for a conversation that it cannot go on with."""

        def message(response: Experience) -> dict[str, Any]:
            text, number = _content(response, asked), _number(response)
            if not asked.tools:
                return as_message(text, (), self._parse, number)
            # what marks a call may be a special token
            ids = response.tokens[response.prompt_length :].numpy()
            whole = written(self._model.tokenizer, without_end(self._model.tokenizer, ids, response.finish_reason))
            prompt = written(self._model.tokenizer, response.tokens[: response.prompt_length].numpy()[-MARK_TOKENS:])
            if opens_a_thought(prompt) and after_thoughts(whole) == whole:
                return as_message(text, (), self._parse, number)  # cut off within its thoughts
            found = as_message(whole, asked.tools, self._parse, number)
            plain = text if "tool_calls" not in found else without_special(self._model.tokenizer, found["content"])
            return {**found, "content": plain or None if "tool_calls" in found else plain}

        try:
            return await self._model.answer(asked.messages, tools=asked.tools, as_message=message, **asked.options)
        except TemplateError as error:
            raise Refusal(400, f"messages: the chat template does not take them: {error}", "messages") from None
        except ValueError as error:
            code = "context_length_exceeded" if isinstance(error, NoRoomError) else None
            raise Refusal(400, str(error), "messages", code) from None

    async def _of_session(self, session: Session, work: "asyncio.Task[Answered]") -> Answered:
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if session.id in self._closed:
                raise Refusal(410, "the session is closed: its run has ended", code="session_closed") from None
            raise

    async def _stream(
        self, request: web.Request, asked: ChatRequest, session: Session, work: "asyncio.Task[Answered]"
    ) -> web.StreamResponse:
        """Send an answer in pieces; until there is one, comments that keep the connection alive."""
        await asyncio.wait([work], timeout=ALIVE_SECONDS)
        if work.done():  # a refusal still has a status of its own
            await self._of_session(session, work)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        while not work.done():
            await response.write(b": waiting\n\n")
            await asyncio.wait([work], timeout=ALIVE_SECONDS)
        try:
            pieces = list(stream(*self._arguments(session, asked, await self._of_session(session, work))))
        except Exception as error:  # its status has been sent: a piece says what went wrong
            refusal = error if isinstance(error, Refusal) else Refusal(500, f"{type(error).__name__}: {error}")
            self.counts[str(refusal.status)] += 1
            await response.write(_event(refusal.body))
            raise _StreamedError(response) from error
        for piece in pieces:
            await response.write(_event(piece))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _arguments(self, session: Session, asked: ChatRequest, answered: Answered) -> tuple:
        """Return what `completion` and `stream` are made of."""
        ((first, _), *_) = answered
        head = {
            "id": f"chatcmpl-{session.id}-{_number(first)}",
            "created": int(time.time()),
            "model": asked.model or self._model.model_path,
        }
        answers = [self._told(response, call, asked) for response, call in answered]
        written = sum(len(call.completion.tokens) for _, call in answered)
        usage = {"prompt_tokens": first.prompt_length, "completion_tokens": written}
        return head, asked, answers, usage | {"total_tokens": sum(usage.values())}

    def _told(self, response: Experience, call: Call, asked: ChatRequest) -> Answer:
        tokens = [self._model.tokenizer.decode([token]) for token in call.completion.tokens] if asked.logprobs else []
        logprobs = call.completion.logprobs.tolist() if asked.logprobs else []
        return Answer(dict(call.answer()), call.completion.finish_reason, tokens, logprobs)

    def _session_of(self, request: web.Request) -> Session:
        """Return the session that a request belongs to; Refusal where it may not be known, or is not."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        in_url, in_header = request.match_info.get("session"), request.headers.get(SESSION_HEADER)
        name = in_url or in_header
        session = self._by_key.get(key)
        if session:
            # the key has said which; clients send the header with ids of their own, too, to be routed by
            if in_url in (None, session.id) and (in_url or in_header == session.id or in_header not in self._by_id):
                return session
            raise Refusal(403, f"session {name} has another key")
        if key in self._closed:
            raise Refusal(410, "the session is closed: its run has ended", code="session_closed")
        if not (self._key and secrets.compare_digest(key.encode(errors="replace"), self._key.encode())):
            raise Refusal(401, "wrong API key: give the session's own, or endpoint_api_key", code="invalid_api_key")
        if name is None:
            raise Refusal(400, f"which session? name it in the URL, /sessions/ID/v1, or as {SESSION_HEADER}")
        if name in self._closed:
            raise Refusal(410, f"session {name} is closed: its run has ended", code="session_closed")
        if name not in self._by_id:
            raise Refusal(404, f"there is no session {name} here", code="session_unknown")
        return self._by_id[name]

    async def _body(self, request: web.Request) -> bytes:
        if (request.content_length or 0) > MOST_BODY:
            raise Refusal(413, f"the body has {request.content_length} bytes; {MOST_BODY} are the most")
        try:
            async with asyncio.timeout(READ_SECONDS):
                return await request.read()
        except web.RequestPayloadError as error:
            raise Refusal(400, f"the body cannot be read: {error}") from None
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive in {READ_SECONDS} s") from None


def _content(response: Experience, asked: ChatRequest) -> str:
    """Return what was written, without the stop string that ended it."""
    text, stop = response.response_text or "", asked.options.get("stop") or []
    if response.finish_reason == "stop":
        for end in [stop] if isinstance(stop, str) else stop:
            text = text.split(end, 1)[0]
    return text


def _number(response: Experience) -> str:
    return f"{response.eid.step}_{response.eid.run}"


def _event(piece: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(piece)}\n\n".encode()
