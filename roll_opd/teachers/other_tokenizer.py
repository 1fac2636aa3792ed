"""The view of a teacher with another tokenizer: the teacher scores the same response in its own tokens.

The teacher reads its own prompt, rendered with its own template. The student's tokens never change. Log-probs are
mapped to them by the bytes of the response. The response is converted to the teacher's tokens by these rules:

- Ordinary tokens are converted to bytes. So are added tokens that are not special, such as tags around thoughts and
  tool calls. The teacher's tokenizer encodes each unbroken run of such tokens.
- A token that ends a turn becomes the teacher's token that ends a turn. Any other special token becomes the teacher's
  special token of the same text. If the teacher has no such token, the student's token has no credit.
- Observed tokens have no credit. If they form a turn in the student's template, the teacher reads the same content as a
  turn in its own template. To find the text that a template adds before and after a turn, a short conversation is
  rendered with it. Otherwise, the teacher reads their bytes.

Legend: T-P student tokens and U teacher tokens of a response, S scored teacher tokens (see `samples.byte_alignment`), V
token ids of the student.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jinja2
import numpy as np

from roll_opd.base.failures import RunError
from roll_opd.models.token_bytes import MISSING, ByteEncoder, TokenBytes
from roll_opd.samples.byte_alignment import Alignment
from roll_opd.samples.sample import Sample
from roll_opd.teachers.prefix_logprobs import PrefixLogprobs
from roll_opd.teachers.teacher_interface import TeacherAnswer, TokenSequence, Wanted

ROLES = ("user", "tool")  # roles of the turns between two answers
_QUESTION, _ANSWER, _CONTENT = "roll-opd-question", "roll-opd-answer", "roll-opd-content"

Render = Callable[[Sequence[Mapping[str, Any]]], str]  # renders messages, followed by the start of the next answer


@dataclass(frozen=True)
class ObservedTurn:
    """A turn between two answers."""

    role: str
    content: bytes


@dataclass(frozen=True)
class TurnMarkup:
    """The text that a chat template adds before and after a turn that is not an answer, by the role of the turn."""

    around: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # role -> text before and after the content
    end: str = ""  # text of the token that ends an answer; the text before the content starts with it

    def parts(self, role: str, *, ended: bool) -> tuple[str, str]:
        """Return (text before the content, text after the content).

        Args:
            role: role of the turn.
            ended: whether the answer before the turn already has its end token.
        """
        before, after = self.around[role]
        return before.removeprefix(self.end) if ended else before, after

    def split(self, data: bytes, *, ended: bool) -> ObservedTurn | None:
        """Return the turn in the text between two answers, or None if the text is not exactly one turn.

        Args:
            data: the text between the answers.
            ended: whether the answer before the turn already has its end token.
        """
        for role in self.around:
            before, after = (part.encode() for part in self.parts(role, ended=ended))
            if len(data) >= len(before) + len(after) and data.startswith(before) and data.endswith(after):
                content = data[len(before) : len(data) - len(after)]
                if not (self.end and self.end.encode() in content):
                    return ObservedTurn(role, content)
        return None


NO_MARKUP = TurnMarkup()


def turn_markup(render: Render, end: str) -> TurnMarkup:
    """Return the markup of a chat template, for each role that the template accepts.

    Args:
        render: renders messages with the template.
        end: text of the token that ends an answer.
    """
    around = {}
    for role in ROLES:
        turns = [
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", "content": _ANSWER},
            {"role": role, "content": _CONTENT},
        ]
        try:
            text = render(turns)
        except (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError):
            continue
        _, found, rest = text.rpartition(_ANSWER)
        before, has_content, after = rest.partition(_CONTENT)
        if found and has_content:
            around[role] = (before, after)
    return TurnMarkup(around, end)


KEPT = 4096  # maximum number of alignments that are kept between request and answer


@dataclass(frozen=True)
class OtherTokenizer:
    """A `TeacherView` for a teacher whose token ids differ from the student's."""

    teacher: str
    student: TokenBytes
    encoder: ByteEncoder  # encodes bytes as the teacher's tokens
    ends: Mapping[int, int]  # student token that ends a turn -> the teacher's token that ends a turn
    student_turns: TurnMarkup = NO_MARKUP
    teacher_turns: TurnMarkup = NO_MARKUP
    max_tokens: int | None = None  # limit of the teacher's model
    prefixes: PrefixLogprobs | None = None  # computes log-probs of single student tokens; None: one log-prob per chunk
    _kept: dict[tuple[int | None, bytes, bytes], tuple[np.ndarray, Alignment]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def reads(self, sample: Sample) -> TokenSequence:
        """Return (tokens, prompt length) of the sequence that the teacher scores.

        The sequence is the teacher's prompt, followed by the response in the teacher's tokens. Raises RunError if the
        sample has no prompt for this teacher, or if the sequence is too long for the teacher's model.
        """
        prompt = sample.teacher_prompts.get(self.teacher)
        if prompt is None:
            raise RunError(
                f"sample {sample.id} has no prompt for teacher {self.teacher}, which has another tokenizer; the"
                " workflow should call the model with messages"
            )
        tokens, _ = self.aligned(sample)
        if self.max_tokens is not None and len(prompt) + len(tokens) > self.max_tokens:
            raise RunError(
                f"sample {sample.id} has {len(prompt)} prompt and {len(tokens)} response tokens for teacher"
                f" {self.teacher}, but the teacher's model has {self.max_tokens} positions; lower prompt_length or"
                " response_length"
            )
        return np.concatenate([prompt, tokens]), len(prompt)

    def wants(self, wanted: Wanted) -> Wanted:
        """Return the targets to request from the teacher.

        If log-probs of single student tokens are computed, the teacher's top-k is requested too.
        """
        return replace(wanted, topk=self.prefixes.topk, fetched=True) if self.prefixes else wanted

    def back(self, sample: Sample, answer: TeacherAnswer) -> TeacherAnswer:
        """Return the answer's log-probs mapped to the student's tokens, together with the alignment.

        `PrefixLogprobs` computes a log-prob for each student token. If `prefixes` is None, or if a log-prob of the
        answer is not finite, `Alignment.on_student_tokens` computes the log-probs from chunks instead.

        Raises RunError if the number of log-probs is not the number of teacher tokens, or if the answer has targets
        that were not requested.
        """
        tokens, alignment = self.aligned(sample)
        if answer.logprobs.shape != tokens.shape:
            raise RunError(
                f"teacher {self.teacher} returned log-probs of shape {answer.logprobs.shape} for sample {sample.id},"
                f" which has {len(tokens)} response tokens in the teacher's tokenizer; correct the teacher's scorer"
            )
        if answer.targets or (answer.arrays and not self.prefixes):
            raise RunError(
                f"teacher {self.teacher} has a different tokenizer than the student, so it returns log-probs only"
            )
        if self.prefixes is None or not np.isfinite(answer.logprobs).all():
            return TeacherAnswer(alignment.on_student_tokens(answer.logprobs), alignment=alignment)
        is_text = sample.action_mask & ~self._is_single[sample.response_tokens]
        top = answer.arrays["topk_ids"], answer.arrays["topk_logprobs"]
        found = self.prefixes.on_student_tokens(alignment, is_text, tokens, answer.logprobs, top)
        return TeacherAnswer(found, alignment=replace(alignment, by_token=True))

    def aligned(self, sample: Sample) -> tuple[np.ndarray, Alignment]:
        """Return (tokens, alignment): the scored teacher tokens of a response, int64 [S], and the alignment."""
        prompt = sample.teacher_prompts.get(self.teacher)
        before = None if prompt is None or not len(prompt) else int(prompt[-1])
        key = (before, sample.response_tokens.tobytes(), np.packbits(sample.action_mask).tobytes())
        if key not in self._kept:
            while len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = self._align(sample.response_tokens, sample.action_mask, before)
        return self._kept[key]

    @cached_property
    def _is_single(self) -> np.ndarray:
        """bool [V], true for student tokens that are not text: special tokens, and ids without bytes."""
        single = self.student.lengths == 0  # a new array
        single[[*self.student.special, *self.ends]] = True
        return single

    @cached_property
    def _special(self) -> dict[int, int]:
        """Map from special tokens of the student to tokens of the teacher.

        A token that ends a turn is mapped to the teacher's token that ends a turn. Any other special token is mapped to
        the teacher's special token of the same text, if there is one.
        """
        texts = {number: text for text, number in self.student.added.items() if number in self.student.special}
        known, special = self.encoder.table.added, self.encoder.table.special
        found = {number: known[text] for number, text in texts.items() if known.get(text) in special}
        return {**found, **self.ends}

    def _align(self, ids: np.ndarray, mask: np.ndarray, before: int | None) -> tuple[np.ndarray, Alignment]:
        """Return (tokens, alignment) of a response. `before` is the last token of the teacher's prompt."""
        if len(ids) and int(ids.max()) >= len(self.student.by_id):
            raise RunError(
                f"token {int(ids.max())} is outside the student's tokenizer of {len(self.student.by_id)} tokens; give"
                " model and tokenizer of the same release"
            )
        student_ends = np.cumsum(np.maximum(self.student.lengths[ids], 1))
        single = self._is_single[ids] & mask
        tokens: list[int] = []
        ends: list[np.ndarray] = []
        for start, end in _stretches(single, mask):
            first = int(student_ends[start - 1]) if start else 0
            if not mask[start]:
                found = self._observed(ids[start:end], ids[start - 1] if start else None) or [MISSING]
                places = np.full(len(found), student_ends[end - 1])
            elif single[start]:
                found, places = [self._special.get(int(ids[start]), MISSING)], student_ends[start : start + 1]
            else:
                data = self.student.bytes_of(ids[start:end].tolist())
                found, places = self.encoder.encode_after(tokens[-1] if tokens else before, data)
                places = places + first
            tokens += found
            ends.append(places)
        teacher = np.array(tokens, np.int64)
        missing = teacher == MISSING
        teacher_ends = np.concatenate([np.zeros(0, np.int64), *ends])
        data = b"".join([self.student.by_id[token] or b" " for token in ids.tolist()])
        return teacher[~missing], Alignment(student_ends, teacher_ends, missing, mask, data)

    def _observed(self, ids: np.ndarray, before: int | None) -> list[int]:
        """Return the teacher's tokens for observed tokens.

        Args:
            ids: the observed tokens, in the student's tokenizer.
            before: the student token before them, or None at the start of the response.
        """
        data = self.student.bytes_of(ids.tolist())
        ended = before is not None and int(before) in self.ends
        if (found := self.student_turns.split(data, ended=ended)) and found.role in self.teacher_turns.around:
            opening, closing = self.teacher_turns.parts(found.role, ended=ended)
            content, _ = self.encoder.encode(found.content)
            written = [*self.encoder.encode_markup(opening), *content, *self.encoder.encode_markup(closing)]
        else:
            written = self._as_bytes(ids)
        return [token for token in written if token != MISSING]

    def _as_bytes(self, ids: np.ndarray) -> list[int]:
        """Return the teacher's tokens for observed tokens that do not form a turn of the student's template."""
        single = self._is_single[ids]
        written: list[int] = []
        for start, end in _stretches(single, np.ones(len(ids), bool)):
            if single[start]:
                written.append(self._special.get(int(ids[start]), MISSING))
            else:
                written += self.encoder.encode(self.student.bytes_of(ids[start:end].tolist()))[0]
        return written


def _stretches(single: np.ndarray, mask: np.ndarray) -> list[tuple[int, int]]:
    """Return (start, end) of each stretch of tokens.

    A stretch is a token for which `single` is true, or an unbroken run of other tokens. A run has either only action
    tokens or only observed tokens.
    """
    if not len(mask):
        return []
    breaks = (mask[1:] != mask[:-1]) | single[1:] | single[:-1]
    starts = [0, *(np.flatnonzero(breaks) + 1).tolist()]
    return list(zip(starts, [*starts[1:], len(mask)], strict=True))
