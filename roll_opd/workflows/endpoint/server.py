"""The HTTP server of the policy in a workflow process. Each run has its own session.

Responses come from `ModelWrapper.answer`, so they are recorded in the call tree of the run. The server starts when its
address is first read. If a port is configured, the server starts together with the process.
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
from functools import cached_property
from typing import Any

from aiohttp import web
from jinja2 import TemplateError

from roll_opd.base.thoughts import after_thoughts, opens_a_thought
from roll_opd.inference.tool_calls import ToolCallParser
from roll_opd.models.model_files import ModelFilesError
from roll_opd.models.token_bytes import token_bytes
from roll_opd.workflows.call_tree import Call, text_of, without_end, without_special
from roll_opd.workflows.endpoint.chat import Answer, ChatRequest, Refusal, as_message, completion, read_request, stream
from roll_opd.workflows.model_wrapper import ModelWrapper
from roll_opd.workflows.run_state import RUN, RunState
from roll_opd.workflows.workflow_experience import Experience, NoRoomError, WorkflowError

MAX_BODY_BYTES = 8 << 20
MARK_TOKENS = 32  # tokens at the end of a prompt that are searched for an opened thought
MAX_CONCURRENT_REQUESTS = 1024  # further requests get status 429
READ_SECONDS = 60  # timeout of reading a request body
KEEPALIVE_SECONDS = 10  # interval of comments in a stream without data
CLOSED_KEPT = 20_000  # keys and ids of closed sessions, remembered to answer 410 instead of 401 or 404
ABANDONED = "abandoned"  # counted like an HTTP status, if the client disconnected before the response
SESSION_HEADER = "X-Session-Id"

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Responses = list[tuple[Experience, Call]]


class _StreamedError(Exception):
    """An error that was already sent to the client as part of a stream."""

    def __init__(self, response: web.StreamResponse) -> None:
        """Create the error. `response` is the stream in which the error was sent."""
        self.response = response


@dataclass(eq=False)
class RunSession:
    """The session of a run: its id, its API key and its unfinished requests."""

    run: RunState
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    key: str = field(default_factory=lambda: f"sk-{secrets.token_hex(24)}")
    tasks: set[asyncio.Task] = field(default_factory=set)


class PolicyServer:
    """The policy's HTTP server of one process.

    A request with the API key of a session belongs to that session. A request with the API key of the server gives the
    session in the URL or in a header.
    """

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
        """Create a server. It starts when `address` is first read.

        Args:
            model: the policy.
            loop: event loop of the server.
            parse: function that finds tool calls in a response.
            host: address on which the server listens.
            port: port of the server. 0 selects a free port.
            key: API key that is valid for all sessions.
        """
        self.counts: Counter[str] = Counter()  # requests by HTTP status or ABANDONED
        self._model, self._loop, self._host, self._port, self._key = model, loop, host, port, key
        self._parse = parse
        self._by_key: dict[str, RunSession] = {}
        self._by_id: dict[str, RunSession] = {}
        self._by_run: dict[int, RunSession] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()  # keys and ids of closed sessions
        self._active_requests = 0
        self._address: str | None = None
        self._starting = threading.Lock()
        self._tasks: set[asyncio.Task] = set()

    @property
    def address(self) -> str:
        """The server's URL without `/v1`. The first access starts the server.

        Raises WorkflowError if the port is in use.
        """
        with self._starting:
            if self._address is None:
                family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
                try:
                    listening = socket.create_server((self._host, self._port), family=family, backlog=1024)
                except OSError as error:
                    raise WorkflowError(
                        f"the endpoint cannot listen on {self._host}, port {self._port}: {error}; set another"
                        " endpoint_host or endpoint_port"
                    ) from error
                host, port = listening.getsockname()[:2]
                reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
                self._address = f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"
                # a separate context, as the server outlives the run that starts it
                self._loop.call_soon_threadsafe(self._begin, listening, context=contextvars.Context())
            return self._address

    def session(self, run: RunState) -> RunSession:
        """Return the session of a run. The first call opens the session."""
        with self._starting:
            if run.ended:
                raise RuntimeError("the run and its session have ended")
            if id(run) not in self._by_run:
                session = RunSession(run)
                self._by_run[id(run)] = self._by_key[session.key] = self._by_id[session.id] = session
            return self._by_run[id(run)]

    def close(self, run: RunState) -> None:
        """Close the session of a run, if the run has one. Its running requests and all later requests are refused."""
        with self._starting:
            run.ended = True
            session = self._by_run.pop(id(run), None)
            if session is None:
                return
            del self._by_key[session.key], self._by_id[session.id]
        self._closed |= dict.fromkeys((session.key, session.id))
        while len(self._closed) > CLOSED_KEPT:
            self._closed.popitem(last=False)
        for task in session.tasks:
            task.cancel()

    def _begin(self, listening: socket.socket) -> None:
        task = asyncio.ensure_future(self._serve(listening))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, listening: socket.socket) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._accounted])
        for prefix in ("", "/sessions/{session}"):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_post(f"{prefix}/v1/reward", self._reward)
        app.router.add_get("/health", self._health)
        # a client that disconnects cancels its generation
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.SockSite(runner, listening).start()

    @web.middleware
    async def _accounted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handle a request, and convert exceptions to error responses in OpenAI's format.

        All responses are counted by status.
        """
        response: web.StreamResponse
        try:
            if self._active_requests >= MAX_CONCURRENT_REQUESTS:
                raise Refusal(429, f"{MAX_CONCURRENT_REQUESTS} requests are in progress; try again later", code="busy")
            self._active_requests += 1
            try:
                response = await handler(request)
            finally:
                self._active_requests -= 1
        except _StreamedError as streamed:
            return streamed.response
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
        """Handle a request that posts the reward of a run. Such a request may also contain metrics."""
        session = self._session_of(request)
        body = await self._body(request)
        try:
            session.run.take_reward(body)
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        return web.json_response({"reward": session.run.reward})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        chat = read_request(await self._body(request))
        RUN.set(session.run)
        work = asyncio.ensure_future(self._answer(chat))
        session.tasks.add(work)
        delivered = False
        try:
            if chat.stream:
                response = await self._stream(request, chat, session, work)
            else:
                responses = await self._of_session(session, work)
                response = web.json_response(completion(*self._arguments(session, chat, responses)))
                if request.transport is None or request.transport.is_closing():
                    raise ConnectionResetError
            delivered = True
            return response
        finally:
            work.cancel()
            session.tasks.discard(work)
            if not delivered and work.done() and not work.cancelled() and work.exception() is None:
                self._model.forget(work.result())  # the client has not received the response, so it is not trained on

    async def _answer(self, chat: ChatRequest) -> Responses:
        """Generate the responses to a request. Raises Refusal if the model cannot continue the conversation."""

        def message(response: Experience) -> dict[str, Any]:
            text, number = _content(response, chat), _number(response)
            if not chat.tools:
                return as_message(text, (), self._parse, number)
            # the marker of a tool call may be a special token
            ids = response.tokens[response.prompt_length :].numpy()
            whole = text_of(self._model.tokenizer, without_end(self._model.tokenizer, ids, response.finish_reason))
            prompt = text_of(self._model.tokenizer, response.tokens[: response.prompt_length].numpy()[-MARK_TOKENS:])
            if opens_a_thought(prompt) and after_thoughts(whole) == whole:
                return as_message(text, (), self._parse, number)  # the response was truncated within a thought
            found = as_message(whole, chat.tools, self._parse, number)
            plain = text if "tool_calls" not in found else without_special(self._model.tokenizer, found["content"])
            return {**found, "content": plain or None if "tool_calls" in found else plain}

        try:
            return await self._model.answer(chat.messages, tools=chat.tools, as_message=message, **chat.options)
        except TemplateError as error:
            raise Refusal(400, f"messages: the chat template rejects the messages: {error}", "messages") from None
        except ValueError as error:
            code = "context_length_exceeded" if isinstance(error, NoRoomError) else None
            raise Refusal(400, str(error), "messages", code) from None

    async def _of_session(self, session: RunSession, work: "asyncio.Task[Responses]") -> Responses:
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if session.id in self._closed:
                raise Refusal(410, "the session is closed: its run has ended", code="session_closed") from None
            raise

    async def _stream(
        self, request: web.Request, chat: ChatRequest, session: RunSession, work: "asyncio.Task[Responses]"
    ) -> web.StreamResponse:
        """Stream a response. Until it is generated, keep-alive comments are sent."""
        await asyncio.wait([work], timeout=KEEPALIVE_SECONDS)
        if work.done():  # before the headers are sent, an error can still set the status
            await self._of_session(session, work)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        while not work.done():
            await response.write(b": waiting\n\n")
            await asyncio.wait([work], timeout=KEEPALIVE_SECONDS)
        try:
            pieces = list(stream(*self._arguments(session, chat, await self._of_session(session, work))))
        except Exception as error:  # the status has already been sent, so the error is reported in the stream
            refusal = error if isinstance(error, Refusal) else Refusal(500, f"{type(error).__name__}: {error}")
            self.counts[str(refusal.status)] += 1
            await response.write(_event(refusal.body))
            raise _StreamedError(response) from error
        for piece in pieces:
            await response.write(_event(piece))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _arguments(self, session: RunSession, chat: ChatRequest, responses: Responses) -> tuple:
        """Return the arguments for `completion` and `stream`."""
        ((first, _), *_) = responses
        head = {
            "id": f"chatcmpl-{session.id}-{_number(first)}",
            "created": int(time.time()),
            "model": chat.model or self._model.model_path,
        }
        answers = [self._choice(response, call, chat) for response, call in responses]
        completion_tokens = sum(len(call.completion.tokens) for _, call in responses)
        usage = {"prompt_tokens": first.prompt_length, "completion_tokens": completion_tokens}
        return head, chat, answers, usage | {"total_tokens": sum(usage.values())}

    def _choice(self, response: Experience, call: Call, chat: ChatRequest) -> Answer:
        tokens = list(map(self._token, call.completion.tokens.tolist())) if chat.logprobs else []
        logprobs = call.completion.logprobs.tolist() if chat.logprobs else []
        return Answer(dict(call.answer()), call.completion.finish_reason, tokens, logprobs)

    @cached_property
    def _bytes(self) -> tuple[bytes, ...]:
        """Bytes of each token id; empty if the format of the tokenizer does not determine them."""
        try:
            return token_bytes(json.loads(self._model.tokenizer.backend_tokenizer.to_str())).by_id
        except (AttributeError, ModelFilesError):  # a tokenizer in Python; WordPiece
            return ()

    def _token(self, token: int) -> tuple[str, bytes | None]:
        """Return the text and the bytes of a token. A part of a character has bytes that are not text."""
        if token < len(self._bytes):
            return self._bytes[token].decode(errors="replace"), self._bytes[token]
        text = self._model.tokenizer.decode([token])
        return text, None if "\ufffd" in text else text.encode(errors="replace")

    def _session_of(self, request: web.Request) -> RunSession:
        """Return the session of a request.

        Raises Refusal if the API key is not valid or the session is unknown.
        """
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        in_url, in_header = request.match_info.get("session"), request.headers.get(SESSION_HEADER)
        name = in_url or in_header
        session = self._by_key.get(key)
        if session:
            # the key identifies the session, since clients also use the header for private routing ids
            if in_url in (None, session.id) and (in_url or in_header == session.id or in_header not in self._by_id):
                return session
            raise Refusal(403, f"session {name} has another key")
        if key in self._closed:
            raise Refusal(410, "the session is closed: its run has ended", code="session_closed")
        if not (self._key and secrets.compare_digest(key.encode(errors="replace"), self._key.encode())):
            raise Refusal(
                401, "wrong API key: use the key of the run's session or endpoint_api_key", code="invalid_api_key"
            )
        if name is None:
            raise Refusal(
                400,
                "no session is named; put the session's id into the URL (/sessions/ID/v1) or into the header"
                f" {SESSION_HEADER}",
            )
        if name in self._closed:
            raise Refusal(410, f"session {name} is closed: its run has ended", code="session_closed")
        if name not in self._by_id:
            raise Refusal(404, f"unknown session {name}", code="session_unknown")
        return self._by_id[name]

    async def _body(self, request: web.Request) -> bytes:
        if (request.content_length or 0) > MAX_BODY_BYTES:
            raise Refusal(413, f"the body has {request.content_length} bytes; the maximum is {MAX_BODY_BYTES}")
        try:
            async with asyncio.timeout(READ_SECONDS):
                return await request.read()
        except web.RequestPayloadError as error:
            raise Refusal(400, f"the body cannot be read: {error}") from None
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive in {READ_SECONDS} s") from None


def _content(response: Experience, chat: ChatRequest) -> str:
    """Return the text of a response up to the stop string."""
    text, stop = response.response_text or "", chat.options.get("stop") or []
    if response.finish_reason == "stop":
        for end in [stop] if isinstance(stop, str) else stop:
            text = text.split(end, 1)[0]
    return text


def _number(response: Experience) -> str:
    return f"{response.eid.step}_{response.eid.run}"


def _event(piece: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(piece)}\n\n".encode()
