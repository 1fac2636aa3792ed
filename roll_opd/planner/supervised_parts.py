"""Plan runs on rows with answers: the rows, the loss, the number of steps, and the scores of teacher files."""

from dataclasses import replace
from typing import Any

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import DataPlan, FilePlan, ObjectivePlan, TeacherPlan, ValidationPlan
from roll_opd.config.schema import (
    ChatKeys,
    EpochArgs,
    OfflineDistill,
    RowKeys,
    Supervised,
    Worker,
    changed,
    keys_of,
    shared,
    unread,
)
from roll_opd.data.row_files import count_rows, whole_steps
from roll_opd.data.row_formats import DataError
from roll_opd.data.teacher_files import SCHEMA, FileFacts, facts_of
from roll_opd.objective.algorithms import DIVERGENCE_NAMES, KL_LOSS_COEF, algorithm, loss_facts
from roll_opd.objective.registry import POLICY_LOSSES, AlgorithmError
from roll_opd.planner import device_mapping, lengths_and_batches, role_parts, row_plans
from roll_opd.planner.validate_sections import Sections

PLANNED = frozenset(keys_of(OfflineDistill)) - {"sft_loss_coef"}  # keys whose values are in other fields of the plan
TEACHER = "teacher"  # name of the teacher in the plan, metrics and records


