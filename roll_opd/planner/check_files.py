"""Checks that read files: models and tokenizers, stop tokens at the ends of turns, and the run directory.

These checks read only small parts of files and write nothing. Problems are recorded in the section that has the key.
"""

import os
import shutil
from pathlib import Path

from roll_opd.base.paths import expanded, find_path
from roll_opd.config.plan import RunPlan
from roll_opd.config.schema import Run, Top, Worker, changed
from roll_opd.data.row_formats import Row
from roll_opd.data.templates import TEMPLATES
from roll_opd.models.model_files import read_json
from roll_opd.models.model_info import ModelFilesError, ModelInfo, same_weights
from roll_opd.models.stop_tokens import StopTokens, TurnEnd, stop_tokens, turn_end
from roll_opd.models.token_bytes import check_format
from roll_opd.models.tokenizer_comparison import TokenizerComparison, compare_tokenizers
from roll_opd.models.tokenizer_files import has_chat_template, has_tokenizer, largest_token_id
from roll_opd.planner.role_reader import MODEL
from roll_opd.planner.row_plans import Rows, data_sets
from roll_opd.planner.validate_sections import Sections

CHECKPOINT_BYTES_PER_PARAMETER = 16  # weights, fp32 master weights and two Adam moments, 4 bytes each
MAX_NAME_BYTES = 255  # bytes of a directory's name
RUN_ID_BYTES = len("-20261121-034730-65677a")  # what follows exp_name in the name of a directory of logs


def compare_models(roles: Sections) -> None:
    """Check that the models of the roles match.

    The rollout must run the trained model. A teacher that the run loads itself must be another model than the student,
    unless it follows the student, has more context, or `allow_self_teacher` is true. All models must have the same
    token ids, unless a teacher is aligned.
    """
    train, infer, top = roles.train, roles.infer, roles.top
    if train is None or train.info is None:
        return
    _check_vocabulary(train)
    if infer is not None and infer.info is not None and infer.info.path != train.info.path:
        infer.diag.error(
            MODEL, f"{infer.info.path} is not the model that {train.path} trains ({train.info.path}); remove this key"
        )
    for other, what in ((roles.reference, "reference policy"), (roles.critic, "critic")):
        if other is not None and (found := _comparison(train, other, what)):
            _report(found, other, what)
    may_be_itself = isinstance(top, Top) and top.allow_self_teacher
    check = top.teacher_tokenizer_check if isinstance(top, Top) else "strict"
    for name, role in roles.teachers.items():
        if role.info is None:
            continue
        if not (may_be_itself or role.follows or role.has_context or role.external):
            with role.diag.catching(MODEL):
                if same_weights(train.info, role.info):
                    same = "path" if train.info.path == role.info.path else "weights"
                    role.diag.error(
                        MODEL,
                        f"the teacher has the student's {same} ({role.info.path}), so it teaches nothing; give another"
                        " model, more context (hint, system_prompt), or set allow_self_teacher: true",
                    )
        found = _comparison(train, role, "teacher")
        if found is None:
            continue
        if check == "align" and found.conflict:
            _check_alignment(train, role, found.conflict)
            roles.teachers[name] = changed(role, {"is_aligned": True})
            _check_vocabulary(role)
            continue
        _report(found, role, "teacher", check != "warn")
        _check_vocabulary(role)
        if role.info.vocab < train.info.vocab:
            role.diag.note(
                "",
                f"the teacher has {role.info.vocab} token ids, the student {train.info.vocab}; the additional"
                " ids are padding, which the student must not sample; opd_objective: sampled normalises its log-probs"
                " over all ids, also these",
            )


def _comparison(train: Worker, role: Worker, what: str) -> TokenizerComparison | None:
    """Compare the tokenizers of student and `role`; return None if a file cannot be read."""
    models = [one.info for one in (train, role) if one.info and has_tokenizer(one.info.path)]
    if len(models) == 2:  # the reader of roles reports missing tokenizers
        with role.diag.catching(MODEL, ModelFilesError):
            return compare_tokenizers(models[0].path, models[1].path, what)
    return None


