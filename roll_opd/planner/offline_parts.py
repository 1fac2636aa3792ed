"""Plan distillation from teacher files: rows, teacher and objective."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import DataPlan, FilePlan, ObjectivePlan, TeacherPlan, ValidationPlan
from roll_opd.config.schema import ChatKeys, OfflineDistill, RowKeys, Worker, keys_of, shared
from roll_opd.data.files import find_files
from roll_opd.data.rows import DataError
from roll_opd.data.teacher_files import SCHEMA, FileFacts, facts_of
from roll_opd.objective.algorithms import DIVERGENCE_NAMES
from roll_opd.objective.registry import POLICY_LOSSES

PLANNED = frozenset(keys_of(OfflineDistill)) - {"sft_loss_coef"}  # keys whose values are in other fields of the plan
TOPK_ONLY = ("opd_topk", "opd_divergence", "sft_loss_coef")
SAMPLED_ONLY = ("opd_kl_discount", "advantage_clip")
TEACHER = "teacher"  # name of the teacher in the plan, metrics and records


def fields(top: OfflineDistill, train: Worker) -> dict[str, Any]:
    """Return the fields of the plan that follow from the teacher's files. Problems are reported at their keys."""
    if train.data_args.file_name:
        train.data_args.diag.error("file_name", "has no effect, as the rows come from teacher.files; remove it")
    for key in keys_of(ChatKeys).keys() & top.written:
        top.diag.error(key, "has no effect, as the prompts of teacher files are tokens; remove it")
    if top.algorithm_type:
        top.diag.error("algorithm_type", f"{top.algorithm_type} has no effect: opd_objective sets the loss; remove it")
    files = _files(top.teacher.files, top.teacher.diag, "files")
    facts = FileFacts(None, None)
    data = held_out = None
    if files:
        with top.teacher.diag.catching("files", DataError):
            facts = facts_of(files, top.teacher.compression)
        data = _rows(top, files)
    elif not top.teacher.files:
        top.teacher.diag.error("files", "is missing; name the parquet files of `roll-opd score --topk`")
    if top.validation is not None:
        args = top.validation.data_args
        if not args.file_name:
            args.diag.error("file_name", "is missing; name a teacher file with held-out rows")
        elif found := _files(args.file_name, args.diag, "file_name"):
            held_out = _rows(top, found)
    own = top.teacher
    source = FilePlan(TEACHER, tuple(files), own.compression, own.name, own.sft_teacher)
    return {
        "data": data,
        "validation": ValidationPlan(held_out) if held_out else None,
        "objective": _objective(top, train, facts),
        "teachers": (TeacherPlan(TEACHER, source, own.opd_kl_coef),),
    }


def _files(names: Sequence[str], diag: Diagnostics, key: str) -> list[str]:
    found: list[Path] = []
    for name in names:
        with diag.catching(key, DataError):
            found += find_files(name, None)
    return list(map(str, found))


def _rows(top: OfflineDistill, files: Sequence[str]) -> DataPlan:
    length = top.sequence_length
    return DataPlan(tuple(files), length, schema=SCHEMA, length_key="sequence_length", **shared(RowKeys, top))


def _objective(top: OfflineDistill, train: Worker, facts: FileFacts) -> ObjectivePlan:
    is_topk = top.opd_objective == "topk"
    for key in SAMPLED_ONLY if is_topk else TOPK_ONLY:
        if key in top.written:
            top.diag.note(key, f"has no effect with opd_objective: {top.opd_objective}")
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
            f"the log-probs of the files are normalised over {facts.vocab_size} token ids, but the student has"
            f" {student}; score with --vocab-size {student}",
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
