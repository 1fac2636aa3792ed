"""The teacher preflight: before anything is learned from a teacher, student and teacher read a few samples, and
`teachers.teacher_checks` judges what they say. See docs/teacher-preflight.md.

The samples are the first that the run would learn from: nothing more is generated, and the very numbers of the first
update are held against a second computation. No random state is touched, so a run learns the same with and without.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from roll_opd.base.failures import RunError
from roll_opd.config.plan import RunPlan
from roll_opd.data.templates import load_tokenizer, token_ids
from roll_opd.models.model_files import read_json
from roll_opd.models.model_info import ModelInfo, read_model
from roll_opd.models.tokenizer_files import added_ids, compare_tokenizers
from roll_opd.models.weight_files import WINDOW_LAYERS, lost_layer_hints
from roll_opd.pipelines.run_logger import RunLogger
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.roles.policy_roles import FrozenModel, Student, Teacher, gathered
from roll_opd.samples.experience import Experience, as_read_by
from roll_opd.teachers.teacher_checks import Check, Readings, Settings, checks
from roll_opd.teachers.teacher_preference import preference_check
from roll_opd.teachers.teacher_reach import changes, difference, reach, reach_check

PREFLIGHT_SAMPLES = 64  # read by student and teacher; and of the rows' own answers, as many
RESPONSE_TOKENS, ALL_TOKENS = 256, 4096  # action tokens of each response, and tokens of all samples together
ENOUGH, MOST_TOKENS = 256, 16_384  # samples are added up to so many action tokens, or so many tokens in all
FEWEST = 4  # samples, however long
REPEATED = 8  # texts that the teacher reads a second time: what changes from call to call does so in any
TOPK = 16
ANSWERS = ("response", "completion", "output", "solution", "answer")  # columns in which rows may bring an answer


class TeacherPreflight:
    """Checks each teacher of a run on the first samples that it has scored."""

    def __init__(
        self, plan: RunPlan, workers: RunWorkers, logger: RunLogger, demonstrations: Sequence[Experience] = ()
    ) -> None:
        self._plan, self._student, self._logger = plan, workers.student, logger
        self._demonstrations = demonstrations
        self._left = list(workers.frozen_models.teachers) if plan.teacher_preflight is not False else []

    async def check(self, experiences: Sequence[Experience], temperature: float) -> None:
        """Check, print and log every teacher that has scored some of `experiences` and was not checked before.

        RunError where one fails, unless the plan only warns.
        """
        for teacher in list(self._left):
            taught = [e for e in experiences if teacher.plan.name in e.teacher_logprobs]
            chosen = _chosen(taught)
            if not chosen:
                continue
            self._left.remove(teacher)
            rows = [*await self._check(teacher, chosen, temperature), *_preference(taught, teacher.plan.name)]
            self._logger.teacher_preflight(teacher.plan.name, rows)
            failed = next((row for row in rows if row.verdict == "failed"), None)
            if failed and self._plan.teacher_preflight != "warn":
                raise RunError(
                    f"the preflight of teacher {teacher.plan.name} failed: {failed.check}: {failed.value};"
                    f" {failed.meaning}. Set teacher_preflight: warn to go on all the same"
                )

    async def _check(self, teacher: Teacher, chosen: Sequence[Experience], temperature: float) -> list[Check]:
        own, theirs = (Path(plan.model.path) for plan in (self._student.plan, teacher.plan.source))
        models = [read_model(path) for path in (own, theirs)]
        sizes = [model.vocab for model in models]
        shared = min(sizes)
        answers = _chosen(self._demonstrations) or _answers(chosen, own)
        texts = [*chosen, *answers]
        # of a teacher with another prompt than the student's, what both read is the responses
        first = None if teacher.plan.context else 1
        read_by_student = [_scored_from(first, e) for e in texts]
        read_by_teacher = [as_read_by(teacher.plan.name, e) for e in read_by_student]

        async def read(
            texts: Sequence[Experience], role: Student | FrozenModel, **wanted: Any
        ) -> list[dict[str, np.ndarray]]:
            return await gathered(
                role.group, "compute_targets", texts, temperature, topk=min(TOPK, shared), vocab_size=shared, **wanted
            )

        by_student = await read(read_by_student, self._student)
        by_teacher = await read(read_by_teacher, teacher, plain=True)
        repeated = read_by_teacher[:REPEATED]
        again = await read(repeated, teacher)
        altered = changes([e.tokens for e in repeated])
        read_altered = await read(
            [replace(e, tokens=c.tokens) for e, c in zip(repeated, altered, strict=True)], teacher
        )
        readings = Readings(
            student_logprobs=_column(by_student, "logprobs"),
            student_ids=_column(by_student, "topk_ids"),
            student_topk=_column(by_student, "topk_logprobs"),
            teacher_logprobs=_column(by_teacher, "logprobs"),
            teacher_ids=_column(by_teacher, "topk_ids"),
            teacher_topk=_column(by_teacher, "topk_logprobs"),
            teacher_plain=_column(by_teacher, "plain_logprobs"),
            again=_column(again, "logprobs"),
            in_run=np.concatenate([_in_run(e, teacher.plan.name, first) for e in texts]),
            **_kinds(texts, added_ids(own), first),
        ).without(_observed(texts, first))
        exact = teacher.plan.source.model.dtype == "fp32"
        settings = Settings(temperature, exact, shared, reads_more=teacher.plan.context is not None)
        rows = [_size_of(*models), *checks(readings, settings)]
        reaches = [
            reach(difference(before, after), text.prompt_length, change.end)
            for text, change, before, after in zip(repeated, altered, again, read_altered, strict=True)
            if change.differs
        ]
        if reaches and not np.isnan(readings.teacher_topk).any():
            rows.append(reach_check(reaches))
        return [*rows, *_tokens(own, theirs, sizes)]


def _chosen(experiences: Sequence[Experience]) -> list[Experience]:
    """Return a few samples, spread over the step; more of them if their turns are short."""
    cut = [_cut(experience) for experience in experiences]
    written = [experience for experience in cut if experience.action_tokens]
    stride = max(1, -(-len(written) // PREFLIGHT_SAMPLES))
    chosen: list[Experience] = []
    tokens = actions = 0
    for experience in (one for first in range(stride) for one in written[first::stride]):
        enough = actions >= ENOUGH
        tokens += len(experience.tokens)
        over = tokens > (ALL_TOKENS if enough else MOST_TOKENS)
        if len(chosen) >= FEWEST and (over or (enough and len(chosen) >= PREFLIGHT_SAMPLES)):
            break
        chosen.append(experience)
        actions += experience.action_tokens
    return chosen


def _cut(experience: Experience) -> Experience:
    """Return a sample truncated after the first `RESPONSE_TOKENS` action tokens of its response."""
    actions = np.flatnonzero(experience.action_mask[:ALL_TOKENS])[:RESPONSE_TOKENS]
    length = int(actions[-1]) + 1 if len(actions) else 0
    is_whole = len(actions) == experience.action_tokens
    return replace(
        experience,
        tokens=experience.tokens[: experience.prompt_length + length],
        action_mask=experience.action_mask[:length],
        finish_reason=experience.finish_reason if is_whole else "length",
    )


def _column(answers: Sequence[dict[str, np.ndarray]], name: str) -> np.ndarray:
    return np.concatenate([answer[name] for answer in answers])


def _answers(chosen: Sequence[Experience], model: Path) -> list[Experience]:
    """Return the prompts of samples with the answers that their rows bring beside them; none where they bring none."""
    texts = {}
    for number, experience in enumerate(chosen):
        found = (experience.extra.get(name) for name in ANSWERS)
        if text := next((text for text in found if isinstance(text, str) and text), None):
            texts[number] = text
    if not texts:
        return []
    encoded = token_ids(load_tokenizer(str(model)), list(texts.values()), [False] * len(texts))
    return [
        replace(
            chosen[number],
            tokens=np.concatenate([chosen[number].prompt_tokens, np.array(ids[:RESPONSE_TOKENS], np.int64)]),
            action_mask=np.ones(len(ids[:RESPONSE_TOKENS]), dtype=bool),
            demonstration=True,
        )
        for number, ids in zip(texts, encoded, strict=True)
    ]


def _scored_from(first: int | None, text: Experience) -> Experience:
    """Return `text` as one whose tokens are scored from number `first` on; None: those of its response."""
    return text if first is None else replace(text, prompt_length=first)


def _preference(samples: Sequence[Experience], teacher: str) -> list[Check]:
    """Compare the teacher's preference with the rewards of those samples of the step that have one already."""
    rewarded = [
        e
        for e in samples
        if e.reward is not None and not e.excluded and e.action_tokens and e.rollout_logprobs is not None
    ]
    if not rewarded:
        return []
    gaps = [float(e.acted(e.teacher_logprobs[teacher] - e.student_logprobs).mean(dtype=np.float64)) for e in rewarded]
    rewards = np.array([e.reward for e in rewarded], dtype=np.float64)
    return [preference_check(np.array(gaps), rewards, [e.group_id for e in rewarded])]


