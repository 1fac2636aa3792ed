"""From a user's configuration to a `RunPlan`: compose, validate, check everything, then freeze.

`load_plan` is the one entry. It starts nothing and writes nothing. It asks in the order in which a user thinks: roles,
models, layouts, devices, lengths, batches, data, output. Everything that can be checked is, so that all problems come
out together.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll_opd.algorithms.registry import POLICY_LOSSES, AlgorithmError
from roll_opd.algorithms.table import KL_LOSS_COEF, algorithm, loss_facts
from roll_opd.base import hardware
from roll_opd.base.failures import ConfigError
from roll_opd.base.frozen import FrozenDict
from roll_opd.base.paths import PathError, also_resolving_in, find_path
from roll_opd.base.user_modules import dotted_path, search_modules_in, users_module
from roll_opd.compat.roll.pipelines import off_policy_problem, rollout_only_problem, vision_problem
from roll_opd.compat.trinity.load import load_any
from roll_opd.config.compose import LoadedConfig, write_yaml
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import (
    AuxiliaryPlan,
    CheckpointPlan,
    CriticPlan,
    DataPlan,
    DemonstrationPlan,
    ObjectivePlan,
    RewardPlan,
    RunPlan,
    ValidationPlan,
    WorkflowPlan,
)
from roll_opd.config.schema import (
    SUPERVISED,
    CheckpointKeys,
    CriticKeys,
    EpochArgs,
    RemoteModelKeys,
    RolloutKeys,
    Run,
    RunKeys,
    Supervised,
    Top,
    WorkflowKeys,
    keys_of,
    shared,
)
from roll_opd.data.files import count_rows, first_tags, whole_steps
from roll_opd.data.rows import DataError
from roll_opd.models.memory import estimate_memory
from roll_opd.models.model_files import engine_problem
from roll_opd.models.supported import not_yet
from roll_opd.planner import (
    check_devices,
    check_files,
    check_objective,
    check_values,
    environments,
    parts,
    teacher_context,
)
from roll_opd.planner.check_turn_end import turn_end_warnings
from roll_opd.planner.correction import check_quantised
from roll_opd.planner.expand import expand, pipeline_problem
from roll_opd.planner.pipeline_check import pipeline_of, wrong_pipeline
from roll_opd.planner.read import Sections, read_sections
from roll_opd.planner.rewards import read_rewards
from roll_opd.planner.roles import Role, RoleReader, Roles, choose_mode, written_workers
from roll_opd.planner.trackers import read_trackers
from roll_opd.tracking.secrets import without_secrets
from roll_opd.tracking.trackers import lacking
from roll_opd.workflows.workflow_checks import argument_problems, name_problem

TITLES = {
    "pure": "pure on-policy distillation",
    "mixed": "on-policy distillation with a reward",
    "rl": "reinforcement learning",
}
MOST_TOKENS = 2**31 - 1  # of a row that is not a prompt


def load_plan(
    config_path: str,
    config_name: str,
    overrides: list[str] | tuple[str, ...] = (),
    *,
    pure: bool | None = None,
    pipeline: str | None = None,
    runnable: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> RunPlan:
    """Return the plan of a run, or raise ConfigError with every problem that could be found.

    `config_path` is a directory, looked for in `compose.config_places`, `config_name` a YAML file in it.
    `pure` True: pure distillation (start_onpolicy_distill_pipeline.py runs it); False: the RLVR entry, where `use_opd`
    decides. `pipeline`: agentic, sft, dpo, or a dotted path. For a configuration that is written for another pipeline,
    the only error names the right launcher.
    Where both are None, the configuration tells. `runnable` False also plans what cannot be run yet, and says so in
    `warnings`. A configuration of Trinity-RFT tells for itself, whatever is asked for; `say` is given the list of how
    it was read.

    Relative paths inside a configuration are relative to the current directory, as in ROLL; what is not found there is
    looked for beside the configuration's file, then in the repository (the parent of `examples/`). Modules of the user
    that Python does not find are imported from the first two.
    """
    loaded = load_any(config_path, config_name, list(overrides))
    if loaded.translation:
        say(loaded.translation)
        pure = pipeline = None
    search_modules_in(Path(), loaded.directory)
    with also_resolving_in(loaded.directory):
        return plan_config(loaded, pure=pure, pipeline=pipeline, runnable=runnable)


def plan_config(
    loaded: LoadedConfig, *, pure: bool | None = None, pipeline: str | None = None, runnable: bool = True
) -> RunPlan:
    """Return the plan of an already composed configuration; see `load_plan`."""
    diagnostics = Diagnostics(loaded.origins)
    if hopeless := vision_problem(loaded.values) or off_policy_problem(loaded.values):
        raise ConfigError([hopeless])  # everything else would be said about something that cannot run at all
    asked = pipeline or (None if pure is None else "distill" if pure else "rlvr")
    if asked and (problem := wrong_pipeline(loaded.values, asked, diagnostics)):
        raise ConfigError([problem])  # errors of a wrong pipeline would be misleading
    keys = _supervised_pipeline(loaded.values, pure, None if pipeline == "agentic" else pipeline)
    plan = _supervised(loaded, keys, diagnostics) if keys else _rolled_out(loaded, pure, diagnostics)
    if plan is None or diagnostics.problems:
        found = [*diagnostics.problems, *(diagnostics.blockers if runnable else ())]
        raise ConfigError(found or ["the configuration could not be read"])
    sentences = [*diagnostics.blockers, *lacking(plan.trackers)]
    sentences += [sentence for role in plan.megatron_roles().values() for sentence in not_yet(role)]
    engines = {role.model.path for role in plan.inference_roles().values()}
    sentences += [sentence for path in sorted(engines) if (sentence := engine_problem(Path(path)))]
    if sentences and runnable:
        raise ConfigError(sentences)
    return replace(plan, warnings=(*diagnostics.warnings, *sentences, *turn_end_warnings(plan)))


def _supervised_pipeline(values: Mapping[str, Any], pure: bool | None, pipeline: str | None) -> type[Supervised] | None:
    """Return the keys of the supervised pipeline that is asked for or meant; None: a run that rolls out."""
    if pipeline is not None:
        known = f"distill, rlvr, agentic, {', '.join(SUPERVISED)}, or a module's dotted path"
        problem = f"no pipeline {pipeline!r}; known: {known}"
        try:
            if pipeline not in SUPERVISED:
                users_module(pipeline)  # declares its keys
            return SUPERVISED[pipeline]
        except (ImportError, KeyError) as error:
            raise ConfigError([problem + (f": {error}" if isinstance(error, ImportError) else "")]) from None
    found = pipeline_of(values) if pure is None else None
    return SUPERVISED.get(found[0]) if found else None


def _rolled_out(loaded: LoadedConfig, pure: bool | None, diag: Diagnostics) -> RunPlan | None:
    """Return the plan of a run that rolls out; None, or with problems reported, where it cannot be one."""
    values, agentic = loaded.values, environments.is_agentic(loaded.values)
    if hopeless := pipeline_problem(values, diag) or (agentic and rollout_only_problem(values)):
        raise ConfigError([hopeless])
    sections = read_sections(values, loaded.variables, None, diag)
    if agentic:
        environments.with_sampling(sections)
    mode = choose_mode(values, sections, pure, diag)
    if isinstance(sections.top, Top):
        sections.top = expand(sections.top, sections.workers, mode)
    top = sections.top
    roles = RoleReader(sections, mode, diag).rolled_out()
    check_values.check_replay(written_workers(sections), roles.train, roles.infer)
    check_files.compare_models(roles, top)
    if not isinstance(top, Top):
        return None
    if agentic:
        top = environments.expanded(top, roles.infer.worker.generating_args if roles.infer else None)
    check_values.check_replay_of_turns(top.workflow, roles.train)
    check_objective.check_objective(top, mode, agentic)
    check_objective.check_topk(top, roles.shared_vocabulary)
    check_devices.check_devices(roles.placed(), top)
    sizes = check_values.read_sizes(top, roles, agentic)
    teacher_context.check_teachers(roles, top, sizes.response or 0)
    if not agentic:
        check_objective.check_samples(top, sizes.n, bool(sections.rewards))
    rewards = read_rewards(sections.rewards, mode, 0 if agentic else sizes.n)
    if None not in (*sections.teachers.values(), *sections.rewards.values()):
        check_objective.check_signals(top, roles, rewards)
    if sections.auxiliaries and not top.workflow:
        top.diag.unused("auxiliary_models")
    if mode != "pure":
        check_objective.check_steps(top, agentic, environments.whole_trajectories(top) if agentic else ())
        by_tag = agentic and top.reward_normalization.grouping in environments.BY_TAG
        check_objective.check_groups(top, sizes.n, agentic=agentic, by_tag=by_tag)
        check_objective.check_rewards(top, rewards)
        if not (sections.rewards or top.workflow):
            switch = "use_opd: true" if mode == "mixed" else "a run without a teacher"
            text = f"is missing; {switch} learns from rewards, write at least rewards.math_rule"
            top.diag.error("rewards", text)
    rows = _prompts(top, roles, sections, rewards, agentic)
    given = _demonstrations(top, top.prompt_length + (sizes.response or 0), agentic)
    played = None
    if agentic and roles.infer and sizes.response:
        played = environments.held_out(top, roles.infer.worker.generating_args, sizes.response)
    common = _common(loaded, top, roles, bool(played or rows[1]))
    if diag.problems:
        return None
    plan = _assembled(top, roles, sizes, (*rows, given), **common)
    if agentic:
        plan = replace(plan, validation=played, objective=environments.compared(plan.objective, top))
    engines = {domain: parts.judge_plan(role, top, sizes.response or 0) for domain, role in roles.judges.items()}
    plan = replace(plan, rewards=tuple(replace(reward, engine=engines.get(reward.domain)) for reward in rewards))
    if plan.workflow:
        asked = _with_auxiliaries(plan.workflow, sections, roles, top, sizes.response or 0)
        plan = replace(plan, workflow=replace(asked, is_scored=bool(plan.rewards)))
    _check_engines(plan, roles)
    return _finished(plan, loaded, top, roles, top.prompt_length + (sizes.response or 0))


def _assembled(
    top: Top,
    roles: Roles,
    sizes: check_values.Sizes,
    rows: tuple[DataPlan | None, DataPlan | None, DataPlan | None],
    **common: Any,
) -> RunPlan:
    """Return the plan of a run that rolls out, but for its rewards; `rows` to learn from, held out, demonstrations."""
    data, validation, given = rows
    assert roles.train and roles.infer and data and sizes.response and sizes.mini_batch
    sequences, samples = top.rollout_batch_size * sizes.n, sizes.mini_batch  # of a step, of an update
    demonstrations = critic = held_out = None
    if given is not None:
        each = check_values.demonstration_rows(samples, top.expert_data_ratio or 0.0)
        samples -= each
        demonstrations = DemonstrationPlan(given, each, updates=sequences // samples)
    # agentic runs may leave a remainder, which is one more update
    updates, steps = top.ppo_epochs * -(-sequences // samples), top.max_steps
    if roles.critic and sizes.critic_mini_batch:
        total = steps * top.critic_epochs * -(-sequences // sizes.critic_mini_batch)
        trained = parts.train_plan(roles.critic, top, sizes.critic_mini_batch, total)
        critic = CriticPlan(**vars(trained), **shared(CriticKeys, top))
        steps -= critic.critic_warmup
    student = roles.train
    teachers = tuple(
        parts.teacher_plan(name, role, top, student, sizes.response) for name, role in roles.teachers.items()
    )
    contexts = tuple(teacher.context for teacher in teachers if teacher.context)
    check_quantised(roles.infer.strategy.args, roles.infer.diag, top)
    if top.validation and validation:
        args, new = top.validation.generating_args, sizes.held_out or sizes.response
        sampling = parts.sampling_plan(args, args.num_return_sequences or 1, new)
        held_out = ValidationPlan(validation, sampling, top.validation.evaluate_teacher)
    return RunPlan(
        **common,
        **shared(RolloutKeys, top),
        mode=roles.mode,
        pipeline="rlvr",
        title=TITLES[roles.mode]
        + (" in environments" if data.environments else " by workflow" if top.workflow else ""),
        max_steps=top.max_steps,
        student=parts.train_plan(roles.train, top, sizes.mini_batch, updates * steps),
        rollout=parts.rollout_plan(roles.infer, top, sizes.n, sizes.response, sizes.held_out or 0),
        teachers=teachers,
        data=replace(data, contexts=() if top.workflow else contexts),  # workflows make prompts of their own
        objective=parts.objective_plan(top, roles.mode, updates, sizes.response, roles.shared_vocabulary),
        reference=parts.megatron_plan(roles.reference, top, roles.train) if roles.reference else None,
        critic=critic,
        demonstrations=demonstrations,
        workflow=_workflow(top),
        extra_prompts=top.max_additional_running_prompts if top.is_use_additional_prompts else 0,
        validation=held_out,
    )


def _workflow(top: Top) -> WorkflowPlan | None:
    """Return the workflow, None where a row is answered once."""
    if top.workflow is None:
        top.diag.unused(*sorted(keys_of(WorkflowKeys).keys() & top.written))
        return None
    values = shared(WorkflowKeys, top)
    if top.plugin_dir:
        with top.diag.catching("plugin_dir", PathError):
            values["plugin_dir"] = str(find_path(top.plugin_dir) or top.plugin_dir)
    if top.workflow_reward is None:
        top.diag.unused(*{"workflow_reward_args"} & top.written)
    for key in ("workflow", "workflow_reward"):
        if values[key] is not None:
            with top.diag.catching(key, PathError):
                values[key] = dotted_path(values[key])
    given = dict(top.workflow_args)
    if isinstance(given.get("agent"), str):
        with top.diag.catching("workflow_args.agent", PathError):
            given["agent"] = dotted_path(given["agent"])
    if problem := name_problem(top.workflow, values["plugin_dir"]):
        top.diag.error("workflow", problem)
    if not top.plugin_dir:  # whose modules may take the name of a built-in one
        for argument, problem in argument_problems(top.workflow, top.workflow_args, top.workflow_reward):
            top.diag.error(f"workflow_args.{argument}", problem)
    arguments = {"workflow_args": FrozenDict(given), "workflow_reward_args": FrozenDict(top.workflow_reward_args)}
    return WorkflowPlan(**{**values, **arguments})


def _with_auxiliaries(plan: WorkflowPlan, sections: Sections, roles: Roles, top: Top, response: int) -> WorkflowPlan:
    """Return `plan` with the models that its workflow asks, in the order in which they are written."""
    found = []
    for name, section in sections.auxiliaries.items():
        if isinstance(section, RemoteModelKeys):
            found.append(AuxiliaryPlan(name, None, section.base_url.rstrip("/"), section.api_key, section.model_name))
        elif name in roles.auxiliaries:
            found.append(AuxiliaryPlan(name, parts.judge_plan(roles.auxiliaries[name], top, response)))
    return replace(plan, auxiliary_models=tuple(found))


def _check_engines(plan: RunPlan, roles: Roles) -> None:
    """Check what an engine's options are together, which vLLM does when it starts."""
    auxiliaries = plan.workflow.auxiliary_models if plan.workflow else ()
    found = [plan.rollout, *(reward.engine for reward in plan.rewards), *(model.engine for model in auxiliaries)]
    tells = {role.path: role.diag for role in roles.placed()}
    # engines of a cluster that is joined are on other machines
    on_cpu = not (hardware.has_gpu_driver() or os.environ.get("RAY_ADDRESS"))
    for engine in filter(None, found):
        check_values.check_batched_tokens(engine, tells[engine.name], on_cpu)


