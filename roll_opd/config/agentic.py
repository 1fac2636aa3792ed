"""Reads the agentic sections: which environments are played, and how many of each.

Agentic runs are planned and described; `availability` says that they cannot be run yet.
"""

from collections.abc import Mapping
from typing import Any

from roll_opd.config.errors import Findings
from roll_opd.config.frozen import FrozenDict
from roll_opd.config.plan import AgenticPlan, EnvironmentsPlan
from roll_opd.config.schema import EnvManager, Top, Worker


def read_agentic(top: Top, findings: Findings) -> AgenticPlan | None:
    """Return the environments of a run, None if some cannot be told."""
    environments = _environments(top.custom_envs or {}, findings)
    if not environments:
        findings.problem("custom_envs", "is missing; an agentic run needs the environments it plays, by tag")
    train = _groups("train_env_manager", top.train_env_manager or EnvManager(), environments, findings)
    validation = None
    if top.val_env_manager is not None:
        validation = _groups("val_env_manager", top.val_env_manager, environments, findings)
    if train is None:
        return None
    normal = top.reward_normalization
    return AgenticPlan(FrozenDict(environments), train, validation, normal.grouping, normal.method)


def turn_lengths(top: Top, infer: Worker | None) -> Top:
    """Return `top` with lengths that add up to the whole trajectory.

    `max_new_tokens` is what one turn may say; everything before a turn is its prompt.
    """
    turn = infer.generating_args.max_new_tokens if infer else None
    if top.sequence_length is None or turn is None or turn >= top.sequence_length:
        return top
    return top.model_copy(update={"prompt_length": top.sequence_length - turn, "response_length": turn})


def _environments(custom: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    found = {}
    for tag, definition in custom.items():
        if isinstance(definition, dict) and isinstance(definition.get("env_type"), str):
            found[tag] = definition
        else:
            findings.problem(f"custom_envs.{tag}", f"{definition!r} is no environment; write a mapping with env_type")
    return found


def _groups(
    key: str, manager: EnvManager, environments: Mapping[str, Any], findings: Findings
) -> EnvironmentsPlan | None:
    for tag in manager.tags:
        if environments and tag not in environments:
            known = ", ".join(environments)
            findings.problem(f"{key}.tags", f"no environment {tag!r} in custom_envs; there are: {known}")
    groups, total = manager.num_groups_partition, manager.num_env_groups
    if groups is None:
        share, rest = divmod(total, len(manager.tags) or 1)
        groups = tuple(share + (index < rest) for index in range(len(manager.tags)))
    if len(groups) != len(manager.tags) or sum(groups) != total:
        findings.problem(
            f"{key}.num_groups_partition",
            f"{list(groups)} should hold one number for each of the {len(manager.tags)} tags, {total} in all"
            " (num_env_groups)",
        )
        return None
    return EnvironmentsPlan(
        manager.tags, groups, manager.group_size, manager.max_env_num_per_worker, manager.max_traj_per_env
    )
