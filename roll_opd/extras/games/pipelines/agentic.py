"""The pipeline `agentic`: runs in environments, as ROLL's configurations describe them.

A group of trajectories is planned like a prompt with `group_size` responses. `environment_workflow` plays the
trajectories.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from roll_opd.base.frozen import FrozenDict, thaw
from roll_opd.base.paths import PathError
from roll_opd.base.user_modules import dotted_path
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import DataPlan, ObjectivePlan, RunPlan, ValidationPlan
from roll_opd.config.schema import (
    MIXED_ROLES,
    PURE_ROLES,
    GeneratingArgs,
    Top,
    changed,
    key,
    settle,
    shared,
)
from roll_opd.data.prompt_source import Prompt
from roll_opd.extras.games import check, check_declared
from roll_opd.extras.games.pipelines.environment_keys import EnvironmentKeys, EnvironmentsPlayed, RewardNormalization
from roll_opd.extras.games.prompt_templates import (
    makes_steps,
    manager_problem,
    missing_observation_field,
    template_problems,
)
from roll_opd.extras.games.task_source import EnvironmentSource, held_out_tasks, rules_of
from roll_opd.objective.registry import AdvantageFacts
from roll_opd.planner.role_parts import sampling_plan
from roll_opd.planner.validate_sections import Sections

SECTIONS = ("custom_envs", "train_env_manager", "val_env_manager")
WORKFLOW = "environment_workflow"
# groupings over all trajectories of a tag; `state` groups by initial state, as every group does here
BY_TAG = ("tags", "inductive")
ASYM_CLIP = (-1.0, 3.0)  # bounds of the method `asym_clip` in RAGEN and earlier versions of ROLL
WITH_TOOL = ("roll_math", "math_python")
_PLAYED = "train_env_manager and custom_envs set it"
_PROMPTS = "custom_envs.TAG.agent_system_template and agent_template are the prompts of a game"
UNREAD = {  # key of a run over prompts -> its replacement in environments
    "num_return_sequences_in_group": _PLAYED,
    "workflow": _PLAYED,
    "workflow_args": _PLAYED,
    "workflow_reward": "the game gives the rewards",
    "workflow_reward_args": "the game gives the rewards",
    "system_prompt": _PROMPTS,
    "reply_prefix": _PROMPTS,
    "global_template": _PROMPTS,
    "tag_to_template": _PROMPTS,
}
SERVE = "start it with `python -m roll_opd.extras.games.serve`"


@dataclass(frozen=True, kw_only=True)
class Agentic(Top):
    """The pipeline agentic: a run in environments. It also has all keys of a run that rolls out."""

    pipeline = "agentic"
    loop = Top.pipeline
    launcher = ("learning in environments", "start_agentic_pipeline.py")
    makes_tasks = True
    tasks_in = " in environments"
    group_key = "train_env_manager.group_size"

    custom_envs: dict[str, EnvironmentKeys] | None = key(None, "environments by tag")
    train_env_manager: EnvironmentsPlayed | None = key(
        None, "the environments of training, and the number of trajectories of each environment"
    )
    val_env_manager: EnvironmentsPlayed | None = key(None, "the environments of validation, always with the same seeds")
    val_batch_size: int = key(-1, "number of trajectories in a validation; -1: all trajectories of val_env_manager")
    reward_normalization: RewardNormalization = key(RewardNormalization(), "baseline of a trajectory's reward")

    @classmethod
    def selected_by(cls, values: Mapping[str, Any]) -> str | None:
        """Return the key that selects a run in environments. In ROLL, the user chooses this by the launcher."""
        if own := next((name for name in SECTIONS if values.get(name)), None):
            return own
        return "pure_opd_pipeline_type" if values.get("pure_opd_pipeline_type") == "agentic" else None

    def arguments(self) -> Mapping[str, Any]:
        """Return no values: the loop reads the plans of data and workflow."""
        return {}

    @classmethod
    def before_roles(cls, sections: Sections) -> None:
        """Give the rollout the generating_args of `train_env_manager` if it has none; report sections without effect.

        Older configuration files of ROLL need this. `num_return_sequences` is removed, because a turn has one response.
        """
        top = sections.top
        played = top.train_env_manager if isinstance(top, cls) else None
        if top and sections.rewards:
            top.diag.note("rewards", "has no effect in environments: the game gives the rewards")
        for role in (PURE_ROLES[0], MIXED_ROLES[0]):
            if (trained := sections.workers.get(role)) and trained.data_args.written:
                trained.diag.unused("data_args")
        name = next((name for name in (PURE_ROLES[1], MIXED_ROLES[1]) if sections.workers.get(name)), None)
        infer = sections.workers[name] if name else None
        if name is None or infer is None:
            return
        args = infer.generating_args
        if played and not args.written:
            args = played.generating_args
        elif played:
            _report_overridden(played.generating_args, args)
        if args.num_return_sequences not in (None, 1):
            args.diag.note("num_return_sequences", "has no effect in environments: write train_env_manager.group_size")
        sections.workers[name] = changed(infer, {"generating_args": changed(args, {"num_return_sequences": None})})

    def with_tasks(self, args: GeneratingArgs | None) -> Self:
        """Return the keys that a run over prompts has: groups, responses, lengths, workflow and baselines.

        `rollout_batch_size` counts trajectories, as in ROLL. `max_new_tokens` limits a single turn, and all tokens
        before a turn count as its prompt.
        """
        played = self.train_env_manager or EnvironmentsPlayed()
        values: dict[str, Any] = {"num_return_sequences_in_group": played.group_size, "workflow": WORKFLOW}
        for name, instead in UNREAD.items():
            if name in self.written:
                self.diag.note(name, f"has no effect in environments: {instead}")
        values["rollout_batch_size"] = _groups(played, "rollout_batch_size", self.rollout_batch_size)
        values |= _lengths(self, args) | _levels(self)
        values["workflow_args"] = {"environments": {tag: _settings(self, tag, played) for tag in _tags(self)}}
        new = changed(self, values)
        settle(new, self.diag, self.written | values.keys())
        return new

    def tasks(self) -> tuple[DataPlan, DataPlan | None]:
        """Return the games of training and of validation."""
        validated = _tasks(self, self.val_env_manager) if self.val_env_manager else None
        return _tasks(self, self.train_env_manager or EnvironmentsPlayed()), validated

    def held_out_tasks(self, args: GeneratingArgs, response: int) -> ValidationPlan | None:
        """Return the plan of validation, or None if the configuration has no val_env_manager with tags.

        Tasks and sampling are the same as in training by default. `args` are the generating_args of the rollout, and
        `response` is the number of tokens of a turn.
        """
        played, section = self.val_env_manager, self.validation
        if section:
            for name in sorted(section.written & {"data_args", "generating_args"}):
                section.diag.note(name, "has no effect in environments: val_env_manager sets it")
        if played is None or not played.tags:
            if section and section.evaluate_teacher:
                section.diag.note("evaluate_teacher", "has no effect without games; write val_env_manager.tags")
            return None
        trajectories = self.val_batch_size if self.val_batch_size > 0 else played.num_env_groups * played.group_size
        own = {name: getattr(played.generating_args, name) for name in played.generating_args.written}
        merged = replace(args, **own)
        sampling = sampling_plan(merged, played.group_size, min(merged.max_new_tokens or response, response))
        limited = replace(_tasks(self, played), limit=_groups(played, "val_batch_size", trajectories))
        return ValidationPlan(limited, sampling, evaluate_teacher=bool(section and section.evaluate_teacher))

    def objective_of_tasks(self, plan: ObjectivePlan) -> ObjectivePlan:
        """Return the objective with the groups in which rewards are compared, and the bounds of normalised rewards."""
        normalised = self.reward_normalization
        return replace(
            plan,
            reward_groups="tag" if normalised.grouping in BY_TAG else "prompt",
            reward_bounds=ASYM_CLIP if normalised.method == "asym_clip" else None,
        )

    def check_advantage(self, facts: AdvantageFacts) -> bool:
        """Report an advantage that reads steps if a sample is a whole trajectory; return whether groups are compared.

        If rewards are compared by tag, they are not compared in groups.
        """
        known, tags = self.custom_envs or {}, self.train_env_manager.tags if self.train_env_manager else ()
        whole = [tag for tag in tags if tag in known and not makes_steps(known[tag].env_manager_cls)]
        name, normalised = self.adv_estimator, self.reward_normalization
        if facts.adds_steps and whole:
            self.diag.error(
                "adv_estimator",
                f"{name} reads the reward of each action, but a sample of {', '.join(whole)} is a whole trajectory;"
                " write env_manager_cls: roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager in this"
                " section of custom_envs, or use agentic_reinforce or grpo",
            )
        if facts.reads_states and self.norm_mean_type is None and self.norm_std_type is None:
            instead = f"reward_normalization.method is {normalised.method}; write mean, and grouping: traj_group_id"
            self.diag.note("adv_estimator", f"{name} compares nothing while {instead}")
        return normalised.grouping not in BY_TAG

    @classmethod
    def open_tasks(cls, plan: RunPlan) -> tuple[EnvironmentSource, list[Prompt]]:
        """Return the source of training tasks, and the tasks of validation."""
        validated = plan.validation.data if plan.validation else None
        held_out = held_out_tasks(validated.environments, validated.limit or 0) if validated else []
        return EnvironmentSource(plan.data.environments, plan.seed, rules_of(plan)), held_out

    @classmethod
    def named_code(cls, plan: RunPlan) -> Iterator[str]:
        """Yield the names of the environments' classes."""
        for settings in _played(plan).values():
            yield settings["env_type"]

    @classmethod
    def check_code(cls, plan: RunPlan) -> Iterator[str]:
        """Create the environments of this package, and import those of the user; yield their problems."""
        for tag, settings in _played(plan).items():
            for problem in check(settings["env_type"], thaw(settings["env_config"])):
                yield f"custom_envs.{tag}: {problem}"

    @classmethod
    def servers(cls, plan: RunPlan) -> Iterator[tuple[str, str, str]]:
        """Yield the servers of the environments `http`."""
        for tag, game in _played(plan).items():
            if game["env_type"] == "http" and "url" in game["env_config"]:
                yield f"custom_envs.{tag}.env_config.url", game["env_config"]["url"], SERVE


