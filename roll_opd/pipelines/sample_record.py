"""Records of samples, of training and of validation, for the files of a run."""

from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from roll_opd.samples.experience import Experience
from roll_opd.samples.token_ends import token_ends


def text_of(experience: Experience, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return texts, tokens, rewards and weight versions of a sample."""
    response = tokenizer.decode(experience.response_tokens)
    ends = token_ends(tokenizer.decode, experience.response_tokens.tolist(), response)
    return {
        "id": experience.id,
        "tag": experience.tag,
        "prompt": tokenizer.decode(experience.prompt_tokens),
        "response": response,
        "token_ends": ends,
        "ground_truth": experience.ground_truth,
        "reward": experience.reward,
        "reward_parts": experience.reward_parts,
        "reward_reason": experience.reward_reason,
        **({"turn_rewards": experience.turn_rewards} if experience.turn_rewards else {}),
        "finish_reason": experience.finish_reason,
        "versions": experience.versions,
        "tokens": experience.tokens,
        "prompt_length": experience.prompt_length,
        "action_mask": experience.action_mask,
    }


def teacher_prompts_of(experience: Experience, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the prompts of teachers that read another prompt than the student, if any."""
    prompts = experience.teacher_prompts.items()
    return {"teacher_prompts": {name: tokenizer.decode(tokens) for name, tokens in prompts}} if prompts else {}


def logprobs_of(experience: Experience) -> dict[str, Any]:
    """Return the log-probs of sampler and frozen models, NaN at observed tokens."""
    by_teacher = experience.teacher_logprobs.items()
    return {
        "rollout_logprobs": of_actions(experience, experience.rollout_logprobs),
        "teacher_logprobs": {name: of_actions(experience, logprobs) for name, logprobs in by_teacher},
        "ref_logprobs": of_actions(experience, experience.ref_logprobs),
    }


def topk_hits(experience: Experience) -> dict[str, np.ndarray]:
    """Return by teacher whether each sampled token is among its top-k, [T-P], for teachers with top-k targets.

    None at observed tokens.
    """
    hits = {name: held.hits for name, held in experience.teacher_targets.items() if held.hits is not None}
    none = np.array(None, dtype=object)
    return {name: np.where(experience.action_mask, of_teacher, none) for name, of_teacher in hits.items()}


def of_actions(experience: Experience, array: np.ndarray | None) -> np.ndarray | None:
    """Return an optional floating [T-P] array with NaN at observed tokens, recorded as null."""
    return None if array is None else experience.without_observed(array)


def as_f32(array: np.ndarray | None) -> np.ndarray | None:
    """Return an optional array in f32, the precision of records."""
    return None if array is None else array.astype(np.float32)
