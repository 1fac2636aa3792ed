"""Keys of distillation from teacher files: answers with a teacher's scores, and the loss on them."""

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

    files: Names = key((), "parquet files of `roll-opd score`, Lightning-OPD or DistillKit; or a directory", OURS)
    name: Name | None = key(None, "name that the teacher has in every row; default: any, and not compared", OURS)
    sft_teacher: Name | None = key(
        None, "name of the teacher whose answers the student was fine-tuned on; compared with the files' teacher", OURS
    )
    compression: Name | None = key(
        None, "DistillKit's compression_config.yaml; default: the one next to the files", OURS
    )
    opd_kl_coef: NotNegative = key(1.0, "weight of the teacher", OURS)


@dataclass(frozen=True, kw_only=True)
class OfflineDistill(Supervised):
    """Keys of distillation from teacher files, except those of its role `student_train`."""

    pipeline = "offline_distill"
    title = "distillation from teacher files"
    role = "student_train"
    algorithm = "sft"
    schema = "scored"

    teacher: FileTeacher = key(FileTeacher(), "the teacher's files", OURS)
    validation: HeldOut | None = key(None, "held-out teacher files, as data_args.file_name")
    opd_objective: Literal["sampled", "topk"] = key(
        "topk",
        "topk: a divergence over the teacher's most likely tokens; sampled: an advantage from the answers' tokens,"
        " which the student must have sampled (Lightning-OPD)",
        OURS,
    )
    opd_divergence: str = key("forward_kl", "divergence of topk: a name of algorithms.divergences", OURS)
    opd_topk: Positive | None = key(None, "most likely tokens to use of each top-k; default: all in the file", OURS)
    opd_jsd_beta: Fraction = key(0.5, DistillationKeys.__dataclass_fields__["opd_jsd_beta"].metadata["meaning"], OURS)
    opd_skew_alpha: Annotated[NotNegative, Field(lt=1)] = key(
        0.1, DistillationKeys.__dataclass_fields__["opd_skew_alpha"].metadata["meaning"], OURS
    )
    opd_kl_discount: Fraction = key(0.0, "discount of a later token's reverse KL in an advantage (sampled)", OURS)
    advantage_clip: AboveZero | None = key(None, "bound of advantages (sampled); default: none", OURS)
    sft_loss_coef: NotNegative = key(
        0.0, "weight of the answers' likelihood, in addition to the divergence (topk)", OURS
    )
    teacher_preflight: bool | Literal["warn"] = key(
        True, "check the teacher's log-probs before the first update; warn: continue after a failure", OURS
    )
