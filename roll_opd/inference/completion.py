"""Requests and answers in vLLM's terms and in ours. Pure conversions. Legend: R response tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_opd.config.plan import SamplingPlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import RequestOutput, SamplingParams


@dataclass(frozen=True)
class Completion:
    """One sampled response."""

    tokens: np.ndarray  # int64 [R], with the final EOS when it stopped on it
    logprobs: np.ndarray  # f32 [R], of the distribution that was sampled (greedy: of temperature 1)
    finish_reason: str  # stop | length | abort
    weights_version: int


def token_prompt(tokens: Sequence[int]) -> dict[str, Any]:
    """A tokenised prompt for vLLM."""
    # with "type" vLLM takes it as already rendered, and spares a trip through a thread pool for every request
    return {"type": "token", "prompt_token_ids": np.asarray(tokens).tolist()}


def sampling_params(sampling: SamplingPlan, seed: int) -> "SamplingParams":
    """vLLM's parameters for one sample; the log-prob of the sampled token comes with every token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        seed=seed,
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        stop=list(sampling.stop),
        logprobs=0,  # of the sampled token, and no other
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion_of(output: "RequestOutput", weights_version: int) -> Completion:
    """The one sample of a finished request."""
    sample = output.outputs[0]
    scored = zip(sample.token_ids, sample.logprobs or [], strict=True)
    return Completion(
        tokens=np.array(sample.token_ids, dtype=np.int64),
        logprobs=np.array([entry[token].logprob for token, entry in scored], dtype=np.float32),
        finish_reason=sample.finish_reason or "abort",
        weights_version=weights_version,
    )


def cut_at_stop(completion: Completion, stop: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> Completion:
    """End `completion` with the token that completes a stop string, as vLLM does; without one, as it is."""
    for length in range(1, len(completion.tokens) + 1):
        text = tokenizer.decode(completion.tokens[:length].tolist(), skip_special_tokens=True)
        if any(string in text for string in stop):
            return replace(
                completion,
                tokens=completion.tokens[:length],
                logprobs=completion.logprobs[:length],
                finish_reason="stop",
            )
    return completion
