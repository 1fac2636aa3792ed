"""Plan the parts of runs with rollouts: prompts or other tasks, teachers, rewards and workflows."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from roll_opd.base.addresses import address_fault
from roll_opd.base.frozen import FrozenDict
from roll_opd.base.paths import PathError, find_path
from roll_opd.base.user_modules import dotted_path
from roll_opd.config.plan import (
    AuxiliaryPlan,
    CriticPlan,
    DataPlan,
    DemonstrationPlan,
    RewardPlan,
    ValidationPlan,
    WorkflowPlan,
)
from roll_opd.config.schema import CriticKeys, RolloutKeys, Run, Top, Worker, WorkflowKeys, shared
from roll_opd.data.row_files import first_tags
from roll_opd.objective.algorithms import loss_facts
from roll_opd.planner import (
    check_async,
    check_objective,
    device_mapping,
    lengths_and_batches,
    role_parts,
    row_plans,
    teacher_sections,
)
from roll_opd.planner.altering_options import engine_check_plan
from roll_opd.planner.check_router_replay import check_replay_of_turns
from roll_opd.planner.objective_plan import expand, objective_plan
from roll_opd.planner.reward_sections import read_rewards
from roll_opd.planner.teacher_sections import check_http_teachers, check_scorers
from roll_opd.planner.validate_sections import Sections
from roll_opd.workflows.workflow_checks import argument_problems, name_problem

TITLES = {
    "pure": "pure on-policy distillation",
    "mixed": "on-policy distillation with a reward",
    "rl": "reinforcement learning",
}
MAX_TOKENS = 2**31 - 1  # maximum tokens of a row that is not a prompt


def complete(sections: Sections, keys: type[Run]) -> None:
    """Complete the configuration in `sections`.

    Keys without a value from the user get their values from the algorithm or the tasks of the pipeline `keys`.
    """
    if issubclass(keys, Top):
        keys.before_roles(sections)
    if isinstance(sections.top, Top):
        sections.top = expand(sections.top, sections.workers, sections.mode)


def fields(sections: Sections) -> dict[str, Any] | None:
    """Check a run with rollouts; return the fields that only its plan has, or None if problems were reported."""
    top = sections.top
    if not isinstance(top, Top):
        return None
    top = top.with_tasks(sections.infer.generating_args if sections.infer else None)
    check_replay_of_turns(top.workflow, sections.train)
    check_objective.check_objective(top, sections.mode)
    check_objective.check_topk(top, sections.shared_vocabulary)
    device_mapping.check_devices(sections.placed(), top)
    check_async.check_async(top, sections)
    top = sections.top = lengths_and_batches.read_sizes(sections, top)
    teacher_sections.check_teachers(sections, top)
    check_http_teachers(sections, top)
    check_scorers(sections)
    if not top.makes_tasks:
        check_objective.check_samples(top, bool(sections.rewards))
    rewards = read_rewards(sections.rewards, sections.mode, 0 if top.makes_tasks else top.responses)
    if not sections.lacks_teacher and None not in sections.rewards.values():
        check_objective.check_signals(top, sections, rewards)
    if sections.auxiliaries and not top.workflow:
        top.diag.unused("auxiliary_models")
    if sections.mode != "pure":
        _check_rewards(top, sections, rewards)
    data, held_out = _tasks(top, sections) if top.makes_tasks else _prompts(top, sections, rewards)
    demonstrations, validation = _demonstrations(top), None
    if sections.infer and top.response_tokens:
        validation = top.held_out_tasks(sections.infer.generating_args, top.response_tokens)
    train, infer, response = sections.train, sections.infer, top.response_tokens
    if top.diag.problems:
        return None
    assert train and infer and data and response and train.mini_batch
    sequences, samples = top.rollout_batch_size * top.responses, train.mini_batch  # of a step; of an update
    added = None
    if demonstrations is not None:
        each = lengths_and_batches.demonstration_rows(samples, top.expert_data_ratio or 0.0)
        samples -= each
        added = DemonstrationPlan(demonstrations, each, updates=sequences // samples)
    # tasks may have a remainder, for which one more update is made
    updates = top.ppo_epochs * -(-sequences // samples)
    critic = _critic(top, sections.critic, sequences)
    steps = top.max_steps - (critic.critic_warmup if critic else 0)
    teachers = tuple(role_parts.teacher_plan(name, role, top, train) for name, role in sections.teachers.items())
    contexts = tuple(teacher.context for teacher in teachers if teacher.context)
    if top.validation and held_out:
        args, evaluate = top.validation.generating_args, top.validation.evaluate_teacher
        sampling = role_parts.sampling_plan(args, args.num_return_sequences or 1, top.held_out_tokens or response)
        validation = validation or ValidationPlan(held_out, sampling, evaluate)
    rollout = role_parts.rollout_plan(infer, top, train)
    tested = engine_check_plan(top, rollout, infer.diag)
    objective = objective_plan(top, sections.mode, updates, sections.shared_vocabulary, tested)
    if workflow := _workflow(top):
        models = tuple(_auxiliaries(sections, top))
        workflow = replace(workflow, auxiliary_models=models, is_scored=bool(rewards))
    check_async.check_validation_engines(
        top,
        rollout.engines,
        validates=bool(validation and top.eval_steps),
        has_auxiliaries=bool(workflow and workflow.auxiliary_models),
    )
    place = top.tasks_in or (" by workflow" if workflow else "")
    engines = {domain: role_parts.judge_plan(role, top) for domain, role in sections.judges.items()}
    return {
        **shared(RolloutKeys, top),
        "mode": sections.mode,
        "pipeline": top.pipeline,
        "pipeline_args": FrozenDict(top.arguments()),
        "title": (top.title or TITLES[sections.mode]) + place,
        "max_steps": top.max_steps,
        "student": role_parts.train_plan(train, top, updates * steps),
        "rollout": rollout,
        "teachers": teachers,
        "rewards": tuple(replace(reward, engine=engines.get(reward.domain)) for reward in rewards),
        "data": replace(data, contexts=() if workflow else contexts),  # workflows make the prompts
        "objective": top.objective_of_tasks(objective),
        "reference": role_parts.megatron_plan(sections.reference, top, train) if sections.reference else None,
        "critic": critic,
        "demonstrations": added,
        "workflow": workflow,
        "extra_prompts": top.max_additional_running_prompts if top.is_use_additional_prompts else 0,
        "validation": validation,
    }


def _critic(top: Top, role: Worker | None, sequences: int) -> CriticPlan | None:
    """Return the plan of the critic, which is updated on all `sequences` of a step, also in warm-up steps."""
    if not (role and role.mini_batch):
        return None
    total = top.max_steps * top.critic_epochs * -(-sequences // role.mini_batch)
    return CriticPlan(**vars(role_parts.train_plan(role, top, total)), **shared(CriticKeys, top))


def _auxiliaries(sections: Sections, top: Top) -> Iterator[AuxiliaryPlan]:
    """Yield the plans of the models that workflows call, in the order of the configuration."""
    for name, model in sections.auxiliaries.items():
        if isinstance(model, Worker):
            yield AuxiliaryPlan(name, role_parts.judge_plan(model, top))
            continue
        if fault := address_fault(model.base_url):
            model.diag.error("base_url", fault)
        yield AuxiliaryPlan(name, None, model.base_url.rstrip("/"), model.api_key, model.model_name)


def _check_rewards(top: Top, sections: Sections, rewards: tuple[RewardPlan, ...]) -> None:
    """Check the rewards and the advantages of a run."""
    check_objective.check_groups(top, compares_prompts=check_objective.check_steps(top))
    check_objective.check_rewards(top, rewards)
    if not (sections.rewards or top.workflow):
        switch = "use_opd: true" if sections.mode == "mixed" else "a run without a teacher"
        top.diag.error("rewards", f"is missing; {switch} needs a reward; write for example rewards.math_rule")


def _tasks(top: Top, sections: Sections) -> tuple[DataPlan, None]:
    """Return (training tasks, None).

    The second value stands for the held-out rows of `_prompts`. `Top.held_out_tasks` plans the validation on tasks.
    """
    training, held_out = top.tasks()
    if not sections.lacks_teacher:  # the tasks return the rewards
        row_plans.check_tags(sections, (), training, held_out, top.diag)
    return training, None


def _prompts(top: Top, sections: Sections, rewards: tuple[RewardPlan, ...]) -> tuple[DataPlan | None, DataPlan | None]:
    """Return (training prompts, validation prompts); a value is None if there are no such prompts."""
    training = sections.train.data_args if sections.train else None
    data = row_plans.read_data(training, top, top.prompt_length) if training else None
    validation = None
    if top.validation and (sections.rewards or top.workflow):
        validation = row_plans.read_data(top.validation.data_args, top, top.prompt_length, training)
    elif top.validation and sections.mode == "pure":
        top.diag.note("validation", "is skipped, as no reward scores the answers; write rewards.math_rule")
    if None not in sections.rewards.values():  # if a section has a problem, its tags would seem to have no reward
        if training and data:
            data = replace(data, streams=row_plans.read_streams(training, data, rewards))
        if not sections.lacks_teacher:
            row_plans.check_tags(sections, rewards, data, validation, top.diag)
    if top.workflow:  # a workflow makes the prompts itself
        truth = (data and data.columns.get("ground_truth")) or top.response_key
        data, validation = (found and _for_workflow(found, truth) for found in (data, validation))
    return data, validation


def _for_workflow(data: DataPlan, truth: str) -> DataPlan:
    """Return the plan `data` with the schema of rows for a workflow.

    Args:
        truth: name of the column that has the ground truth.
    """
    columns = {key: name for key, name in data.columns.items() if key != "ground_truth"}
    columns |= {"ground_truth": truth} if truth != "ground_truth" else {}
    return replace(data, schema="task", prompt_length=MAX_TOKENS, columns=FrozenDict(columns), system_prompt=None)


def _demonstrations(top: Top) -> DataPlan | None:
    """Return the plan of the demonstrations; None for a run without demonstrations."""
    share, section = top.expert_data_ratio, top.demonstrations
    if section is None:
        if share:
            top.diag.error(
                "demonstrations",
                f"is missing; policy loss {top.policy_loss} trains on rows with answers, a share of {share:g}"
                " (expert_data_ratio); write demonstrations.data_args.file_name",
            )
        return None
    if not share:
        if loss_facts(top.policy_loss).needs != "demonstrations":  # a wrong share is reported elsewhere
            top.diag.error(
                "demonstrations",
                f"policy loss {top.policy_loss} does not use it; use algorithm_type mix or mix_chord, or remove it",
            )
        return None
    if top.makes_tasks:
        text = f"is available for answers to prompts, but not yet for trajectories{top.tasks_in}; remove this section"
        top.diag.unsupported("demonstrations", text)
        return None
    args = section.data_args
    data = row_plans.read_answers(args, top, section, top.longest, "prompt_length + response_length", "sft")
    if data is None:
        return None
    if not first_tags(data)[0]:
        args.diag.error("file_name", f"no row can be read in {', '.join(data.files)}; give rows with answers")
        return None
    return replace(data, streams=row_plans.read_streams(args, data))


def _workflow(top: Top) -> WorkflowPlan | None:
    """Return the plan of the workflow, or None if the run has no workflow.

    The caller adds the plans of the auxiliary models.
    """
    if top.workflow is None:
        return None
    values = shared(WorkflowKeys, top) | {"system_prompt": top.system_prompt}
    if top.plugin_dir:
        with top.diag.catching("plugin_dir", PathError):
            values["plugin_dir"] = str(find_path(top.plugin_dir) or top.plugin_dir)
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
    if not top.plugin_dir:  # its modules may replace a built-in workflow of the same name
        for argument, problem in argument_problems(top.workflow, top.workflow_args, top.workflow_reward):
            top.diag.error(f"workflow_args.{argument}", problem)
    arguments = {"workflow_args": FrozenDict(given), "workflow_reward_args": FrozenDict(top.workflow_reward_args)}
    return WorkflowPlan(**{**values, **arguments})
