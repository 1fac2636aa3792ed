"""Keys of pipelines that train on rows with answers: SFT, DPO, teacher files, and the users' subclasses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from roll_opd.config import roll_keys as roll
from roll_opd.config.schema.key_types import AboveZero, Fraction, Many, Name, Names, NotNegative, Positive
from roll_opd.config.schema.objective_keys import DistillationKeys
from roll_opd.config.schema.rollout_keys import Validation
from roll_opd.config.schema.run_keys import PIPELINES, PromptColumns, Run
from roll_opd.config.schema.section import Section, key, ours, trinity
from roll_opd.config.schema.worker_keys import DataArgs, TrainingArgs, Worker


@dataclass(frozen=True, kw_only=True)
class EpochArgs(TrainingArgs):
    """`training_args` of a run that trains on rows with answers. Batch sizes are numbers of rows."""

    ignored = roll.IGNORED_TRAINING_ARGS - {"num_train_epochs"}
    num_train_epochs: AboveZero | None = key(
        None, "number of passes over the rows; used if max_steps is not set, or is -1"
    )


@dataclass(frozen=True, kw_only=True)
class SupervisedWorker(Worker):
    """A role of a supervised pipeline, without the keys of sampling and teachers."""

    ignored = (
        roll.IGNORED_WORKER | roll.PG_KEYS | {"generating_args", "opd_kl_coef", "tag_included", "num_gpus_per_worker"}
    )
    training_args: EpochArgs = key(EpochArgs(), "the optimizer, its schedule and its batches")


@dataclass(frozen=True, kw_only=True)
class HeldOut(Section):
    """`validation` without generation: the loss on held-out rows."""

    ignored = Validation.ignored | {"generating_args"}
    data_args: DataArgs = key(DataArgs(), "held-out rows")


@dataclass(frozen=True, kw_only=True)
class Supervised(Run):
    """Keys of pipelines that train on rows. Each pipeline is a subclass that adds keys and sets the class variables."""

    ignored = roll.IGNORED_TOP | roll.IGNORED_SUPERVISED
    role: ClassVar[str]  # the section of the trained model
    algorithm: ClassVar[str]  # entry of `objective.algorithms` that has the loss
    schema: ClassVar[str] = "sft"  # content of a row: a name of `data.supervised_rows.SCHEMAS`
    answers: ClassVar[int] = 1  # number of sequences per row; they stay in one micro-batch
    has_reference: ClassVar[bool] = False  # whether the loss compares with a frozen policy
    loss_arguments: ClassVar[tuple[str, ...]] = ()  # keys that are arguments of the policy loss

    max_steps: Annotated[int, Field(ge=-1)] | None = key(
        None, "number of steps of the run; -1: the number is computed from num_train_epochs"
    )
    sequence_length: Positive = key(1024, "maximum tokens of a prompt and its answer")
    train_batch_size: Many | None = ours(None, "rows per step; default: the rows of one update")
    validation: HeldOut | None = key(None, "held-out rows for measuring the loss")

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        return self.sequence_length

    def refusals(self) -> Mapping[str, str]:
        """Return the keys whose values are refused, as a map: key -> reason."""
        return {}


def supervised_pipelines() -> dict[str, type[Supervised]]:
    """Return the pipelines that train on rows with answers, as a map: name -> class of keys."""
    return {name: keys for name, keys in PIPELINES.items() if issubclass(keys, Supervised)}


@dataclass(frozen=True, kw_only=True)
class Sft(Supervised, PromptColumns):
    """Keys of the SFT pipeline, except the keys of its role `sft_train`."""

    pipeline = "sft"
    title = "supervised fine-tuning"
    role = "sft_train"
    algorithm = "sft"


@dataclass(frozen=True, kw_only=True)
class Dpo(Supervised):
    """Keys of the DPO pipeline, except the keys of its roles `actor_train` and `reference`."""

    pipeline = "dpo"
    title = "direct preference optimization"
    role = "actor_train"
    algorithm = "dpo"
    schema = "dpo"
    own_keys = frozenset({"chosen_key", "rejected_key", "beta", "label_smoothing", "ipo", "use_reference_model"})
    answers = 2
    has_reference = True
    loss_arguments = ("beta", "label_smoothing")

    chosen_key: Name | None = key(None, "column of the better answer")
    rejected_key: Name | None = key(None, "column of the worse answer")
    beta: AboveZero | None = key(None, "scale of the implicit reward; default: 0.1")
    label_smoothing: Annotated[NotNegative, Field(lt=0.5)] | None = key(None, "assumed fraction of wrong preferences")
    kl_loss_coef: NotNegative | None = trinity(
        None,
        "weight of a KL loss (estimator k2) between the student and the reference policy; default: 0.001 if"
        " algorithm_type is dpo, otherwise 0",
    )
    ipo: bool = key(False, "whether to use the IPO loss; true is not available yet")
    use_reference_model: bool = key(True, "false is not available")

    def refusals(self) -> Mapping[str, str]:
        """See `Supervised`."""
        found = {}
        if self.ipo:
            found["ipo"] = "true is not available yet; remove the key to use DPO's own loss"
        if not self.use_reference_model:
            found["use_reference_model"] = "false is not available: DPO compares with a reference policy"
        return found


@dataclass(frozen=True, kw_only=True)
class FileTeacher(Section):
    """`teacher` of pipeline `offline_distill`: parquet files of answers with a teacher's scores."""

    files: Names = ours((), "parquet files (or a directory of them) from `roll-opd score`, Lightning-OPD or DistillKit")
    name: Name | None = ours(None, "name that the teacher must have in every row; default: the name is not checked")
    sft_teacher: Name | None = ours(
        None,
        "name of the teacher on whose answers the student was fine-tuned; the run checks that the files have"
        " scores of the same teacher",
    )
    compression: Name | None = ours(
        None, "DistillKit's compression_config.yaml; default: the file next to the teacher files"
    )
    opd_kl_coef: NotNegative = ours(1.0, "weight of the teacher")