def fields(sections: Sections) -> dict[str, Any] | None:
    """Check a run on rows with answers; return the fields that only its plan has, or None if problems were reported."""
    top, train = sections.top, sections.train
    if not isinstance(top, Supervised) or train is None:
        return None
    device_mapping.check_devices(sections.placed(), top)
    length = top.sequence_length
    lengths_and_batches.check_positions(top, sections.all(), length, str(length), "sequence_length")
    if isinstance(top, OfflineDistill):
        found = _teacher_file_fields(top, train)
    else:
        found = _rows(top, train) | {"objective": _objective(top)}
    lengths_and_batches.check_micro_batches(sections.all(), length, answers=top.answers)
    rows, update = lengths_and_batches.rows_per_step(top, train)
    steps, epochs = _steps(top, train, found["data"], rows)
    if top.diag.problems or found["data"] is None:
        return None
    own = sorted(keys_of(type(top)).keys() - keys_of(Supervised) - PLANNED)
    student = changed(train, {"mini_batch": update * top.answers})
    return {
        **found,
        "mode": top.pipeline,
        "pipeline": top.pipeline,
        "pipeline_args": FrozenDict({key: getattr(top, key) for key in own}),
        "title": top.title,
        "max_steps": steps,
        "rollout_batch_size": rows,
        "student": role_parts.train_plan(student, top, steps * (rows // update), top.answers),
        "teacher_preflight": getattr(top, "teacher_preflight", True),
        "reference": role_parts.megatron_plan(sections.reference, top, train) if sections.reference else None,
        "epochs": epochs,
        "logged_samples_per_step": 0,
    }


def _rows(top: Supervised, train: Worker) -> dict[str, Any]:
    """Return the plan's rows of training and of validation."""
    args, held_out, length = train.data_args, None, top.sequence_length
    data = row_plans.read_answers(args, top, top, length, "sequence_length", top.schema)
    if top.validation is not None:
        rows = top.validation.data_args
        held_out = row_plans.read_answers(rows, top, top, length, "sequence_length", top.schema, args)
    if data is not None:
        data = replace(data, streams=row_plans.read_streams(args, data))
    return {"data": data, "validation": ValidationPlan(held_out) if held_out else None}


def _objective(top: Supervised) -> ObjectivePlan:
    """Return the loss of the run, with its arguments.

    The loss is that of `algorithm_type`, or of the pipeline if this key is not set.
    """
    name = top.algorithm_type or top.algorithm
    objective = ObjectivePlan(paired=top.answers == 2, kl_loss="k2", gamma=0.0)
    try:
        row = algorithm(name)
        loss = POLICY_LOSSES.located(row.policy_loss)
    except AlgorithmError as error:
        top.diag.error("algorithm_type", str(error))
        return objective
    if row.schema != top.schema:
        reads = f"but this pipeline reads {top.schema}"
        top.diag.error("algorithm_type", f"{name} trains on rows of schema {row.schema}, {reads}")
    for key, sentence in top.refusals().items():
        top.diag.unsupported(key, sentence)
    arguments = {key: value for key in top.loss_arguments if (value := getattr(top, key)) is not None}
    own = loss_facts(row.policy_loss).loss_agg_mode
    kl_loss_coef = getattr(top, "kl_loss_coef", None)
    if kl_loss_coef is None:  # the KL loss is in the table of Trinity-RFT's algorithms; ROLL's DPO has no KL loss
        kl_loss_coef = KL_LOSS_COEF if top.algorithm_type and row.kl_loss and top.has_reference else 0.0
    if own and top.loss_agg_mode not in (None, own):
        top.diag.error(
            "loss_agg_mode",
            f"policy loss {row.policy_loss} gives one value per pair, and {top.loss_agg_mode} would weight pairs by"
            f" their length; use {own}",
        )
    return replace(
        objective,
        policy_loss=loss,
        policy_loss_args=FrozenDict({**row.policy_loss_args, **arguments}),
        kl_loss_coef=kl_loss_coef,
        loss_agg_mode=top.loss_agg_mode or own or row.loss_agg_mode,
        loss_normaliser=float(top.sequence_length),
    )


def _steps(top: Supervised, train: Worker, data: DataPlan | None, rows: int) -> tuple[int, float | None]:
    """Return (steps, epochs) of the run; `epochs` is None if max_steps sets the number of steps."""
    args = train.training_args
    assert isinstance(args, EpochArgs)
    epochs, key = args.num_train_epochs, "num_train_epochs"
    if top.max_steps is not None and top.max_steps > 0:
        if epochs:
            args.diag.note(key, f"{epochs:g} has no effect with max_steps {top.max_steps}")
        return top.max_steps, None
    if not epochs:
        top.diag.error("max_steps", f"is missing; write it, or {args.diag.at(key)}")
    elif data is not None:
        with train.data_args.diag.catching("file_name", DataError):
            found = count_rows(data)
            if steps := whole_steps(epochs, found, rows):
                return steps, epochs
            args.diag.error(key, f"{epochs:g} epochs of {found} rows are less than a step of {rows}; write max_steps")
    return 1, None


def _teacher_file_fields(top: OfflineDistill, train: Worker) -> dict[str, Any]:
    """Return the fields of the plan that follow from the teacher's files. Problems are reported at their keys."""
    if train.data_args.file_name:
        train.data_args.diag.error("file_name", "has no effect, as the rows come from teacher.files; remove it")
    for key in keys_of(ChatKeys).keys() & top.written:
        top.diag.error(key, "has no effect, as the prompts of teacher files are tokens; remove it")
    if top.algorithm_type:
        top.diag.error("algorithm_type", f"{top.algorithm_type} has no effect: opd_objective sets the loss; remove it")
    files = row_plans.readable_files(top.teacher.files, None, top.teacher.diag, "files") or ()
    facts = FileFacts(None, None)
    data = held_out = None
    if files:
        with top.teacher.diag.catching("files", DataError):
            facts = facts_of(files, top.teacher.compression)
        data = _rows_of_files(top, files)
    elif not top.teacher.files:
        top.teacher.diag.error("files", "is missing; name the parquet files of `roll-opd score --topk`")
    if top.validation is not None:
        args = top.validation.data_args
        if not args.file_name:
            args.diag.error("file_name", "is missing; name a teacher file with held-out rows")
        elif found := row_plans.readable_files(args.file_name, None, args.diag, "file_name"):
            held_out = _rows_of_files(top, found)
    own = top.teacher
    source = FilePlan(TEACHER, files, own.compression, own.name, own.sft_teacher)
    return {
        "data": data,
        "validation": ValidationPlan(held_out) if held_out else None,
        "objective": _distillation(top, train, facts),
        "teachers": (TeacherPlan(TEACHER, source, own.opd_kl_coef),),
    }


def _rows_of_files(top: OfflineDistill, files: tuple[str, ...]) -> DataPlan:
    length = top.sequence_length
    return DataPlan(files, length, schema=SCHEMA, length_key="sequence_length", **shared(RowKeys, top))


def _distillation(top: OfflineDistill, train: Worker, facts: FileFacts) -> ObjectivePlan:
    is_topk = top.opd_objective == "topk"
    for key, condition in unread(top, {}).items():
        top.diag.note(key, f"has no effect without {condition.replace('|', ' or ')}")
    top.diag.is_one_of("opd_divergence", top.opd_divergence, DIVERGENCE_NAMES)
    common: dict[str, Any] = {
        "gamma": 0.0,
        "loss_agg_mode": top.loss_agg_mode or "token-mean",
        "loss_normaliser": float(top.sequence_length),
        "opd_objective": top.opd_objective,
    }
    if not is_topk:
        return ObjectivePlan(
            **common,
            policy_loss=POLICY_LOSSES.located("importance_sampling"),
            opd_kl_discount=top.opd_kl_discount,
            advantage_clip=top.advantage_clip,
        )
    if top.opd_topk and facts.topk and top.opd_topk > facts.topk:
        top.diag.error("opd_topk", f"{top.opd_topk} is more than the {facts.topk} tokens in the files; lower it")
    student = train.info.vocab if train.info else 0
    if facts.vocab_size and student and facts.vocab_size > student:
        top.teacher.diag.note(
            "files",
            f"are normalised over {facts.vocab_size} token ids, but the student has {student}; score with --vocab-size"
            f" {student}",
        )
    return ObjectivePlan(
        **common,
        policy_loss=POLICY_LOSSES.located("sft"),
        rl_loss_coef=top.sft_loss_coef,
        opd_divergence=top.opd_divergence,
        opd_topk=top.opd_topk or facts.topk or 1,  # 1 if the rows have no top-k, in which case each row is refused
        opd_jsd_beta=top.opd_jsd_beta,
        opd_skew_alpha=top.opd_skew_alpha,
        opd_vocab_size=min(facts.vocab_size or student, student) or None,
    )