def _report(found: TokenizerComparison, role: Worker, what: str, refuses: bool = True) -> None:
    """Report the differences of the tokenizers of student and `role`.

    A token that differs is an error, or a warning if `refuses` is False. All other differences are warnings.
    """
    sentence = f"the tokenizers of student and {what} differ: {found.conflict}"
    if found.conflict and refuses:
        way_out = (
            ", or set teacher_tokenizer_check: align (the teacher reads the text in its own tokens) or warn (it gets"
            " the student's ids)"
            if what == "teacher"
            else ""
        )
        role.diag.error(
            MODEL,
            f"{sentence}; a {what} scores only its own tokens, so give a model of the student's family{way_out}",
        )
    elif found.conflict:
        role.diag.note(MODEL, f"{sentence}; its log-probs of the differing tokens are meaningless")
    if found.differences:
        counts = "the student's tokenizer and template are used"
        if what == "teacher":
            own = getattr(role, "template", None)
            counts = f"the teacher reads template {own}" if own else f"{counts} unless you set `template: native`"
        role.diag.note(
            "",
            f"the tokenizers of student and {what} differ, but not in their token ids:"
            f" {'; '.join(found.differences)}; {counts}",
        )


def _check_alignment(train: Worker, role: Worker, conflict: str) -> None:
    """Check that the tokens of student and teacher can be aligned."""
    with role.diag.catching(MODEL, ModelFilesError):
        for info in (train.info, role.info):
            if info and (info.path / "tokenizer.json").is_file():
                check_format(read_json(info.path / "tokenizer.json"))
        role.diag.note(
            MODEL,
            f"the tokenizers of student and teacher differ: {conflict}; the teacher reads the response in its own"
            " tokens, aligned by bytes (teacher_tokenizer_check: align)",
        )


def _check_vocabulary(role: Worker) -> None:
    with role.diag.catching(MODEL, ModelFilesError):
        largest = largest_token_id(role.info.path) if role.info else None
        if role.info and largest is not None and largest >= role.info.vocab:
            role.diag.error(
                MODEL,
                f"the tokenizer uses token id {largest}, but the model has only {role.info.vocab} (vocab_size);"
                " give model and tokenizer of the same release",
            )


def turn_end_warnings(plan: RunPlan, rows: Rows) -> list[str]:
    """Return a warning for each template whose turns do not end with a stop token of the student."""
    path, rollout = Path(plan.student.model.path), plan.rollout
    stops = rollout.sampling.stop if rollout else ()
    try:
        tokens = stop_tokens(path, rollout.engine_args if rollout else {})
        ends = {
            name: turn_end(path, TEMPLATES[name].source)
            for name in sorted(_templates(plan, rows))
            if TEMPLATES[name].whole
        }
    except (ModelFilesError, OSError, KeyError, TypeError, ValueError):
        return []  # unreadable files are reported by the part that needs them
    own = {name: _sentence(end, tokens, stops, path, learns=rollout is None) for name, end in ends.items() if end}
    key = f"{plan.student.name}.model_args.model_name_or_path"
    return list(dict.fromkeys(f"{key}: template {name} {warning}" for name, warning in own.items() if warning))


def missing_templates(plan: RunPlan, rows: Rows) -> list[str]:
    """Return a problem for each teacher that needs the chat template of its tokenizer if this tokenizer has none."""
    found, of_rows = [], _templates(plan, rows)
    for context in (teacher.context for teacher in plan.teachers):
        if context is None or context.tokenizer is None or has_chat_template(Path(context.tokenizer)):
            continue
        used = {context.template} if context.template and of_rows else of_rows
        names = sorted(name for name in used if TEMPLATES[name].is_of_tokenizer)
        if names:
            found.append(
                f"{context.key}.template: template {names[0]} is the chat template of a tokenizer, but the tokenizer"
                f" {context.tokenizer} has none; write {context.key}.template: chatml, or put the teacher's template"
                f" into {Path(context.tokenizer) / 'chat_template.jinja'}"
            )
    return found


def _sentence(end: TurnEnd, tokens: StopTokens, stops: tuple[str, ...], path: Path, *, learns: bool) -> str | None:
    """Return a warning with a remedy if a turn ends without a stop token, else None.

    `learns` is True in a supervised run, in which the student is trained on the turns.
    """
    if tokens.ids.intersection(end.ids) or any(stop in end.text for stop in stops):
        return None
    if end.ids:
        file = path / "generation_config.json"
        what = f"ends a turn with {end.names[0]} (id {end.ids[0]}), no stop token: generation stops at {tokens.words}"
        remedy = f"add {end.ids[0]} to eos_token_id in {file} (exports keep this file)"
        if not learns:
            remedy += f", or write generating_args.stop_strings: ['{end.names[0]}']"
    elif end.text:
        what = f"ends a turn with the text {end.text!r}, which is not a token: generation stops at {tokens.words}"
        remedy = "use a template that ends turns with a stop token"
        remedy += "" if learns else f", or write generating_args.stop_strings: [{end.text!r}]"
    elif learns:
        what = f"writes no token after an answer, so no stop is learned; generation stops at {tokens.words}"
        return f"{what}. Use a template that ends turns with a stop token"
    else:
        return None
    result = "a model trained on it does not stop" if learns else "an answer continues to response_length"
    return f"{what}, so {result}; {remedy}"


