"""OpenAI chat completions: validation of requests, and construction of responses and streams."""

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from roll_opd.data.messages import KNOWN_ROLES, ROLES, MessageError, read_message
from roll_opd.inference.tool_calls import ToolCallParser

MAX_RESPONSES = 128  # maximum of `n` in a request
SMALLEST = 1e-9  # lower bound of parameters that must be positive
STREAMED_CHARACTERS = 64  # per chunk

# sampling parameters, with the names of `ModelWrapper.chat`
_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "max_completion_tokens", "stop", "n")
_TEMPLATE = ("chat_template_kwargs", "continue_final_message")
_READ = ("messages", "model", "tools", "tool_choice", "stream", "stream_options", "logprobs", "top_logprobs")
# ignored, as the run sets the seeds and always has log-probs
_IGNORED = (
    *("seed", "user", "metadata", "store", "service_tier", "parallel_tool_calls", "reasoning_effort", "verbosity"),
    *(
        "prompt_cache_key",
        "safety_identifier",
        "add_generation_prompt",
        "return_token_ids",
    ),
)
# parameters that would change the sampled distribution -> values that leave it unchanged
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("auto", "none"),
}
_NUMBERS = {"temperature": (0, 100), "top_p": (SMALLEST, 1), "repetition_penalty": (SMALLEST, 100)}
_COUNTS = {"max_tokens": (1, None), "max_completion_tokens": (1, None), "n": (1, MAX_RESPONSES), "top_k": (-1, None)}
_RESERVED = frozenset({"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters})


class Refusal(Exception):
    """Error response to an HTTP request."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        """Create an error response.

        Args:
            status: HTTP status.
            message: text of the error.
            param: name of the wrong field.
            code: machine-readable error code.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """JSON body in OpenAI's error format."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """A validated request for a chat completion."""

    messages: list[dict[str, Any]]  # contents as text, arguments of tool calls as objects
    tools: list[dict[str, Any]]
    options: dict[str, Any]  # of `ModelWrapper.answer`
    model: str
    stream: bool
    usage_at_end: bool  # last chunk of a stream has the usage
    logprobs: bool


def read_request(body: bytes) -> ChatRequest:
    """Parse and validate the body of a request.

    Raises Refusal if the request cannot be served exactly. The error names the wrong field.
    """
    try:
        request = json.loads(body)
        json.dumps(request, ensure_ascii=False).encode()  # raises an error for a lone surrogate
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None
    if not isinstance(request, dict):
        raise Refusal(400, f"the body is a JSON {type(request).__name__}, expected an object")
    request = {name: value for name, value in request.items() if value is not None}  # a null is an absent field
    if request.get("top_logprobs"):
        raise _wrong("top_logprobs", "the engine returns only the log-probs of sampled tokens; omit top_logprobs")
    for name, value in request.items():
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise _wrong(name, f"{value!r} is not supported: it would change the sampled distribution; omit {name}")
        if name not in (*_SAMPLING, *_TEMPLATE, *_READ, *_IGNORED, *_NEUTRAL):
            raise _wrong(name, f"is not a known parameter; omit {name}")
    for name, (least, most) in _NUMBERS.items():
        _check_number(request, name, least, most, int | float)
    for name, (least, most_of_all) in _COUNTS.items():
        _check_number(request, name, least, most_of_all, int)
    stop = request.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not _is_list(stops, str) or "" in stops:
        raise _wrong("stop", f"{stop!r} is not a non-empty string or a list of non-empty strings")
    variables = request.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict) or not variables.keys().isdisjoint(_RESERVED):
        raise _wrong("chat_template_kwargs", "is not an object of variables for the chat template")
    tools = [] if request.get("tool_choice") == "none" else request.get("tools") or []
    if request.get("tool_choice") not in (None, "auto", "none"):
        raise _wrong(
            "tool_choice",
            "only auto and none are supported, because a forced call would not be sampled from the policy",
        )
    if not _is_list(tools, dict):
        raise _wrong("tools", "is not a list of objects")
    stream_options = request.get("stream_options") or {}
    options = {name: request[name] for name in (*_SAMPLING, *_TEMPLATE) if request.get(name) is not None}
    return ChatRequest(
        messages=_read_messages(request.get("messages")),
        tools=tools,
        options={"continue_final_message": False, **options},
        model=str(request.get("model") or ""),
        stream=bool(request.get("stream")),
        usage_at_end=isinstance(stream_options, dict) and bool(stream_options.get("include_usage")),
        logprobs=bool(request.get("logprobs")),
    )


def as_message(text: str, tools: Sequence[Mapping[str, Any]], parse: ToolCallParser, number: str) -> dict[str, Any]:
    """Return a response as an assistant message.

    Args:
        text: text of the response.
        tools: tools of the request.
        parse: function that finds tool calls in the text.
        number: text that becomes part of the ids of the tool calls.
    """
    content, calls = parse(text, tools) if tools else (text, [])
    message: dict[str, Any] = {"role": "assistant", "content": content or None if calls else content}
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{number}_{place}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in enumerate(calls)
        ]
    return message


@dataclass(frozen=True)
class Answer:
    """One choice of a chat completion: message, finish reason, tokens and log-probs."""

    message: dict[str, Any]
    finish_reason: str
    tokens: Sequence[tuple[str, bytes | None]]  # text and bytes, which are None if they are not known
    logprobs: Sequence[float]

    @property
    def reason(self) -> str:
        """The finish reason that OpenAI's API would report."""
        return "tool_calls" if self.message.get("tool_calls") and self.finish_reason == "stop" else self.finish_reason

    @property
    def token_logprobs(self) -> dict[str, Any]:
        """All tokens and their log-probs in OpenAI's format."""
        entries = [
            {"token": text, "logprob": logprob, "bytes": None if data is None else list(data), "top_logprobs": []}
            for (text, data), logprob in zip(self.tokens, self.logprobs, strict=True)
        ]
        return {"content": entries, "refusal": None}


def completion(
    head: Mapping[str, Any], request: ChatRequest, answers: Sequence[Answer], usage: Mapping
) -> dict[str, Any]:
    """Return the chat completion as JSON data.

    `head` has the id, the creation time and the model of the completion.
    """
    choices = [
        {
            "index": index,
            "message": {"refusal": None, **answer.message},
            "finish_reason": answer.reason,
            "logprobs": answer.token_logprobs if request.logprobs else None,
        }
        for index, answer in enumerate(answers)
    ]
    return {**head, "object": "chat.completion", "choices": choices, "usage": usage}


def stream(
    head: Mapping[str, Any], request: ChatRequest, answers: Sequence[Answer], usage: Mapping
) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a streamed chat completion.

    The log-probs of each choice are in the last chunk of that choice. `head` has the id, the creation time and the
    model of the completion.
    """

    def piece(index: int, delta: Mapping, reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return {**head, "object": "chat.completion.chunk", "choices": [choice]}

    for index, answer in enumerate(answers):
        text, calls = answer.message["content"] or "", answer.message.get("tool_calls", [])
        yield piece(index, {"role": "assistant", "content": "" if text or not calls else None})
        for start in range(0, len(text), STREAMED_CHARACTERS):
            yield piece(index, {"content": text[start : start + STREAMED_CHARACTERS]})
        for place, call in enumerate(calls):
            yield piece(index, {"tool_calls": [{"index": place, **call}]})
        yield piece(index, {}, answer.reason, answer.token_logprobs if request.logprobs else None)
    if request.usage_at_end:
        yield {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage}


def _read_messages(messages: Any) -> list[dict[str, Any]]:
    if not _is_list(messages, dict) or not messages:
        raise _wrong("messages", "is not a list of at least one object")
    return [_read_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _read_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        read = read_message(message, where)
    except MessageError as error:
        raise _wrong(error.field, error.what) from None
    if read["role"] not in KNOWN_ROLES:
        raise _wrong(f"{where}.role", f"{read['role']!r} is not one of {', '.join(ROLES)}")
    return read


def _check_number(request: Mapping[str, Any], name: str, least: float, most: float | None, kind: Any) -> None:
    value = request.get(name)
    if value is None:
        return
    if (
        isinstance(value, bool)
        or not isinstance(value, kind)
        or not least <= value <= (value if most is None else most)
    ):
        upper = "" if most is None else f" to {most}"
        raise _wrong(name, f"is {value!r}, expected a number from {least}{upper}")


def _is_list(value: Any, of: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, of) for item in value)


def _wrong(field: str, what: str) -> Refusal:
    return Refusal(400, f"{field}: {what}", field)
