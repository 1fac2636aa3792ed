"""From a configuration of SFT or DPO to a `RunPlan`: no rollout, no reward, rows that bring their answers."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roll_opd.config import checks, memory, surroundings
from roll_opd.config.algorithms import (
    LOSSES,
    POLICY_LOSS_FUNCTIONS,
    AlgorithmError,
    Answered,
    LossFacts,
    algorithm,
    located,
)
from roll_opd.config.assemble import megatron_fields, train_fields
from roll_opd.config.errors import ConfigError, Findings
from roll_opd.config.examine import check_vocabulary, compare_tokenizers
from roll_opd.config.frozen import FrozenDict
from roll_opd.config.inference import environment
from roll_opd.config.interleaving import read_streams
from roll_opd.config.load import LoadedConfig, write_yaml
from roll_opd.config.models import ModelFacts
from roll_opd.config.plan import (
    CheckpointPlan,
    DataPlan,
    MegatronPlan,
    ObjectivePlan,
    RunPlan,
    TrainPlan,
    ValidationPlan,
)
from roll_opd.config.prompt_files import count_rows
from roll_opd.config.roles import Role, megatron_role
from roll_opd.config.schema import DataArgs, Dpo, Sft, Supervised, SupervisedWorker, Worker
from roll_opd.config.sections import REFERENCE, read_section
from roll_opd.config.trackers import read_trackers, without_secrets

ROLE = {"sft": "sft_train", "dpo": "actor_train"}
TOP: dict[Answered, type[Supervised]] = {"sft": Sft, "dpo": Dpo}
OF_DPO = ("chosen_key", "rejected_key", "beta", "label_smoothing", "ipo", "use_reference_model")


def schema_of(values: Mapping[str, Any]) -> Answered | None:
    """Tell from a configuration whether SFT or DPO is meant; None: something that rolls out."""
    if values.get("algorithm_type") == "sft" or ROLE["sft"] in values:
        return "sft"
    if values.get("algorithm_type") == "dpo" or any(key in values for key in OF_DPO):
        return "dpo"
    return None


def plan_supervised(loaded: LoadedConfig, schema: Answered, findings: Findings) -> RunPlan:
    """Return the plan, its warnings from `findings`. Raises ConfigError with every problem that could be found."""
    top, worker, held = _sections(loaded, schema, findings)
    if top is None or worker is None:
        findings.raise_if_any()
        raise ConfigError(["the configuration could not be read"])
    cache: dict[str, ModelFacts | None] = {}
    strict, path = top.strict_strategies, ROLE[schema]
    model = worker.model_args.model_name_or_path or top.pretrain
    train = megatron_role(path, "train", worker, model, strict, cache, findings)
    reference = None
    if schema == "dpo":
        own = held.model_args.model_name_or_path if held else None
        reference = megatron_role(REFERENCE, "score", held or Worker(), own or model, strict, cache, findings, train)
        compare_tokenizers(train, reference, "reference policy", findings)
    roles = [role for role in (train, reference) if role is not None]
    check_vocabulary(train, findings)
    for role in roles:
        checks.check_layout(role, findings)
    checks.check_devices(roles, top, findings)
    checks.check_positions(roles, top.sequence_length, str(top.sequence_length), "sequence_length", findings)
    data = _data(top, worker.data_args, f"{path}.data_args", schema, findings)
    validation = None
    if top.validation is not None:
        args = top.validation.data_args
        validation = _data(top, args, "validation.data_args", schema, findings, worker.data_args)
    if data is not None:
        data = replace(data, streams=read_streams(worker.data_args, f"{path}.data_args", data, (), findings))
    objective = _objective(top, schema, findings)
    exp_name = top.exp_name or loaded.name
    surroundings.check_output(top, exp_name, train.facts, findings)
    trackers = read_trackers(top, findings)
    resume = surroundings.read_resume(top, findings)
    longest, answers = top.sequence_length, 2 if objective.paired else 1
    whole = "a pair, which stays together" if objective.paired else "one sequence of prompt + answer"
    limits = checks.micro_batch(train, True, longest * answers, findings, whole)
    if limits.sequences:
        limits = replace(limits, sequences=limits.sequences * answers)
    for role in roles:
        checks.micro_batch(role, False, longest, findings, "one sequence of prompt + answer")
    rows, update = _rows(top, train, findings)
    steps, epochs = _steps(top, train, data, rows, findings)
    findings.warn_ignored()
    findings.raise_if_any()
    student = TrainPlan(
        **train_fields(train, top, update * answers, longest, steps * (rows // update), findings)
        | {"train_limits": limits}
    )
    scorer = MegatronPlan(**megatron_fields(reference, top, longest, findings)) if reference else None
    return RunPlan(
        mode=schema,
        pipeline=schema,
        exp_name=exp_name,
        output_dir=top.output_dir,
        seed=top.seed,
        deterministic=top.deterministic,
        max_steps=steps,
        eval_steps=top.eval_steps if validation else 0,
        logging_steps=top.logging_steps,
        rollout_batch_size=rows,
        num_nodes=checks.nodes(roles, top),
        devices_per_node=top.num_gpus_per_node,
        student=student,
        rollout=None,
        teachers=(),
        rewards=(),
        data=data,
        objective=objective,
        checkpoint=CheckpointPlan(top.save_steps, top.max_ckpt_to_keep, resume),
        reference=scorer,
        epochs=epochs,
        validation=ValidationPlan(validation) if validation else None,
        trackers=tuple(trackers),
        tracker_args=FrozenDict(trackers),
        samples_per_step=0,
        env=FrozenDict(environment(top)),
        warnings=tuple(findings.warnings),
        memory=FrozenDict(_memory(student, train, scorer, reference, longest)),
        config_yaml=write_yaml(without_secrets(loaded.values)),
    )


def _sections(
    loaded: LoadedConfig, schema: Answered, findings: Findings
) -> tuple[Supervised | None, SupervisedWorker | None, Worker | None]:
    """Return the top level, the role that learns, and the reference policy where it is written."""
    roles = {ROLE[schema], *({REFERENCE} if schema == "dpo" else set())}
    known = {*TOP[schema].model_fields, *roles}
    rest = {key: value for key, value in loaded.values.items() if key in known or key not in loaded.variables}
    written = {role: rest.pop(role) for role in sorted(roles) if role in rest}
    if ROLE[schema] not in written:
        findings.problem(ROLE[schema], "is missing; write this role's section")
    top = read_section(TOP[schema], rest, "", findings, known)
    worker = read_section(SupervisedWorker, written.get(ROLE[schema]), ROLE[schema], findings)
    reference = read_section(Worker, written[REFERENCE], REFERENCE, findings) if REFERENCE in written else None
    return top, worker, reference


def _data(
    top: Supervised,
    args: DataArgs,
    path: str,
    schema: Answered,
    findings: Findings,
    training: DataArgs | None = None,
) -> DataPlan | None:
    data = surroundings.read_data(args, path, top, top.sequence_length, findings, training)
    if data is None:
        return None
    columns = surroundings.answer_columns(data, top)
    return replace(data, schema=schema, columns=columns, length_key="sequence_length")


def _objective(top: Supervised, schema: Answered, findings: Findings) -> ObjectivePlan:
    name = top.algorithm_type or schema
    objective = ObjectivePlan(policy_loss=schema, paired=schema == "dpo", kl_loss="k2")
    try:
        row = algorithm(name)
        loss = located(POLICY_LOSS_FUNCTIONS, row.policy_loss)
    except AlgorithmError as error:
        findings.problem("algorithm_type", str(error))
        return objective
    if row.schema != schema:
        findings.problem(
            "algorithm_type", f"{name} learns from rows of schema {row.schema}, and this pipeline reads {schema}"
        )
    arguments = {key: value for key in ("beta", "label_smoothing") if (value := getattr(top, key, None)) is not None}
    if getattr(top, "ipo", False):
        findings.block("ipo", "true is not available yet; remove the key to learn with DPO's own loss")
    if not getattr(top, "use_reference_model", True):
        findings.block("use_reference_model", "false is not available: DPO compares with a reference policy")
    own = LOSSES.get(row.policy_loss, LossFacts()).loss_agg_mode
    if own and top.loss_agg_mode not in (None, own):
        findings.problem(
            "loss_agg_mode",
            f"policy loss {row.policy_loss} is one number a pair; {top.loss_agg_mode} would weigh pairs by their"
            f" length; use {own}",
        )
    return replace(
        objective,
        policy_loss=loss,
        policy_loss_args=FrozenDict({**row.policy_loss_args, **arguments}),
        loss_agg_mode=top.loss_agg_mode or own or "token-mean",
        loss_normaliser=float(top.sequence_length),
    )


def _rows(top: Supervised, train: Role, findings: Findings) -> tuple[int, int]:
    """Return the rows of a step and those behind one optimizer update."""
    args = train.worker.training_args
    dp = train.megatron.layout.dp if train.megatron and train.megatron.layout else 1
    update = args.per_device_train_batch_size * args.gradient_accumulation_steps * dp
    rows = top.train_batch_size or update
    if rows % update:
        findings.problem(
            "train_batch_size",
            f"{rows} rows a step are no multiple of the {update} of one update (per_device_train_batch_size"
            f" {args.per_device_train_batch_size} x gradient_accumulation_steps {args.gradient_accumulation_steps} x"
            f" data-parallel size {dp}); change one of them, or leave train_batch_size out",
        )
    return rows, update


def _steps(
    top: Supervised, train: Role, data: DataPlan | None, rows: int, findings: Findings
) -> tuple[int, float | None]:
    """Return max_steps, or as many as num_train_epochs take, and those epochs where they were counted."""
    epochs, key = train.worker.training_args.num_train_epochs, f"{train.path}.training_args.num_train_epochs"
    if top.max_steps is not None and top.max_steps > 0:
        if epochs:
            findings.warn(f"{key}: {epochs:g} has no effect beside max_steps {top.max_steps}")
        return top.max_steps, None
    if not epochs:
        findings.problem("max_steps", f"is missing; write it, or {key}")
        return 1, None
    if data is None:
        return 1, None
    found = count_rows(data)
    steps = _whole_steps(epochs, found, rows)
    if steps < 1:
        findings.problem(key, f"{epochs:g} epochs of {found} rows are less than one step of {rows}; write max_steps")
        return 1, None
    return steps, epochs


def _whole_steps(epochs: float, found: int, rows: int) -> int:
    """Return the steps of `rows` rows that `epochs` passes over `found` rows fill; the last incomplete one is not."""
    return math.floor(epochs * found) // rows


def miscounted(plan: RunPlan, usable: int) -> str | None:
    """Say that num_train_epochs was counted over rows of which only `usable` can be used; None: the steps are right."""
    if plan.epochs is None:
        return None
    steps = max(1, _whole_steps(plan.epochs, usable, plan.rollout_batch_size))
    if steps == plan.max_steps:
        return None
    return (
        f"num_train_epochs: {plan.epochs:g} epochs over all rows of the files are max_steps {plan.max_steps}, but only"
        f" {usable} rows can be used; {plan.epochs:g} epochs of those are max_steps={steps}"
    )


def _memory(
    student: TrainPlan, train: Role, scorer: MegatronPlan | None, reference: Role | None, longest: int
) -> dict[str, dict[str, int]]:
    found = {student.name: memory.train_memory(train.facts, student, longest)}
    if scorer is not None and reference is not None:
        limits = scorer.forward_limits
        found[scorer.name] = memory.score_memory(reference.facts, scorer.layout, scorer.model.dtype, limits, longest)
    return found