def _size_of(student: ModelInfo, teacher: ModelInfo) -> Check:
    """State what the teacher is by its files, with hints that it was once larger."""
    window_layers = read_json(teacher.path / "config.json").get(WINDOW_LAYERS)
    hints = list(lost_layer_hints(teacher.path, teacher.layers, teacher.parameters, window_layers))
    sizes = [f"{one.layers} layers {_counted(one.parameters)}" for one in (teacher, student)]
    meaning = "layers and parameters; a model that has lost its last layers is a whole model, and a weaker teacher"
    if hints:
        meaning = f"{'; '.join(hints)}: if it has lost layers, get the whole model"
    return Check("size", f"{sizes[0]}; student {sizes[1]}", "warning" if hints else "ok", meaning)


def _counted(parameters: int) -> str:
    return f"{parameters / 1e9:.3g} B" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"


def _in_run(text: Experience, teacher: str, first: int | None) -> np.ndarray:
    """Return what the run will learn from at every scored token; NaN in prompts and in answers that nobody sampled."""
    start = _scored_from(first, text).prompt_length
    found = np.full(len(text.tokens) - start, np.nan, np.float32)
    if not text.demonstration:
        found[text.prompt_length - start :] = text.teacher_logprobs[teacher][: text.response_length]
    return found


