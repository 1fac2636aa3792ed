"""Client of a judge model behind a chat completions API."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from roll_opd.base.addresses import chat_url
from roll_opd.base.http_endpoint import Endpoint, RequestLimits
from roll_opd.rewards.interface import RewardError

Messages = list[dict[str, str]]
# (messages, errors) -> text of the model's answer; counts retried failures in `errors` by kind, raises `GaveUp`.
Complete = Callable[[Messages, Counter[str]], Awaitable[str]]

ADVICE = {
    **dict.fromkeys(("http_401", "http_403"), "check judge_api_key, or the environment variable named in api_key_env"),
    "http_404": "check judge_api_url and judge_model_name",
    **dict.fromkeys(("http_400", "http_422"), "check judge_model_name, max_tokens and extra_body"),
}


class ChatEndpoint:
    """`Complete` that sends requests to a chat completions API."""

    def __init__(self, url: str, body: Mapping[str, Any], key: str, limits: RequestLimits) -> None:
        """Create the client of a judge model.

        Args:
            body: fields of each request, except the messages. Fields that are None are omitted.
            key: the API key; "" if the server needs no key.
        """
        if not url or not body["model"]:
            raise RewardError(
                "llm_judge needs judge_api_url (such as http://host:8000/v1) and judge_model_name; write both"
            )
        self._body = {name: value for name, value in body.items() if value is not None}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._endpoint = Endpoint(chat_url(url), headers, limits, ADVICE)

    async def __call__(self, messages: Messages, errors: Counter[str]) -> str:
        return await self._endpoint.ask({**self._body, "messages": messages}, read_completion, errors)


def read_completion(answer: Any) -> str:
    """Return the text of a chat completion; empty if the text is missing.

    Raises ValueError for JSON that is not a chat completion.
    """
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise ValueError("no choices[0].message.content") from None
    if content is not None and not isinstance(content, str):
        raise ValueError("choices[0].message.content is not a string")
    return content or ""