@dataclass(frozen=True, kw_only=True)
class OfflineDistill(Supervised):
    """Keys of distillation from teacher files, except the keys of its role `student_train`."""

    pipeline = "offline_distill"
    title = "distillation from teacher files"
    role = "student_train"
    algorithm = "sft"
    schema = "scored"
    read_if: ClassVar[Mapping[str, str]] = {
        "opd_objective: topk": "opd_topk opd_divergence opd_jsd_beta opd_skew_alpha sft_loss_coef",
        "opd_objective: sampled": "opd_kl_discount advantage_clip",
        "opd_divergence: jsd": "opd_jsd_beta",
        "opd_divergence: skewed_reverse_kl|skewed_forward_kl": "opd_skew_alpha",
    }

    teacher: FileTeacher = ours(FileTeacher(), "the teacher's files")
    validation: HeldOut | None = key(None, "held-out teacher files, in data_args.file_name")
    opd_objective: Literal["sampled", "topk"] = ours(
        "topk",
        "topk: a divergence over the teacher's most likely tokens; sampled: an advantage that is computed from"
        " the tokens of the answers, as in Lightning-OPD. For sampled, the student must have sampled the"
        " answers",
    )
    opd_divergence: str = ours("forward_kl", "divergence in the loss (topk): a name in objective.divergences")
    opd_topk: Positive | None = ours(
        None,
        "number of tokens to use in each position (topk), starting with the most likely token; default: all"
        " tokens in the file",
    )
    opd_jsd_beta: Fraction = ours(0.5, DistillationKeys.__dataclass_fields__["opd_jsd_beta"].metadata["meaning"])
    opd_skew_alpha: Annotated[NotNegative, Field(lt=1)] = ours(
        0.1, DistillationKeys.__dataclass_fields__["opd_skew_alpha"].metadata["meaning"]
    )
    opd_kl_discount: Fraction = ours(
        0.0, "discount factor with which the reverse KL of later tokens is added to a token's reverse KL (sampled)"
    )
    advantage_clip: AboveZero | None = ours(
        None, "bound on the absolute value of advantages (sampled); default: no bound"
    )
    sft_loss_coef: NotNegative = ours(
        0.0, "weight with which the negative log-likelihood of the answers is added to the divergence (topk)"
    )
    teacher_preflight: bool | Literal["warn"] = ours(
        True, "check the teacher's log-probs before the first update; warn: continue after a failure"
    )