def _supervised(loaded: LoadedConfig, keys: type[Supervised], diag: Diagnostics) -> RunPlan | None:
    """Return the plan of a run over rows with answers: no rollout, no reward."""
    sections = read_sections(loaded.values, loaded.variables, keys, diag)
    top = sections.top
    roles = RoleReader(sections, keys.pipeline, diag).supervised(keys)
    check_values.check_replay(written_workers(sections), None, None)
    train = roles.train
    if not isinstance(top, Supervised) or train is None:
        return None
    check_files.compare_models(roles, top)
    check_devices.check_devices(roles.placed(), top)
    longest = top.sequence_length
    check_values.check_positions(top, roles.all(), longest, str(longest), "sequence_length")
    args, validation = train.worker.data_args, None
    data = check_files.read_answers(args, top, top, longest, "sequence_length", top.schema)
    if top.validation is not None:
        held_out = top.validation.data_args
        validation = check_files.read_answers(held_out, top, top, longest, "sequence_length", top.schema, args)
    if data is not None:
        data = replace(data, streams=check_files.read_streams(args, data))
    objective = _supervised_objective(top)
    common = _common(loaded, top, roles, validation is not None)
    check_values.check_micro_batches(roles.all(), longest, answers=keys.answers)
    rows, update = check_values.rows_per_step(top, train)
    steps, epochs = _steps(top, train, data, rows)
    if diag.problems or data is None:
        return None
    own = sorted(keys_of(keys).keys() - keys_of(Supervised))
    plan = RunPlan(
        **common,
        mode=keys.pipeline,
        pipeline=keys.pipeline,
        pipeline_args=FrozenDict({key: getattr(top, key) for key in own}),
        title=keys.title,
        max_steps=steps,
        rollout_batch_size=rows,
        student=parts.train_plan(train, top, update * keys.answers, steps * (rows // update), keys.answers),
        data=data,
        objective=objective,
        reference=parts.megatron_plan(roles.reference, top, train) if roles.reference else None,
        epochs=epochs,
        validation=ValidationPlan(validation) if validation else None,
        logged_samples_per_step=0,
    )
    return _finished(plan, loaded, top, roles, longest)


def _common(loaded: LoadedConfig, top: Run, roles: Roles, validates: bool) -> dict[str, Any]:
    """Return the fields of a plan that every pipeline has, checked."""
    exp_name = top.exp_name or loaded.name
    output_dir = check_files.check_output(top, exp_name, roles.train.info if roles.train else None)
    trackers = read_trackers(top)
    resume = check_files.read_resume(top)
    return {
        **shared(RunKeys, top),
        "eval_steps": top.eval_steps if validates else 0,
        "output_dir": output_dir,
        "exp_name": exp_name,
        "num_nodes": check_devices.nodes(roles.placed(), top),
        "devices_per_node": top.num_gpus_per_node,
        "checkpoint": CheckpointPlan(**shared(CheckpointKeys, top), resume=resume),
        "trackers": tuple(trackers),
        "tracker_args": FrozenDict(trackers),
        "env": parts.environment(top),
    }


def _finished(plan: RunPlan, loaded: LoadedConfig, top: Run, roles: Roles, longest: int) -> RunPlan:
    """Return `plan` with what needs all of it; `longest` are the tokens of the longest sequence."""
    models = {role.path: role.info for role in roles.placed() if role.info}
    on_devices = replace(plan, device_memory_gb=top.device_memory_gb or hardware.gpu_memory_gb())
    finished = replace(
        on_devices,
        memory=FrozenDict(estimate_memory(on_devices, models, longest)),
        config_yaml=write_yaml(without_secrets(loaded.values)),
    )
    top.diag.warn_unused()  # now that all has been read
    check_devices.check_memory(finished, top.diag)
    return finished


def _prompts(
    top: Top, roles: Roles, sections: Sections, rewards: tuple[RewardPlan, ...], agentic: bool
) -> tuple[DataPlan | None, DataPlan | None]:
    """Return the prompts to learn from, and the held-out ones."""
    if agentic:
        games = environments.data(top)
        held_out = environments.tasks(top, top.val_env_manager) if top.val_env_manager else None
        if None not in sections.teachers.values():  # rewards are the games' own
            check_files.check_tags(roles, (), games, held_out, top.diag)
        return games, None
    training = roles.train.worker.data_args if roles.train else None
    data = check_files.read_data(training, top, top.prompt_length) if training else None
    validation = None
    if top.validation and (sections.rewards or top.workflow):
        validation = check_files.read_data(top.validation.data_args, top, top.prompt_length, training)
    elif top.validation and roles.mode == "pure":
        top.diag.note("validation", "is left out, there is no reward to score the answers; write rewards.math_rule")
    if None not in sections.rewards.values():  # else tags would seem to have no reward
        if training and data:
            data = replace(data, streams=check_files.read_streams(training, data, rewards))
        if None not in sections.teachers.values():
            check_files.check_tags(roles, rewards, data, validation, top.diag)
    if top.workflow:  # it makes the prompts itself
        data, validation = (found and _tasks(found, top.response_key) for found in (data, validation))
    return data, validation


def _tasks(data: DataPlan, truth: str) -> DataPlan:
    """Return `data` as rows for a workflow, whose ground truth is in the column `truth`."""
    columns = {"ground_truth": truth} if truth != "ground_truth" else {}
    return replace(data, schema="task", prompt_length=MOST_TOKENS, columns=FrozenDict({**data.columns, **columns}))


def _demonstrations(top: Top, length: int, agentic: bool) -> DataPlan | None:
    """Return where demonstrations come from; `length` is the most tokens of prompt and answer."""
    share, section = top.expert_data_ratio, top.demonstrations
    if section is None:
        if share:
            top.diag.error(
                "demonstrations",
                f"is missing; policy loss {top.policy_loss} learns a share of each batch (expert_data_ratio {share:g})"
                " from demonstrations, rows with answers; write demonstrations.data_args.file_name",
            )
        return None
    if not share:
        if loss_facts(top.policy_loss).needs != "demonstrations":  # else the share is what is wrong, and told so
            top.diag.error(
                "demonstrations",
                f"is written, but policy loss {top.policy_loss} learns nothing from it; use algorithm_type mix or"
                " mix_chord, or remove the section",
            )
        return None
    if agentic:
        text = "joins the answers to prompts, not yet the trajectories of environments; remove it"
        top.diag.unsupported("demonstrations", text)
        return None
    args = section.data_args
    data = check_files.read_answers(args, top, section, length, "prompt_length + response_length", "sft")
    if data is None:
        return None
    if not first_tags(data)[0]:
        args.diag.error("file_name", f"no row can be read in {', '.join(data.files)}; give rows with answers")
        return None
    return replace(data, streams=check_files.read_streams(args, data))


def _supervised_objective(top: Supervised) -> ObjectivePlan:
    name = top.algorithm_type or top.algorithm
    objective = ObjectivePlan(paired=top.answers == 2, kl_loss="k2", gamma=0.0)
    try:
        row = algorithm(name)
        loss = POLICY_LOSSES.located(row.policy_loss)
    except AlgorithmError as error:
        top.diag.error("algorithm_type", str(error))
        return objective
    if row.schema != top.schema:
        reads = f"and this pipeline reads {top.schema}"
        top.diag.error("algorithm_type", f"{name} learns from rows of schema {row.schema}, {reads}")
    for key, sentence in top.refusals().items():
        top.diag.unsupported(key, sentence)
    arguments = {key: value for key in top.loss_arguments if (value := getattr(top, key)) is not None}
    own = loss_facts(row.policy_loss).loss_agg_mode
    kl_loss_coef = getattr(top, "kl_loss_coef", None)
    if kl_loss_coef is None:  # a row of Trinity-RFT's has its KL loss where it is named; ROLL's DPO has none
        kl_loss_coef = KL_LOSS_COEF if top.algorithm_type and row.kl_loss and top.has_reference else 0.0
    if own and top.loss_agg_mode not in (None, own):
        top.diag.error(
            "loss_agg_mode",
            f"policy loss {row.policy_loss} is one number a pair; {top.loss_agg_mode} would weigh pairs by their"
            f" length; use {own}",
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
    """Return max_steps, or as many as num_train_epochs take, and those epochs where they were counted."""
    args = train.worker.training_args
    assert isinstance(args, EpochArgs)
    epochs, key = args.num_train_epochs, "num_train_epochs"
    if top.max_steps is not None and top.max_steps > 0:
        if epochs:
            args.diag.note(key, f"{epochs:g} has no effect beside max_steps {top.max_steps}")
        return top.max_steps, None
    if not epochs:
        top.diag.error("max_steps", f"is missing; write it, or {args.diag.at(key)}")
    elif data is not None:
        with train.worker.data_args.diag.catching("file_name", DataError):
            found = count_rows(data)
            if steps := whole_steps(epochs, found, rows):
                return steps, epochs
            args.diag.error(key, f"{epochs:g} epochs of {found} rows are less than one step of {rows}; write max_steps")
    return 1, None
