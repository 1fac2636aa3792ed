"""Plan the parts of runs with rollouts: prompts or other tasks, teachers, rewards and workflows."""

from dataclasses import dataclass, replace
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
    RolloutPlan,
    ValidationPlan,
    WorkflowPlan,
)
from roll_opd.config.schema import CriticKeys, RemoteModelKeys, RolloutKeys, Run, Top, WorkflowKeys, keys_of, shared
from roll_opd.data.files import first_tags
from roll_opd.objective.algorithms import loss_facts
from roll_opd.planner import (
    check_async,
    check_devices,
    check_objective,
    check_values,
    parts,
    row_plans,
    teacher_context,
)
from roll_opd.planner.expand import expand
from roll_opd.planner.http_plans import check_http_teachers, check_scorers
from roll_opd.planner.objective_plan import engine_check_plan, objective_plan
from roll_opd.planner.read import Sections
from roll_opd.planner.reward_sections import read_rewards
from roll_opd.planner.role_reader import Roles
from roll_opd.workflows.workflow_checks import argument_problems, name_problem

TITLES = {
    "pure": "pure on-policy distillation",
    "mixed": "on-policy distillation with a reward",
    "rl": "reinforcement learning",
}
MAX_TOKENS = 2**31 - 1  # maximum tokens of a row that is not a prompt


def complete(sections: Sections, keys: type[Run], mode: str) -> None:
    """Complete the configuration in `sections`.

    Keys without a value from the user get their values from the algorithm or the tasks of the pipeline `keys`.
    """
    if issubclass(keys, Top):
        keys.before_roles(sections)
    if isinstance(sections.top, Top):
        sections.top = expand(sections.top, sections.workers, mode)


