"""Keys of distillation from teacher files: the files and the loss.

A teacher file has answers and the teacher's scores of these answers.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from roll_opd.config.schema.key_types import AboveZero, Fraction, Name, Names, NotNegative, Positive
from roll_opd.config.schema.objective_keys import DistillationKeys
from roll_opd.config.schema.section import OURS, Section, key
from roll_opd.config.schema.supervised_keys import HeldOut, Supervised


@dataclass(frozen=True, kw_only=True)
class FileTeacher(Section):
    """`teacher` of pipeline `offline_distill`: parquet files of answers with a teacher's scores."""

    files: Names = key(
        (), "parquet files (or a directory of them) from `roll-opd score`, Lightning-OPD or DistillKit", OURS
    )
    name: Name | None = key(
        None, "name that the teacher must have in every row; default: the name is not checked", OURS
    )
    sft_teacher: Name | None = key(
        None,
        "name of the teacher on whose answers the student was fine-tuned; the run checks that the files have"
        " scores of the same teacher",
        OURS,
    )
    compression: Name | None = key(
        None, "DistillKit's compression_config.yaml; default: the file next to the teacher files", OURS
    )
    opd_kl_coef: NotNegative = key(1.0, "weight of the teacher", OURS)


@dataclass(frozen=True, kw_only=True)
class OfflineDistill(Supervised):
    """Keys of distillation from teacher files, except the keys of its role `student_train`."""

    pipeline = "offline_distill"
    title = "distillation from teacher files"
    role = "student_train"
    algorithm = "sft"
    schema = "scored"

    teacher: FileTeacher = key(FileTeacher(), "the teacher's files", OURS)
    validation: HeldOut | None = key(None, "held-out teacher files, in data_args.file_name")
    opd_objective: Literal["sampled", "topk"] = key(
        "topk",
        "topk: a divergence over the teacher's most likely tokens; sampled: an advantage that is computed from"
        " the tokens of the answers, as in Lightning-OPD. For sampled, the student must have sampled the"
        " answers",
        OURS,
    )
    opd_divergence: str = key("forward_kl", "divergence in the loss (topk): a name in objective.divergences", OURS)
    opd_topk: Positive | None = key(
        None,
        "number of tokens to use in each position (topk), starting with the most likely token; default: all"
        " tokens in the file",
        OURS,
    )
    opd_jsd_beta: Fraction = key(0.5, DistillationKeys.__dataclass_fields__["opd_jsd_beta"].metadata["meaning"], OURS)
    opd_skew_alpha: Annotated[NotNegative, Field(lt=1)] = key(
        0.1, DistillationKeys.__dataclass_fields__["opd_skew_alpha"].metadata["meaning"], OURS
    )
    opd_kl_discount: Fraction = key(
        0.0,
        "discount factor with which the reverse KL of later tokens is added to a token's reverse KL (sampled)",
        OURS,
    )
    advantage_clip: AboveZero | None = key(
        None, "bound on the absolute value of advantages (sampled); default: no bound", OURS
    )
    sft_loss_coef: NotNegative = key(
        0.0, "weight with which the negative log-likelihood of the answers is added to the divergence (topk)", OURS
    )
    teacher_preflight: bool | Literal["warn"] = key(
        True, "check the teacher's log-probs before the first update; warn: continue after a failure", OURS
    )
