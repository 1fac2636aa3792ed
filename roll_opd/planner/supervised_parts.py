"""Plan runs on rows with answers: the rows, the loss and the number of steps."""

from dataclasses import dataclass, replace
from typing import Any

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import DataPlan, ObjectivePlan, TeacherPlan, ValidationPlan
from roll_opd.config.schema import EpochArgs, OfflineDistill, Supervised, keys_of
from roll_opd.data.files import count_rows, whole_steps
from roll_opd.data.rows import DataError
from roll_opd.objective.algorithms import KL_LOSS_COEF, algorithm, loss_facts
from roll_opd.objective.registry import POLICY_LOSSES, AlgorithmError
from roll_opd.planner import check_devices, check_values, offline_parts, parts, row_plans
from roll_opd.planner.read import Sections
from roll_opd.planner.role_reader import Role, Roles


@dataclass(frozen=True)
class SupervisedParts:
    """The checked parts of a run on rows with answers.

    Method `fields` converts them to fields of the plan.
    """

    top: Supervised
    roles: Roles
    train: Role
    data: DataPlan | None
    held_out: DataPlan | None
    objective: ObjectivePlan
    teachers: tuple[TeacherPlan, ...] = ()

    @property
    def validates(self) -> bool:
        return self.held_out is not None

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        return self.top.sequence_length

    def fields(self) -> dict[str, Any] | None:
        """Return the fields that only the plan of a run on rows with answers has.

        The result is None if problems were reported.
        """
        top, roles, train, data = self.top, self.roles, self.train, self.data
        check_values.check_micro_batches(roles.all(), self.longest, answers=top.answers)
        rows, update = check_values.rows_per_step(top, train)
        steps, epochs = _steps(top, train, data, rows)
        if top.diag.problems or data is None:
            return None
        own = sorted(keys_of(type(top)).keys() - keys_of(Supervised) - offline_parts.PLANNED)
        return {
            "mode": top.pipeline,
            "pipeline": top.pipeline,
            "pipeline_args": FrozenDict({key: getattr(top, key) for key in own}),
            "title": top.title,
            "max_steps": steps,
            "rollout_batch_size": rows,
            "student": parts.train_plan(train, top, update * top.answers, steps * (rows // update), top.answers),
            "data": data,
            "objective": self.objective,
            "teachers": self.teachers,
            "teacher_preflight": getattr(top, "teacher_preflight", True),
            "reference": parts.megatron_plan(roles.reference, top, train) if roles.reference else None,
            "epochs": epochs,
            "validation": ValidationPlan(self.held_out) if self.held_out else None,
            "logged_samples_per_step": 0,
        }


def read(sections: Sections, roles: Roles) -> SupervisedParts | None:
    """Return the checked parts of a run on rows with answers.

    The result is None if the keys or the student of the run could not be read.
    """
    top, train = sections.top, roles.train
    if not isinstance(top, Supervised) or train is None:
        return None
    check_devices.check_devices(roles.placed(), top)
    length = top.sequence_length
    check_values.check_positions(top, roles.all(), length, str(length), "sequence_length")
    if isinstance(top, OfflineDistill):
        found = offline_parts.read(top, train)
        return SupervisedParts(top, roles, train, found.data, found.held_out, found.objective, found.teachers)
    args, held_out = train.worker.data_args, None
    data = row_plans.read_answers(args, top, top, length, "sequence_length", top.schema)
    if top.validation is not None:
        rows = top.validation.data_args
        held_out = row_plans.read_answers(rows, top, top, length, "sequence_length", top.schema, args)
    if data is not None:
        data = replace(data, streams=row_plans.read_streams(args, data))
    return SupervisedParts(top, roles, train, data, held_out, _objective(top))


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


def _steps(top: Supervised, train: Role, data: DataPlan | None, rows: int) -> tuple[int, float | None]:
    """Return (steps, epochs) of the run; `epochs` is None if max_steps sets the number of steps."""
    args = train.worker.training_args
    assert isinstance(args, EpochArgs)
    epochs, key = args.num_train_epochs, "num_train_epochs"
    if top.max_steps is not None and top.max_steps > 0:
        if epochs:
            args.diag.note(key, f"{epochs:g} has no effect with max_steps {top.max_steps}")
        return top.max_steps, None
    if not epochs:
        top.diag.error("max_steps", f"is missing; write it, or {args.diag.at(key)}")
    elif data is not None:
        with train.worker.data_args.diag.catching("file_name", DataError):
            found = count_rows(data)
            if steps := whole_steps(epochs, found, rows):
                return steps, epochs
            args.diag.error(
                key, f"{epochs:g} epochs of {found} rows are less than one step of {rows} rows; write max_steps"
            )
    return 1, None
