"""Convert requests and responses between vLLM's types and ours. Pure functions. Legend: R response tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_opd.config.plan import SamplingPlan
from roll_opd.samples.versions import Versions, truncated

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.inputs.engine import TokensInput
    from vllm.tokenizers import TokenizerLike


@dataclass(frozen=True)
class Completion:
    """One sampled response."""

    tokens: np.ndarray  # int64 [R], including the EOS if the response ended with it
    logprobs: np.ndarray  # f32 [R], of the sampled distribution (greedy: at temperature 1)
    finish_reason: str  # stop | length | abort
    versions: Versions = ()  # versions of the weights that sampled the tokens; (): unknown
    routes: np.ndarray | None = None  # integer [T-1, L, K]: the K experts of each token in each of L layers
    drafted: int = 0  # tokens that speculation proposed
    accepted: int = 0  # proposed tokens that are part of the response


def token_prompt(tokens: Sequence[int]) -> "TokensInput":
    """Return a tokenised prompt for vLLM."""
    # with "type", vLLM treats the prompt as rendered and needs no thread pool per request
    return {"type": "token", "prompt_token_ids": np.asarray(tokens).tolist()}


def check_prompts(prompts: Sequence[Sequence[int]], seeds: Sequence[int], max_model_len: int) -> None:
    """Raise ValueError unless every prompt has a seed, at least one token, and room for a response."""
    if len(prompts) != len(seeds):
        raise ValueError(f"{len(prompts)} prompts but {len(seeds)} seeds; pass one seed per prompt")
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) < max_model_len:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; expected 1 to {max_model_len - 1}, "
                f"so that the response fits into max_model_len {max_model_len}"
            )


def stop_token_ids(stop: Sequence[str], tokenizer: "TokenizerLike") -> tuple[int, ...]:
    """Return the token ids of the stop strings that are special tokens.

    These stop strings must be passed as token ids, because decoded text does not contain special tokens.
    """
    special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return tuple(special[string] for string in stop if string in special)


def sampling_params(sampling: SamplingPlan, seed: int, stop_ids: Sequence[int] = ()) -> "SamplingParams":
    """Return vLLM's parameters for one response with token log-probs.

    `stop_ids`: additional stop tokens.
    """
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
        stop_token_ids=list(stop_ids),
        logprobs=0,  # log-prob of the sampled token only
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion_of(output: "RequestOutput") -> Completion:
    """Return the response of a finished request."""
    sample = output.outputs[0]
    drafts = sample.spec_decode_metrics
    return Completion(
        tokens=np.array(sample.token_ids, dtype=np.int64),
        logprobs=token_logprobs(sample.token_ids, sample.logprobs or []),
        finish_reason=sample.finish_reason or "abort",
        versions=tuple((int(span.version), span.end - span.start) for span in sample.weight_versions or ()),
        routes=sample.routed_experts,
        drafted=drafts.num_draft_tokens if drafts else 0,
        accepted=sum(accepted * count for accepted, count in enumerate(drafts.histogram)) if drafts else 0,
    )


def token_logprobs(tokens: Iterable[int], entries: Iterable[Any]) -> np.ndarray:
    """Return the log-prob of each token, f32 [R].

    `entries` has vLLM's dict for the position of each token: token id -> `Logprob`.
    """
    return np.array([entry[int(token)].logprob for token, entry in zip(tokens, entries, strict=True)], np.float32)


def cut_at_stop(completion: Completion, stop: Sequence[str], tokenizer: "TokenizerLike") -> Completion:
    """Cut `completion` after the token that completes a stop string, as vLLM does.

    If no stop string occurs in the text, `completion` is returned unchanged.
    """
    for length in range(1, len(completion.tokens) + 1):
        text = tokenizer.decode(completion.tokens[:length].tolist(), skip_special_tokens=True)
        if any(string in text for string in stop):
            routes, cut = completion.routes, len(completion.tokens) - length
            return replace(
                completion,
                routes=None if routes is None else routes[: len(routes) - cut],
                tokens=completion.tokens[:length],
                logprobs=completion.logprobs[:length],
                versions=truncated(completion.versions, length),
                finish_reason="stop",
            )
    return completion
