"""Sections of the pipeline `agentic`: a game, the games that are played, and the baseline of their rewards."""

from dataclasses import dataclass
from typing import Any, Literal

from roll_opd.config import roll_keys as roll
from roll_opd.config.schema import (
    AboveZero,
    Count,
    GeneratingArgs,
    Many,
    Name,
    Number,
    Positive,
    Section,
    Several,
    Texts,
    Worker,
    key,
    keys_of,
    ours,
)

# ROLL's keys without effect here
IGNORED_ENVIRONMENT = frozenset(
    ["use_thread_lock", "agent_runner_cls", "agent_runner_config", "tools", "model_name", "max_traj_tokens"]
)
IGNORED_ENV_MANAGER = frozenset(["llm_proxy", "group_filter_cls", "group_size_redundancy", "model_type"])
IGNORED_ENV_MANAGER |= {"max_env_num_per_worker", "max_traj_per_env"}  # `workflow_concurrency`, `rollout_batch_size`


@dataclass(frozen=True, kw_only=True)
class EnvironmentKeys(Section):
    """`custom_envs.TAG`: a game, and the templates of the model's prompts."""

    ignored = IGNORED_ENVIRONMENT
    env_type: Name = key("", "the game: a name in docs/environments.md, a dotted path, gymnasium:ID, or an id of GEM")
    env_config: dict[str, Any] = key({}, "its arguments")
    env_manager_cls: str | None = key(
        None,
        "class of ROLL that plays the game. With a StepEnvManager, each action is a separate sample, and the"
        " prompt of the sample has the past turns as text",
    )
    max_steps: Many = key(10, "maximum number of actions in a trajectory")
    max_tokens_per_step: Positive | None = key(None, "maximum tokens of the response to a turn")
    agent_system_template: str | None = key(None, "the system message")
    agent_template: str = key(
        "{observation}",
        "template of a user turn, with the fields {observation}, {turn_idx}, {actions_left}, {max_response_length},"
        " {suffix}; with a StepEnvManager {env_instruction}, {history}, {history_length}, {step_count},"
        " {current_step}, {current_observation}, {max_response_length}",
    )
    pre_step_template: str | None = key(None, "text before each observation, in place of agent_template")
    next_step_template: str | None = key(None, "text after each observation")
    history_length: Positive | None = key(None, "with a StepEnvManager: number of past turns in a prompt")
    tool_wrapper: dict[str, Any] | None = key(
        None, "ROLL's tool_configs and wrapper_args, for games with a Python tool"
    )
    max_env_step_concurrent: Count = key(
        0, "maximum number of concurrent steps of these games in a process; 0: no limit"
    )
    step_timeout: AboveZero = ours(60.0, "time limit of a step of the game, s")


@dataclass(frozen=True, kw_only=True)
class EnvironmentsPlayed(Section):
    """`train_env_manager` and `val_env_manager`: the games, and the number of trajectories of each game."""

    ignored = roll.IGNORED_WORKER | IGNORED_ENV_MANAGER | keys_of(Worker).keys() - {"generating_args"}
    tags: Texts = key((), "tags of the environments in custom_envs that are played")
    num_env_groups: Many = key(128, "number of groups of trajectories, as a sum over all tags")
    num_groups_partition: Several[Count] | None = key(
        None,
        "number of groups of each tag, in the order of tags; default: the groups are divided equally among the tags",
    )
    group_size: Many = key(1, "number of trajectories in a group, all from the same initial state")
    format_penalty: Number = key(
        0.0, "reward for an action that cannot be parsed; a format_penalty in env_config takes precedence"
    )
    generating_args: GeneratingArgs = key(
        GeneratingArgs(),
        "how actions are sampled. The generating_args of train_env_manager are used only if the rollout has no"
        " generating_args. In val_env_manager, each key of generating_args overrides the same key of the"
        " rollout",
    )


@dataclass(frozen=True, kw_only=True)
class RewardNormalization(Section):
    """`reward_normalization`: the baseline of a trajectory's reward."""

    ignored = frozenset({"global_scale_factor", "global_shift_value"})
    grouping: Literal["state", "batch", "inductive", "traj_group_id", "tags"] = key(
        "batch",
        "the trajectories whose rewards are compared; traj_group_id or state: those of one group; tags or inductive:"
        " those with the same tag; batch: all of a step",
    )
    method: Literal["identity", "mean", "mean_std", "asym_clip"] = key(
        "identity",
        "identity: use rewards unchanged; mean: subtract the mean; mean_std: subtract the mean and divide by"
        " the standard deviation; asym_clip: the same as mean_std, then clip to [-1, 3]",
    )
    # the same order as elsewhere: typing caches both orders as one type, and the page shows the order seen first
    norm_mean_type: Literal["group", "batch"] | None = key(
        None,
        "the mean reward of these samples is subtracted; takes precedence over method",
    )
    norm_std_type: Literal["group", "batch"] | None = key(
        None,
        "the rewards of these samples are divided by their standard deviation; takes precedence over method",
    )
