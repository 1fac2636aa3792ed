"""The teacher preflight: a check of each teacher before the first update. See docs/teacher-preflight.md.

Student and teacher score a few samples, and `logprob_checks` judges their log-probs. The preflight uses the first
samples of the run and generates no other samples. It computes the log-probs of the first update a second time and
compares the two results. The preflight does not change any random state, so it has no effect on the results of a run.

Legend for array axes: T tokens of a text, N scored tokens, K tokens of a top-k.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from roll_opd.base.failures import RunError
from roll_opd.data.templates import load_tokenizer, token_ids
from roll_opd.models.model_files import read_json
from roll_opd.models.model_info import ModelInfo, read_model
from roll_opd.models.tokenizer_comparison import compare_tokenizers
from roll_opd.models.tokenizer_files import added_ids
from roll_opd.models.weight_files import WINDOW_LAYERS, lost_layer_hints
from roll_opd.samples.byte_alignment import NO_CHUNK
from roll_opd.samples.sample import Sample, changed, chunks_column
from roll_opd.teachers.logprob_checks import Check, Readings, Settings, checks, preference_check
from roll_opd.teachers.megatron_teacher import MegatronScorer
from roll_opd.teachers.scoring import Teacher, coverage_checks
from roll_opd.teachers.teacher_interface import TeacherAnswer, Wanted
from roll_opd.teachers.teacher_reach import changes, difference, reach, reach_check
from roll_opd.workers.actor_group import WorkerGroup

PREFLIGHT_SAMPLES = 64  # maximum samples that student and teacher score, and maximum answers from rows
RESPONSE_TOKENS, ALL_TOKENS = 256, 4096  # maximum scored action tokens per response, and maximum tokens of all samples
MIN_ACTIONS, MAX_TOKENS = 256, 16_384  # samples are added until they have this many action tokens, or this many tokens
FEWEST = 4  # minimum samples, however long they are
REPEATED = 8  # texts in the second computation; few suffice, as differences between calls show in every text
TOPK = 16
ANSWERS = ("response", "completion", "output", "solution", "answer")  # columns in which rows may have an answer


class TeacherPreflight:
    """Checks each teacher of a run on the first samples that the teacher has scored."""

    def __init__(
        self,
        mode: bool | Literal["warn"],
        student: WorkerGroup,
        teachers: Sequence[Teacher],
        report: Callable[[str, Sequence[Check]], None],
        demonstrations: Sequence[Sample] = (),
        may_be_student: bool = False,
        plain_prompts: str = "",
    ) -> None:
        """Create the preflight.

        Args:
            mode: the run's setting `teacher_preflight`.
            student: the ranks of the student.
            teachers: the teachers to check.
            report: prints and stores the checks. It is called with a teacher's name and the checks.
            demonstrations: samples whose answers come from rows. They are scored too.
            may_be_student: whether a teacher may have the student's weights. A follower and a teacher with another
                tokenizer or context may always have them.
            plain_prompts: the plan's warning about prompts which no chat template renders, or "".
        """
        self._mode, self._student, self._report = mode, student, report
        self._may_be_student = may_be_student
        self._demonstrations = demonstrations
        self._prompts = [Check("prompts", "plain texts", "warning", plain_prompts)] if plain_prompts else []
        self._left = list(teachers) if mode is not False else []

    async def check(self, samples: Sequence[Sample], temperature: float) -> None:
        """Check the teachers that have scored samples of the step and are not checked yet. Report the checks.

        Raises RunError if a check fails and the mode is not `warn`.
        """
        for teacher in list(self._left):
            taught = [e for e in samples if teacher.plan.name in e.teacher_logprobs]
            chosen = _chosen(taught)
            if not chosen:
                continue
            self._left.remove(teacher)
            rows = [*await self._check(teacher, chosen, temperature), *_preference(taught, teacher.plan.name)]
            rows += self._prompts
            self._report(teacher.plan.name, rows)
            failed = next((row for row in rows if row.verdict == "failed"), None)
            if failed and self._mode != "warn":
                raise RunError(
                    f"the preflight of teacher {teacher.plan.name} failed: {failed.check}: {failed.value};"
                    f" {failed.meaning}. To continue despite a failed check, set teacher_preflight: warn"
                )

    async def _check(self, teacher: Teacher, chosen: Sequence[Sample], temperature: float) -> list[Check]:
        own = Path(self._student.plan.model.path)
        models = [read_model(path) for path in (own, *([Path(teacher.plan.model.path)] if teacher.plan.model else []))]
        name, is_aligned = teacher.plan.name, teacher.plan.tokenizer is not None
        shared = models[0].vocab if is_aligned else min(model.vocab for model in models)
        answers = _chosen(self._demonstrations) or _answers(chosen, own)
        texts = [*chosen, *answers]
        # a teacher with another prompt than the student shares only the responses with the student
        first = None if teacher.plan.context else 1
        scored = [_scored_from(first, e) for e in texts]
        scorer, most_likely = teacher.scorer, Wanted(topk=min(TOPK, shared), vocab_size=shared, fetched=True)
        wanted = most_likely if "topk" in scorer.targets and not is_aligned else Wanted()
        student = MegatronScorer(self._student.plan.name, self._student, models[0].vocab)
        by_student = await student.score([(e.tokens, e.prompt_length) for e in scored], temperature, most_likely)
        by_teacher = await teacher.score(scored, temperature, replace(wanted, plain=wanted.topk is not None))
        wanted = teacher.view.wants(wanted)
        repeated = [teacher.view.reads(e) for e in scored[:REPEATED]]
        again = await scorer.score(repeated, temperature, replace(wanted, computed=True))
        altered = changes([tokens for tokens, _ in repeated])
        rewritten = [(change.tokens, length) for change, (_, length) in zip(altered, repeated, strict=True)]
        read_altered = await scorer.score(rewritten, temperature, wanted)
        readings = Readings(
            student_logprobs=_logprobs(by_student),
            student_ids=_column(by_student, "topk_ids"),
            student_topk=_column(by_student, "topk_logprobs"),
            teacher_logprobs=_logprobs(by_teacher),
            teacher_ids=_column(by_teacher, "topk_ids"),
            teacher_topk=_column(by_teacher, "topk_logprobs"),
            teacher_plain=_column(by_teacher, "plain_logprobs"),
            again=_logprobs([teacher.view.back(e, a) for e, a in zip(scored, again, strict=False)]),
            in_run=np.concatenate([_in_run(e, name, first) for e in texts]),
            **_kinds(texts, added_ids(own), first),
        ).without(_observed(texts, first) | _uncovered(texts, by_teacher, name))
        settings = Settings(
            temperature,
            scorer.is_exact,
            shared,
            reads_more=teacher.plan.context is not None,
            may_be_student=self._may_be_student or is_aligned or teacher.plan.following is not None,
        )
        rows = checks(readings, settings)
        reaches = [
            reach(difference(_sorted(before), _sorted(after)), length, change.end)
            for (_, length), change, before, after in zip(repeated, altered, again, read_altered, strict=True)
            if change.differs
        ]
        if reaches and not np.isnan(readings.teacher_topk).any():
            rows.append(reach_check(reaches))
        if is_aligned:
            cuts = [changed(e, alignments={name: a.alignment}) for e, a in zip(texts, by_teacher, strict=True)]
            rows += coverage_checks(cuts, name)
        elif len(models) > 1:
            rows += _tokens(*models)
        return rows if len(models) == 1 else [_size_of(*models), *rows]


def _chosen(samples: Sequence[Sample]) -> list[Sample]:
    """Return a few truncated samples that are spread evenly over the step.

    If the responses are short, more samples are returned.
    """
    cut = [_cut(sample) for sample in samples]
    written = [sample for sample in cut if sample.action_tokens]
    stride = max(1, -(-len(written) // PREFLIGHT_SAMPLES))
    chosen: list[Sample] = []
    tokens = actions = 0
    for sample in (one for first in range(stride) for one in written[first::stride]):
        enough = actions >= MIN_ACTIONS
        tokens += len(sample.tokens)
        over = tokens > (ALL_TOKENS if enough else MAX_TOKENS)
        if len(chosen) >= FEWEST and (over or (enough and len(chosen) >= PREFLIGHT_SAMPLES)):
            break
        chosen.append(sample)
        actions += sample.action_tokens
    return chosen


def _cut(sample: Sample) -> Sample:
    """Return a sample truncated after the first `RESPONSE_TOKENS` action tokens of its response."""
    actions = np.flatnonzero(sample.action_mask[:ALL_TOKENS])[:RESPONSE_TOKENS]
    length = int(actions[-1]) + 1 if len(actions) else 0
    is_whole = len(actions) == sample.action_tokens
    return changed(
        sample,
        tokens=sample.tokens[: sample.prompt_length + length],
        columns={name: values[:length] for name, values in sample.columns.items()},
        finish_reason=sample.finish_reason if is_whole else "length",
    )


def _logprobs(answers: Sequence[TeacherAnswer]) -> np.ndarray:
    return np.concatenate([answer.logprobs for answer in answers])


def _column(answers: Sequence[TeacherAnswer], name: str) -> np.ndarray:
    """Return the arrays called `name` of all answers, concatenated to [N, K].

    K is 0 if the scorer does not return these arrays.
    """
    return np.concatenate([a.arrays.get(name, np.zeros((len(a.logprobs), 0), np.float32)) for a in answers])


def _sorted(answer: TeacherAnswer) -> np.ndarray:
    """Return the log-probs of an answer, f32 [T-P, 1 + K].

    The first column is for the response tokens, and the other columns are for the top-k.
    """
    return np.column_stack([answer.logprobs, _column([answer], "topk_logprobs")])


def _answers(chosen: Sequence[Sample], model: Path) -> list[Sample]:
    """Return samples that consist of a prompt and the answer from the prompt's row.

    The list is empty if the rows have no answers.
    """
    texts = {}
    for number, sample in enumerate(chosen):
        found = (sample.extra.get(name) for name in ANSWERS)
        if text := next((text for text in found if isinstance(text, str) and text), None):
            texts[number] = text
    if not texts:
        return []
    encoded = token_ids(load_tokenizer(str(model)), list(texts.values()), [""] * len(texts))
    return [
        changed(
            chosen[number],
            tokens=np.concatenate([chosen[number].prompt_tokens, np.array(ids[:RESPONSE_TOKENS], np.int64)]),
            columns={"action_mask": np.ones(len(ids[:RESPONSE_TOKENS]), dtype=bool)},
            demonstration=True,
        )
        for number, ids in zip(texts, encoded, strict=True)
    ]


def _scored_from(first: int | None, text: Sample) -> Sample:
    """Return a text with token number `first` as its first scored token.

    If `first` is None, only the response is scored.
    """
    return text if first is None else changed(text, prompt_length=first)


def _preference(samples: Sequence[Sample], teacher: str) -> list[Check]:
    """Check the teacher's preference against the rewards of the step's samples."""
    rewarded = [
        e
        for e in samples
        if e.reward is not None and not e.excluded and e.rollout_logprobs is not None and e.taught_by(teacher).any()
    ]
    if not rewarded:
        return []
    differences = [(e.teacher_logprobs[teacher] - e.student_logprobs)[e.taught_by(teacher)] for e in rewarded]
    gaps = [float(difference.mean(dtype=np.float64)) for difference in differences]
    rewards = np.array([e.reward for e in rewarded], dtype=np.float64)
    return [preference_check(np.array(gaps), rewards, [e.group_id for e in rewarded])]


def _size_of(student: ModelInfo, teacher: ModelInfo) -> Check:
    """Check the teacher's number of layers and of parameters, read from the model's files.

    The verdict is a warning if layers may be missing.
    """
    window_layers = read_json(teacher.path / "config.json").get(WINDOW_LAYERS)
    hints = list(lost_layer_hints(teacher.path, teacher.layers, teacher.parameters, window_layers))
    sizes = [f"{one.layers} layers {_counted(one.parameters)}" for one in (teacher, student)]
    meaning = (
        "numbers of layers and parameters of the teacher and the student; a teacher whose files lack the last layers"
        " loads without an error, but is weaker"
    )
    if hints:
        meaning = f"{'; '.join(hints)}: if layers are missing, download the complete model"
    return Check("size", f"{sizes[0]}; student {sizes[1]}", "warning" if hints else "ok", meaning)


def _counted(parameters: int) -> str:
    return f"{parameters / 1e9:.3g} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"


def _in_run(text: Sample, teacher: str, first: int | None) -> np.ndarray:
    """Return the log-prob that the update uses for each scored token of a text.

    The value is NaN for tokens of prompts and for answers from rows, because the update does not use these tokens.
    """
    start = _scored_from(first, text).prompt_length
    found = np.full(len(text.tokens) - start, np.nan, np.float32)
    if not text.demonstration:
        found[text.prompt_length - start :] = text.teacher_logprobs[teacher]
    return found


def _observed(texts: Sequence[Sample], first: int | None) -> np.ndarray:
    """Return a mask of the scored tokens that come from an environment, a tool or a user, bool [N]."""
    places = [np.arange(_scored_from(first, e).prompt_length, len(e.tokens)) - e.prompt_length for e in texts]
    return np.concatenate(
        [(place >= 0) & ~e.action_mask[np.maximum(place, 0)] for e, place in zip(texts, places, strict=True)]
    )


def _uncovered(texts: Sequence[Sample], answers: Sequence[TeacherAnswer], teacher: str) -> np.ndarray:
    """Return a mask of the scored tokens without a log-prob of the teacher, bool [N].

    Only a teacher with another tokenizer has such tokens.
    """
    found = []
    for text, answer in zip(texts, answers, strict=True):
        none = np.zeros(len(answer.logprobs), bool)
        here = none if answer.alignment is None else answer.alignment.chunks == NO_CHUNK
        in_run = text.columns.get(chunks_column(teacher))
        found.append(here if in_run is None else here | (in_run == NO_CHUNK))
    return np.concatenate(found)


def _kinds(texts: Sequence[Sample], special: frozenset[int], first: int | None) -> dict[str, np.ndarray]:
    """Return four masks of the scored tokens, by name, each bool [N].

    - `sampled`: true for tokens of responses from the step.
    - `prompted`: true for tokens of prompts, except special tokens.
    - `answered`: true for tokens of answers from rows.
    - `ended`: true for tokens that end a sample.
    """
    places = [np.arange(_scored_from(first, e).prompt_length, len(e.tokens)) for e in texts]
    of_row = np.concatenate([np.full(len(place), e.demonstration) for e, place in zip(texts, places, strict=True)])
    behind = np.concatenate([place >= e.prompt_length for e, place in zip(texts, places, strict=True)])
    no_special = np.concatenate(
        [~np.isin(e.tokens[place], list(special)) for e, place in zip(texts, places, strict=True)]
    )
    # a chosen sample ends with an action token
    ended = [e.finish_reason == "stop" for e in texts]
    last = np.concatenate([(place == place[-1]) & stopped for place, stopped in zip(places, ended, strict=True)])
    return {
        "sampled": behind & ~of_row,
        "prompted": ~behind & ~of_row & no_special,
        "answered": behind & of_row,
        "ended": last & ~of_row,
    }


def _tokens(student: ModelInfo, teacher: ModelInfo) -> list[Check]:
    """Compare the tokenizers of student and teacher, which are read from the models' files."""
    found = compare_tokenizers(student.path, teacher.path)
    ids = f"{found.only_student} only in the student, {found.only_other} only in the teacher"
    same = (
        f"every token id of the student means the same token for the teacher; the student has {student.vocab} rows"
        f" and the teacher {teacher.vocab} rows, and rows without a token are padding"
    )
    differences = "; ".join(found.differences)
    return [
        Check("token ids", ids, "warning" if found.conflict else "ok", found.conflict or same),
        Check(
            "templates, special tokens",
            f"{len(found.differences)} of them differ" if differences else "the same",
            "warning" if differences else "ok",
            f"{differences}; the run uses the student's version, with which the teacher may not have been trained"
            if differences
            else "comparison of the chat templates, the special tokens, and the tokens that end answers",
        ),
    ]
