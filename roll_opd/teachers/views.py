"""The view of a teacher chooses the tokens that the teacher scores, and maps its scores to the student's tokens.

`view_of` chooses the view from the teacher's plan and from the tokenizer files of student and teacher.

Legend for array axes: T tokens of the student's sequence, P prompt tokens.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from roll_opd.base.failures import RunError
from roll_opd.config.plan import ModelPlan, TeacherPlan
from roll_opd.data.templates import TEMPLATES, load_tokenizer
from roll_opd.models.model_files import ModelFilesError
from roll_opd.models.model_info import read_model
from roll_opd.models.stop_tokens import stop_tokens, turn_end
from roll_opd.models.token_bytes import ByteEncoder
from roll_opd.models.tokenizer_files import special_tokens
from roll_opd.samples.sample import Sample
from roll_opd.teachers.other_tokenizer import NO_MARKUP, OtherTokenizer, TurnMarkup, turn_markup
from roll_opd.teachers.prefix_logprobs import PrefixLogprobs
from roll_opd.teachers.teacher_interface import TeacherAnswer, TokenSequence, Wanted


class TeacherView(Protocol):
    """Maps a sample to the sequence that a teacher scores, and maps the teacher's answer back to the sample."""

    def reads(self, sample: Sample) -> TokenSequence:
        """Return (tokens, prompt length) of the sequence that the teacher scores for a sample."""

    def wants(self, wanted: Wanted) -> Wanted:
        """Return the targets to request from the scorer, so that `back` can return the targets `wanted`."""

    def back(self, sample: Sample, answer: TeacherAnswer) -> TeacherAnswer:
        """Return the scorer's answer for a sample, mapped to the student's response tokens, [T-P].

        Args:
            answer: the scorer's answer to the sequence `reads(sample)`.
        """


@dataclass(frozen=True)
class SameTokens:
    """The view of a teacher that has the same token ids as the student.

    The teacher scores the student's response after its own prompt. If the sample has no prompt for this teacher, the
    student's prompt is used.
    """

    teacher: str

    def reads(self, sample: Sample) -> TokenSequence:
        """Return (tokens, prompt length) of the sequence that the teacher scores."""
        prompt = sample.teacher_prompts.get(self.teacher)
        if prompt is None:
            return sample.tokens, sample.prompt_length
        return np.concatenate([prompt, sample.response_tokens]), len(prompt)

    def wants(self, wanted: Wanted) -> Wanted:
        """Return `wanted` unchanged."""
        return wanted

    def back(self, sample: Sample, answer: TeacherAnswer) -> TeacherAnswer:
        """Return `answer` unchanged.

        Raises RunError if the number of log-probs is not the number of response tokens.
        """
        if answer.logprobs.shape != (sample.response_length,):
            raise RunError(
                f"teacher {self.teacher} returned log-probs of shape {answer.logprobs.shape} for sample {sample.id},"
                f" which has {sample.response_length} response tokens; correct the teacher's scorer"
            )
        return answer


def view_of(teacher: TeacherPlan, student: ModelPlan) -> TeacherView:
    """Return the view of a teacher. Raises ModelFilesError if the tokenizers cannot be aligned."""
    if teacher.tokenizer is None:
        return SameTokens(teacher.name)
    template = TEMPLATES[teacher.context.template].source if teacher.context and teacher.context.template else None
    path, other = Path(student.path), Path(teacher.tokenizer)
    own = ByteEncoder(tokenizer_content(path), read_model(path).vocab)
    encoder = ByteEncoder(tokenizer_content(other))
    end = turn_end_token(other, encoder, template)
    ours = turn_end_token(path, own)
    ended = stop_tokens(path, {}).ids | (set() if ours is None else {ours})
    return OtherTokenizer(
        teacher.name,
        own.table,
        encoder,
        {} if end is None else dict.fromkeys(ended, end),
        _markup(path, None, ours, own.table.by_id),
        _markup(other, template, end, encoder.table.by_id),
        None if teacher.model is None else read_model(Path(teacher.model.path)).max_positions,
        PrefixLogprobs(own, encoder.table, teacher.prefix_topk) if teacher.prefix_topk else None,
    )


def tokenizer_content(path: Path) -> dict[str, Any]:
    """Return the loaded tokenizer as the content of a tokenizer.json.

    The class of a tokenizer may replace steps of its file, and add tokens. Raises ModelFilesError for a tokenizer that
    is written in Python.
    """
    loaded: Any = load_tokenizer(str(path))
    if not hasattr(loaded, "backend_tokenizer"):
        raise ModelFilesError(
            f"the tokenizer of {path} is the Python class {type(loaded).__name__}, so its tokens cannot be aligned with"
            " another tokenizer's; save it as a tokenizer.json"
        )
    return json.loads(loaded.backend_tokenizer.to_str())


def turn_end_token(path: Path, encoder: ByteEncoder, template: str | None = None) -> int | None:
    """Return the token that ends a turn in the chat template.

    If the template has no such token but writes blanks after an answer, such as a newline, and these blanks are one
    token, this token is returned. Otherwise the end-of-sequence token is returned, or None if it is missing too.

    Args:
        path: model directory with the tokenizer and its template.
        encoder: the encoder of this tokenizer.
        template: replaces the template of the tokenizer.
    """
    found = turn_end(path, template)
    if found and found.ids and found.ids[0] >= 0:
        return found.ids[0]
    blanks = encoder.encode_markup(found.blanks) if found else []
    if len(blanks) == 1:
        return blanks[0]
    text = special_tokens(path).get("eos_token")
    if not text:
        return None
    table = encoder.table
    in_vocabulary = table.by_id.index(text.encode()) if text.encode() in table.by_id else None
    return table.added.get(text, in_vocabulary)


def _markup(path: Path, template: str | None, end: int | None, tokens: tuple[bytes, ...]) -> TurnMarkup:
    tokenizer: Any = load_tokenizer(str(path))
    if not (template or tokenizer.chat_template):
        return NO_MARKUP
    render = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True, chat_template=template)
    return turn_markup(render, "" if end is None else tokens[end].decode())
