"""Plan runs on rows with answers: the rows, the loss and the number of steps."""

from dataclasses import replace
from typing import Any

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import DataPlan, ObjectivePlan, ValidationPlan
from roll_opd.config.schema import EpochArgs, OfflineDistill, Supervised, Worker, changed, keys_of
from roll_opd.data.files import count_rows, whole_steps
from roll_opd.data.rows import DataError
from roll_opd.objective.algorithms import KL_LOSS_COEF, algorithm, loss_facts
from roll_opd.objective.registry import POLICY_LOSSES, AlgorithmError
from roll_opd.planner import check_devices, check_values, offline_parts, parts, row_plans
from roll_opd.planner.read import Sections


def fields(sections: Sections) -> dict[str, Any] | None:
    """Check a run on rows with answers; return the fields that only its plan has, or None if problems were reported."""
    top, train = sections.top, sections.train
    if not isinstance(top, Supervised) or train is None:
        return None
    check_devices.check_devices(sections.placed(), top)
    length = top.sequence_length
    check_values.check_positions(top, sections.all(), length, str(length), "sequence_length")
    if isinstance(top, OfflineDistill):
        found = offline_parts.fields(top, train)
    else:
        found = _rows(top, train) | {"objective": _objective(top)}
    check_values.check_micro_batches(sections.all(), length, answers=top.answers)
    rows, update = check_values.rows_per_step(top, train)
    steps, epochs = _steps(top, train, found["data"], rows)
    if top.diag.problems or found["data"] is None:
        return None
    own = sorted(keys_of(type(top)).keys() - keys_of(Supervised) - offline_parts.PLANNED)
    student = changed(train, {"mini_batch": update * top.answers})
    return {
        **found,
        "mode": top.pipeline,
        "pipeline": top.pipeline,
        "pipeline_args": FrozenDict({key: getattr(top, key) for key in own}),
        "title": top.title,
        "max_steps": steps,
        "rollout_batch_size": rows,
        "student": parts.train_plan(student, top, steps * (rows // update), top.answers),
        "teacher_preflight": getattr(top, "teacher_preflight", True),
        "reference": parts.megatron_plan(sections.reference, top, train) if sections.reference else None,
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
            args.diag.error(
                key, f"{epochs:g} epochs of {found} rows are less than one step of {rows} rows; write max_steps"
            )
    return 1, None