def _groups(played: EnvironmentsPlayed, name: str, trajectories: int) -> int:
    """Return the number of groups in a number of trajectories, which the key `name` counts."""
    groups, rest = divmod(trajectories, played.group_size)
    if rest or not groups:
        played.diag.error(
            "group_size",
            f"{played.group_size} trajectories per group do not divide {name} {trajectories}, which counts"
            " trajectories; change one of the two numbers",
        )
    return max(1, groups)


def _played(plan: RunPlan) -> Mapping[str, Any]:
    """Return the settings of the environments of a plan, by tag."""
    return plan.workflow.workflow_args.get("environments", {}) if plan.workflow else {}


def _settings(top: Agentic, tag: str, played: EnvironmentsPlayed) -> dict[str, Any]:
    """Return the settings of an environment, which the workflow reads."""
    section = _environment(top, tag)
    settings = shared(EnvironmentKeys, section)
    with section.diag.catching("env_type", PathError):
        settings["env_type"] = dotted_path(settings["env_type"])
    penalties = {"format_penalty": played.format_penalty} if played.format_penalty else {}
    settings["env_config"] = {**penalties, **settings["env_config"], **_tool(top, tag)}
    del settings["tool_wrapper"]
    if not settings["env_type"]:
        top.diag.error(f"custom_envs.{tag}.env_type", "is missing; name the game that is played")
    _check(settings, section.diag, bool(top.plugin_dir))
    return settings