def _observed(texts: Sequence[Experience], first: int | None) -> np.ndarray:
    """Return which scored tokens are observed: written by an environment, a tool or a user. bool [N]."""
    places = [np.arange(_scored_from(first, e).prompt_length, len(e.tokens)) - e.prompt_length for e in texts]
    return np.concatenate(
        [(place >= 0) & ~e.action_mask[np.maximum(place, 0)] for e, place in zip(texts, places, strict=True)]
    )


def _kinds(texts: Sequence[Experience], special: frozenset[int], first: int | None) -> dict[str, np.ndarray]:
    """Say of every scored token whether it was sampled, is of a prompt or of a row's answer, or ended a sample."""
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


def _tokens(own: Path, theirs: Path, sizes: Sequence[int]) -> list[Check]:
    """Compare the tokens of student and teacher, by their files."""
    found = compare_tokenizers(own, theirs)
    ids = f"{found.only_student} only in the student, {found.only_other} only in the teacher"
    same = (
        "every token that the student writes is the same to the teacher; the models have"
        f" {sizes[0]} and {sizes[1]} rows, those without a token are padding"
    )
    differences = "; ".join(found.differences)
    return [
        Check("token ids", ids, "warning" if found.conflict else "ok", found.conflict or same),
        Check(
            "templates, special tokens",
            f"{len(found.differences)} of them differ" if differences else "the same",
            "warning" if differences else "ok",
            f"{differences}; the student's count, and the teacher reads what it may not be used to"
            if differences
            else "chat template, special tokens and end of answers",
        ),
    ]