@dataclass(frozen=True)
class RolloutParts:
    """The checked values of a run with rollouts.

    Method `fields` converts them to fields of the plan.
    """

    top: Top
    roles: Roles
    sections: Sections
    sizes: check_values.Sizes
    rewards: tuple[RewardPlan, ...]
    data: DataPlan | None
    held_out: DataPlan | None
    demonstrations: DataPlan | None
    played: ValidationPlan | None  # validation on tasks of the pipeline

    @property
    def validates(self) -> bool:
        return bool(self.played or self.held_out)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        return self.top.prompt_length + (self.sizes.response or 0)

    def fields(self) -> dict[str, Any] | None:
        """Return the fields that only the plan of a run with rollouts has.

        The result is None if problems were reported.
        """
        top, roles, sizes, data = self.top, self.roles, self.sizes, self.data
        if top.diag.problems:
            return None
        assert roles.train and roles.infer and data and sizes.response and sizes.mini_batch
        sequences, samples = top.rollout_batch_size * sizes.n, sizes.mini_batch  # of a step; of an update
        demonstrations = None
        if self.demonstrations is not None:
            each = check_values.demonstration_rows(samples, top.expert_data_ratio or 0.0)
            samples -= each
            demonstrations = DemonstrationPlan(self.demonstrations, each, updates=sequences // samples)
        # tasks may have a remainder, for which one more update is made
        updates = top.ppo_epochs * -(-sequences // samples)
        critic = self._critic(sequences)
        steps = top.max_steps - (critic.critic_warmup if critic else 0)
        teachers = tuple(
            parts.teacher_plan(name, role, top, roles.train, sizes.response) for name, role in roles.teachers.items()
        )
        contexts = tuple(teacher.context for teacher in teachers if teacher.context)
        validation = self.played or self._validation(sizes.response)
        student = parts.train_plan(roles.train, top, sizes.mini_batch, updates * steps)
        rollout = parts.rollout_plan(roles.infer, top, sizes.n, sizes.response, sizes.held_out or 0)
        tested = engine_check_plan(top, rollout.sampling, roles.infer.strategy.args, roles.infer.diag)
        objective = objective_plan(top, roles.mode, updates, sizes.response, roles.shared_vocabulary, tested)
        workflow = _workflow(top)
        if workflow:
            models = tuple(self._auxiliaries(sizes.response))
            workflow = replace(workflow, auxiliary_models=models, is_scored=bool(self.rewards))
        check_async.check_validation_engines(
            top,
            rollout.engines,
            validates=bool(validation and top.eval_steps),
            has_auxiliaries=bool(workflow and workflow.auxiliary_models),
        )
        place = top.tasks_in or (" by workflow" if workflow else "")
        return {
            **shared(RolloutKeys, top),
            "mode": roles.mode,
            "pipeline": top.pipeline,
            "pipeline_args": FrozenDict(top.arguments()),
            "title": (top.title or TITLES[roles.mode]) + place,
            "max_steps": top.max_steps,
            "student": student,
            "rollout": rollout,
            "teachers": teachers,
            "rewards": tuple(
                replace(reward, engine=self._judge(reward.domain, sizes.response)) for reward in self.rewards
            ),
            "data": replace(data, contexts=() if workflow else contexts),  # workflows make the prompts
            "objective": top.objective_of_tasks(objective),
            "reference": parts.megatron_plan(roles.reference, top, roles.train) if roles.reference else None,
            "critic": critic,
            "demonstrations": demonstrations,
            "workflow": workflow,
            "extra_prompts": top.max_additional_running_prompts if top.is_use_additional_prompts else 0,
            "validation": validation,
        }

    def _critic(self, sequences: int) -> CriticPlan | None:
        """Return the plan of the critic.

        Args:
            sequences: number of sequences per step. The critic is updated on all of them, also in warm-up steps.
        """
        top, role, mini_batch = self.top, self.roles.critic, self.sizes.critic_mini_batch
        if not (role and mini_batch):
            return None
        total = top.max_steps * top.critic_epochs * -(-sequences // mini_batch)
        return CriticPlan(**vars(parts.train_plan(role, top, mini_batch, total)), **shared(CriticKeys, top))

    def _validation(self, response: int) -> ValidationPlan | None:
        """Return the plan of the validation on held-out prompts, or None if it is not configured."""
        section = self.top.validation
        if not (section and self.held_out):
            return None
        args = section.generating_args
        sampling = parts.sampling_plan(args, args.num_return_sequences or 1, self.sizes.held_out or response)
        return ValidationPlan(self.held_out, sampling, section.evaluate_teacher)

    def _judge(self, domain: str, response: int) -> RolloutPlan | None:
        """Return the plan of the engines that run the judge of a reward domain.

        The result is None if the domain has no local judge.
        """
        role = self.roles.judges.get(domain)
        return parts.judge_plan(role, self.top, response) if role else None

    def _auxiliaries(self, response: int) -> list[AuxiliaryPlan]:
        """Return the plans of the models that workflows call, in the order of the configuration."""
        found = []
        for name, section in self.sections.auxiliaries.items():
            if isinstance(section, RemoteModelKeys):
                if fault := address_fault(section.base_url):
                    section.diag.error("base_url", fault)
                address = section.base_url.rstrip("/")
                found.append(AuxiliaryPlan(name, None, address, section.api_key, section.model_name))
            elif role := self.roles.auxiliaries.get(name):
                found.append(AuxiliaryPlan(name, parts.judge_plan(role, self.top, response)))
        return found


def read(sections: Sections, roles: Roles) -> RolloutParts | None:
    """Return the checked parts of a run with rollouts.

    The result is None if the top-level keys could not be read.
    """
    top = sections.top
    if not isinstance(top, Top):
        return None
    top = top.with_tasks(roles.infer.worker.generating_args if roles.infer else None)
    check_values.check_replay_of_turns(top.workflow, roles.train)
    check_objective.check_objective(top, roles.mode)
    check_objective.check_topk(top, roles.shared_vocabulary)
    check_devices.check_devices(roles.placed(), top)
    check_async.check_async(top, roles)
    sizes = check_values.read_sizes(top, roles)
    teacher_context.check_teachers(roles, top, sizes.response or 0)
    check_http_teachers(roles, top)
    check_scorers(roles)
    if not top.makes_tasks:
        check_objective.check_samples(top, sizes.n, bool(sections.rewards))
    rewards = read_rewards(sections.rewards, roles.mode, 0 if top.makes_tasks else sizes.n)
    if None not in (*sections.teachers.values(), *sections.rewards.values()):
        check_objective.check_signals(top, roles, rewards)
    if sections.auxiliaries and not top.workflow:
        top.diag.unused("auxiliary_models")
    if roles.mode != "pure":
        _check_rewards(top, sections, rewards, sizes.n, roles.mode)
    data, held_out = _tasks(top, roles, sections) if top.makes_tasks else _prompts(top, roles, sections, rewards)
    demonstrations = _demonstrations(top, top.prompt_length + (sizes.response or 0))
    played = None
    if roles.infer and sizes.response:
        played = top.held_out_tasks(roles.infer.worker.generating_args, sizes.response)
    return RolloutParts(top, roles, sections, sizes, rewards, data, held_out, demonstrations, played)


def _check_rewards(top: Top, sections: Sections, rewards: tuple[RewardPlan, ...], responses: int, mode: str) -> None:
    """Check the rewards and the advantages of a run.

    Args:
        responses: number of responses per prompt.
    """
    check_objective.check_groups(top, responses, compares_prompts=check_objective.check_steps(top))
    check_objective.check_rewards(top, rewards)
    if not (sections.rewards or top.workflow):
        switch = "use_opd: true" if mode == "mixed" else "a run without a teacher"
        top.diag.error(
            "rewards", f"is missing; {switch} needs at least one reward; write for example rewards.math_rule"
        )


def _tasks(top: Top, roles: Roles, sections: Sections) -> tuple[DataPlan, None]:
    """Return (training tasks, None).

    The second value stands for the held-out rows of `_prompts`. `Top.held_out_tasks` plans the validation on tasks.
    """
    training, held_out = top.tasks()
    if None not in sections.teachers.values():  # the tasks return the rewards
        row_plans.check_tags(roles, (), training, held_out, top.diag)
    return training, None


def _prompts(
    top: Top, roles: Roles, sections: Sections, rewards: tuple[RewardPlan, ...]
) -> tuple[DataPlan | None, DataPlan | None]:
    """Return (training prompts, validation prompts); a value is None if there are no such prompts."""
    training = roles.train.worker.data_args if roles.train else None
    data = row_plans.read_data(training, top, top.prompt_length) if training else None
    validation = None
    if top.validation and (sections.rewards or top.workflow):
        validation = row_plans.read_data(top.validation.data_args, top, top.prompt_length, training)
    elif top.validation and roles.mode == "pure":
        top.diag.note("validation", "is skipped, as no reward scores the answers; write rewards.math_rule")
    if None not in sections.rewards.values():  # if a section has a problem, its tags would seem to have no reward
        if training and data:
            data = replace(data, streams=row_plans.read_streams(training, data, rewards))
        if None not in sections.teachers.values():
            row_plans.check_tags(roles, rewards, data, validation, top.diag)
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


def _demonstrations(top: Top, length: int) -> DataPlan | None:
    """Return the plan of the demonstrations; None for a run without demonstrations.

    Args:
        length: maximum number of tokens of a demonstration, prompt and answer together.
    """
    share, section = top.expert_data_ratio, top.demonstrations
    if section is None:
        if share:
            top.diag.error(
                "demonstrations",
                f"is missing; policy loss {top.policy_loss} trains on demonstrations (rows with answers), which are the"
                f" fraction {share:g} (expert_data_ratio) of each batch; write demonstrations.data_args.file_name",
            )
        return None
    if not share:
        if loss_facts(top.policy_loss).needs != "demonstrations":  # a wrong share is reported elsewhere
            top.diag.error(
                "demonstrations",
                f"is written, but policy loss {top.policy_loss} does not use it; use algorithm_type mix or"
                " mix_chord, or remove the section",
            )
        return None
    if top.makes_tasks:
        text = f"is available for answers to prompts, but not yet for trajectories{top.tasks_in}; remove this section"
        top.diag.unsupported("demonstrations", text)
        return None
    args = section.data_args
    data = row_plans.read_answers(args, top, section, length, "prompt_length + response_length", "sft")
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
        top.diag.unused(*sorted(keys_of(WorkflowKeys).keys() & top.written))
        return None
    values = shared(WorkflowKeys, top) | {"system_prompt": top.system_prompt}
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
    if not top.plugin_dir:  # its modules may replace a built-in workflow of the same name
        for argument, problem in argument_problems(top.workflow, top.workflow_args, top.workflow_reward):
            top.diag.error(f"workflow_args.{argument}", problem)
    arguments = {"workflow_args": FrozenDict(given), "workflow_reward_args": FrozenDict(top.workflow_reward_args)}
    return WorkflowPlan(**{**values, **arguments})