def _report_overridden(own: GeneratingArgs, args: GeneratingArgs) -> None:
    """Report keys of `train_env_manager.generating_args` whose values are replaced by the rollout's generating_args."""
    for name in sorted(own.written - {"num_return_sequences"}):
        overridden, value = getattr(own, name), getattr(args, name)
        if overridden != value:
            where = f"{args.diag.at(name)} {value} overrides it, so write the value there"
            own.diag.note(name, f"{overridden} has no effect; {where}")


def _check(environment: Mapping[str, Any], diag: Diagnostics, has_plugins: bool) -> None:
    """Check the manager, the templates and the declared arguments of an environment."""
    if text := manager_problem(environment["env_manager_cls"]):
        diag.error("env_manager_cls", text)
        return  # which fields a template may have depends on the manager
    wrong = list(template_problems(environment))
    for name, text in wrong:
        diag.error(name, text)
    if not wrong and (field := missing_observation_field(environment)):
        diag.note(
            "agent_template", f"has no {{{field}}}, so the model never sees the game; write {{{field}}} in the template"
        )
    if environment["env_type"]:
        for text in check_declared(environment["env_type"], environment["env_config"], has_plugins):
            diag.unsupported("", text)


def _tags(top: Agentic) -> list[str]:
    """Return the tags of the environments used in training or validation; report unknown tags."""
    known, found = top.custom_envs or {}, []
    for played in (top.train_env_manager, top.val_env_manager):
        if played is None:
            continue
        for tag in played.tags:
            if tag not in known:
                played.diag.error("tags", f"{tag!r} is not in custom_envs ({', '.join(known) or 'there are none'})")
            elif tag not in found:
                found.append(tag)
    if not (top.train_env_manager and top.train_env_manager.tags):
        top.diag.error(
            "train_env_manager.tags", "is missing; write the tags of custom_envs that are played in training"
        )
    return found


