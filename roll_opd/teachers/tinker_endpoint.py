"""Client of Tinker's service. `TinkerEndpoint` sends requests with the package `tinker`, version 0.38.0.

The package has its own HTTP client, session and retries. As for other servers, `Endpoint` limits the duration and the
number of requests, and repeats failed requests.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from roll_opd.base.failures import RunError
from roll_opd.base.installed import is_installed
from roll_opd.base.services import is_passing
from roll_opd.rewards.endpoint import Answer, AttemptFailed, Endpoint, RequestLimits

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