def _templates(plan: RunPlan, rows: Rows) -> set[str]:
    """Return the names of the templates that a run applies to conversations. `rows` are the first rows of its data."""
    if plan.workflow:
        return {"native"}
    return {
        data.tag_templates.get(row.tag, data.template)
        for key, data in data_sets(plan).items()
        for row in rows[key]
        if isinstance(row, Row) and row.prompt is None and (plan.validation is None or data is not plan.validation.data)
    }


def check_output(top: Run, exp_name: str, student: ModelInfo | None) -> str:
    """Return `output_dir` with `~` expanded.

    This function also checks that the run directory can be created, and that the disk has enough space.
    """
    if not exp_name or "/" in exp_name or exp_name in (".", ".."):
        top.diag.error("exp_name", f"{exp_name!r} cannot name a directory; use letters, digits, - and _")
    elif len(os.fsencode(exp_name)) > MAX_NAME_BYTES:
        top.diag.error("exp_name", f"{exp_name!r} is longer than the {MAX_NAME_BYTES} bytes of a directory's name")
    else:
        with top.diag.catching("output_dir"):
            place = _writable_place(top, "output_dir", expanded(top.output_dir).absolute() / exp_name)
            _check_space(top, place, student)
    return os.path.expanduser(top.output_dir)


def check_logging(top: Run, exp_name: str) -> str | None:
    """Return `logging_dir` with `~` expanded. This function also checks that the directory of the logs can be made."""
    if top.logging_dir is None:
        return None
    with top.diag.catching("logging_dir"):
        _writable_place(top, "logging_dir", expanded(top.logging_dir).absolute())
    if MAX_NAME_BYTES - RUN_ID_BYTES < len(os.fsencode(exp_name)) <= MAX_NAME_BYTES:  # a longer one is refused anyway
        top.diag.error(
            "logging_dir",
            f"<exp_name>-<run> is longer than the {MAX_NAME_BYTES} bytes of a directory's name; shorten exp_name",
        )
    return os.path.expanduser(top.logging_dir)


def _writable_place(top: Run, key: str, wanted: Path) -> Path | None:
    """Return the lowest existing directory of the path `wanted`, or None if `wanted` cannot be made there."""
    place = next(parent for parent in (wanted, *wanted.parents) if parent.exists())
    if not place.is_dir():
        top.diag.error(key, f"{place} is a file, so {wanted} cannot be made; choose another directory")
    elif not os.access(place, os.W_OK | os.X_OK):
        top.diag.unsupported_here(key, f"{place} may not be written; choose another directory")
    else:
        return place
    return None


def _check_space(top: Run, place: Path | None, student: ModelInfo | None) -> None:
    if place is not None and student is not None:
        needed = student.parameters * CHECKPOINT_BYTES_PER_PARAMETER
        free = shutil.disk_usage(place).free
        if free < needed:
            top.diag.unsupported_here(
                "output_dir",
                f"a checkpoint of {student.parameters:,} parameters takes {needed / 2**30:.1f} GiB, but {place} has"
                f" {free / 2**30:.1f} GiB free; choose another directory",
            )


def read_resume(top: Run) -> bool | str:
    """Return what a run resumes from.

    - False: start from step 0.
    - True: resume from the newest checkpoint of the experiment.
    - a path: resume from this directory.
    """
    if isinstance(top.resume_from_checkpoint, bool):
        return top.resume_from_checkpoint
    with top.diag.catching("resume_from_checkpoint"):
        found = find_path(top.resume_from_checkpoint)
        if found is not None and found.is_dir():
            return str(found)
        top.diag.error(
            "resume_from_checkpoint",
            f"{top.resume_from_checkpoint!r} is not a directory; give a run or checkpoint directory, or true",
        )
    return False