def _tool(top: Agentic, tag: str) -> dict[str, Any]:
    """Return the arguments of an environment that has a Python tool, read from ROLL's `tool_wrapper`."""
    environment = _environment(top, tag)
    if not environment.tool_wrapper:
        return {}
    arguments: dict[str, Any] = environment.tool_wrapper.get("wrapper_args") or {}
    tools: list[Any] = environment.tool_wrapper.get("tool_configs") or []
    named = [tool.get("tool_id") if isinstance(tool, dict) else tool for tool in tools]
    if environment.env_type not in WITH_TOOL or named != ["python_code"]:
        top.diag.unsupported(
            f"custom_envs.{tag}.tool_wrapper",
            f"gives {environment.env_type} the tools {named}; {' and '.join(WITH_TOOL)} have the tool python_code; for"
            " other tools, write an environment of your own",
        )
        return {}
    found = {"max_tool_uses": arguments.get("max_tool_uses", 10)}
    if seconds := (tools[0].get("tool_args") or {}).get("timeout"):
        found["tool_seconds"] = float(seconds)
    return found


def _environment(top: Agentic, tag: str) -> EnvironmentKeys:
    return (top.custom_envs or {})[tag]


def _lengths(top: Agentic, args: GeneratingArgs | None) -> dict[str, Any]:
    """Return prompt_length and response_length.

    response_length is the length of a turn. The two add up to sequence_length, the length of a whole trajectory.
    """
    turns = [environment.max_tokens_per_step for environment in (top.custom_envs or {}).values()]
    most = max((turn for turn in turns if turn), default=None)
    turn = args.max_new_tokens if args and args.max_new_tokens else most
    if turn is None or top.sequence_length is None or turn >= top.sequence_length:
        if turn and top.sequence_length:
            top.diag.error(
                "sequence_length",
                f"{top.sequence_length} is not more than the {turn} tokens of a turn, so no token is left for the"
                " prompt; raise sequence_length",
            )
        return {}
    return {"prompt_length": top.sequence_length - turn, "response_length": turn}


def _levels(top: Agentic) -> dict[str, Any]:
    """Return norm_mean_type and norm_std_type, the levels at which rewards are normalised. See also `compared`."""
    normalised = top.reward_normalization
    level = "batch" if normalised.grouping == "batch" else "group"
    by_method: dict[str, tuple[str | None, str | None]] = {
        "identity": (None, None),
        "mean": (level, None),
    }
    mean, std = by_method.get(normalised.method, (level, level))
    own = {"norm_mean_type": normalised.norm_mean_type or mean, "norm_std_type": normalised.norm_std_type or std}
    return {key: value for key, value in own.items() if key not in top.written}


def _tasks(top: Agentic, played: EnvironmentsPlayed) -> DataPlan:
    """Return the tasks of `train_env_manager` or `val_env_manager`."""
    given = played.num_groups_partition
    if given is None:
        most, more = divmod(played.num_env_groups, max(1, len(played.tags)))
        given = tuple(most + (place < more) for place in range(len(played.tags)))
    elif len(given) != len(played.tags) or sum(given) != played.num_env_groups:
        played.diag.error(
            "num_groups_partition",
            f"{list(given)} should be one number for each of the {len(played.tags)} tags, and the numbers should sum to"
            f" num_env_groups {played.num_env_groups}",
        )
    shares = {tag: groups for tag, groups in zip(played.tags, given, strict=False) if groups}
    return DataPlan((), top.prompt_length, schema="task", environments=FrozenDict(shares))
