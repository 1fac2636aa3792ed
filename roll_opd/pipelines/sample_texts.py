"""Convert samples to what a person reads: records in the files of a run, and the example prompt at its end."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from roll_opd.config.plan import DataPlan, RunPlan
from roll_opd.data.dataset import columns_needed
from roll_opd.data.row_files import open_file
from roll_opd.data.row_formats import BadRow, DataError, parse_messages
from roll_opd.data.supervised_rows import parse_answered
from roll_opd.samples.sample import Sample

PIECES_OF_A_CHARACTER = 4  # maximum bytes, and so maximum tokens, of a UTF-8 character


def text_of(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return texts, tokens, rewards and weight versions of a sample."""
    response = tokenizer.decode(sample.response_tokens)
    ends = token_ends(tokenizer.decode, sample.response_tokens.tolist(), response)
    return {
        "id": sample.id,
        "tag": sample.tag,
        "prompt": tokenizer.decode(sample.prompt_tokens),
        "response": response,
        "token_ends": ends,
        "ground_truth": sample.ground_truth,
        "reward": sample.reward,
        "reward_parts": sample.reward_parts,
        "reward_reason": sample.reward_reason,
        **({"turn_rewards": sample.turn_rewards} if sample.turn_rewards else {}),
        "finish_reason": sample.finish_reason,
        "versions": sample.versions,
        "tokens": sample.tokens,
        "prompt_length": sample.prompt_length,
        "action_mask": sample.action_mask,
    }


def teacher_prompts_of(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, others: Mapping[str, PreTrainedTokenizerBase]
) -> dict[str, Any]:
    """Return the prompts of those teachers whose prompt differs from the student's prompt.

    `others` maps the names of teachers with another tokenizer to their tokenizers.
    """
    prompts = {name: others.get(name, tokenizer).decode(ids) for name, ids in sample.teacher_prompts.items()}
    return {"teacher_prompts": prompts} if prompts else {}


def teacher_cuts_of(sample: Sample) -> dict[str, Any]:
    """Return the chunks of the teachers with another tokenizer.

    A chunk is a list of three values: index of the first token, number of tokens, and texts of the teacher's tokens.
    """
    cuts = {
        name: [
            [first, count, [piece.decode(errors="replace") for piece in pieces]] for first, count, pieces in one.cuts()
        ]
        for name, one in sample.alignments.items()
    }
    return {"teacher_cuts": cuts} if cuts else {}


def logprobs_of(sample: Sample) -> dict[str, Any]:
    """Return the log-probs of the sampler, the teachers and the reference. They are NaN at observed tokens."""
    by_teacher = sample.teacher_logprobs.items()
    return {
        "rollout_logprobs": of_actions(sample, sample.rollout_logprobs),
        "teacher_logprobs": {name: of_actions(sample, logprobs) for name, logprobs in by_teacher},
        "ref_logprobs": of_actions(sample, sample.ref_logprobs),
    }


def topk_hits(sample: Sample) -> dict[str, np.ndarray]:
    """Return whether each sampled token is in the top-k of a teacher, [T-P], for each teacher with top-k targets.

    The value of an observed token is None.
    """
    hits = {name: held.hits for name, held in sample.teacher_targets.items() if held.hits is not None}
    none = np.array(None, dtype=object)
    return {name: np.where(sample.action_mask, of_teacher, none) for name, of_teacher in hits.items()}


def of_actions(sample: Sample, array: np.ndarray | None) -> np.ndarray | None:
    """Return a floating-point array [T-P] with NaN at observed tokens, or None if there is no array.

    Records contain NaN as null.
    """
    return None if array is None else sample.without_observed(array)


def as_f32(array: np.ndarray | None) -> np.ndarray | None:
    """Return an optional array in f32, the precision of records."""
    return None if array is None else array.astype(np.float32)


def token_ends(decode: Callable[[Sequence[int]], str], tokens: Sequence[int], text: str) -> list[int]:
    """Return the position in `text` at which each token ends, in characters. `text` is `decode(tokens)`.

    A token that contains only the first bytes of a character ends before this character. The ends never decrease, and
    the last end is the length of the text. Short windows of tokens are decoded, because a token can decode differently
    at the start of a sequence and inside it.
    """
    ends: list[int] = []
    # decode from token `window` for context; the tokens before `settled` decode to `done` characters
    window = settled = done = 0
    for place in range(1, len(tokens) + 1):
        before, now = decode(tokens[window:settled]), decode(tokens[window:place])
        if len(now) > len(before) and (not now.endswith("\ufffd") or place - settled >= PIECES_OF_A_CHARACTER):
            done = min(len(text), done + len(now) - len(before))
            window, settled = settled, place
        ends.append(done)
    return [*ends[:-1], len(text)] if ends else []


NEUTRAL = "Hello"
ROWS_TRIED = 20


def example_prompt(plan: RunPlan) -> str:
    """Return an example prompt: the user text of the first held-out row, if there is one.

    Otherwise the user text of the first training row is returned, or `NEUTRAL` if no row can be read.
    """
    held_out = [plan.validation.data] if plan.validation else []
    key = plan.workflow.prompt_key if plan.workflow else "prompt"
    return next((text for data in (*held_out, plan.data) for text in _texts(data, key)), NEUTRAL)


def _texts(data: DataPlan, key: str) -> Iterator[str]:
    """Yield the user texts of the first rows of a data set. A file that cannot be read gives no texts."""
    if data.schema == "scored":  # teacher files have tokens instead of text
        return
    try:
        for file in data.files[:1]:
            for line, _, value in itertools.islice(open_file(file, columns_needed(data)).scan(), ROWS_TRIED):
                try:
                    row = parse_answered(value, str(line), data)
                    given = row.extra.get(key) or row.extra.get("messages") if data.schema == "task" else row.prompt
                    text = given if isinstance(given, str) and key != "messages" else _of_user(row.messages or given)
                except BadRow:
                    continue
                if text.strip():
                    yield text
    except (OSError, DataError):
        return


def _of_user(messages: Any) -> str:
    turns: Sequence[Mapping[str, Any]] = parse_messages(messages)
    return next((turn["content"] for turn in turns if turn["role"] == "user"), "")
