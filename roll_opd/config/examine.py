"""Reads and checks a whole configuration against itself, its models and its surroundings.

The order is the order in which a user thinks: roles, models, layouts, devices, lengths, batches, data,
output. Everything that can be checked is, so that all problems come out together.
"""

from dataclasses import dataclass, replace
from typing import Any

from roll_opd.config import checks, surroundings
from roll_opd.config.agentic import read_agentic, turn_lengths
from roll_opd.config.algorithm_keys import expand, pipeline_problem
from roll_opd.config.demonstrations import expert_rows, read_expert
from roll_opd.config.distillation import check_topk
from roll_opd.config.errors import ConfigError, Findings
from roll_opd.config.interleaving import read_streams
from roll_opd.config.load import LoadedConfig
from roll_opd.config.modality import vision_problem
from roll_opd.config.models import ModelFilesError, same_weights
from roll_opd.config.objective import check_baseline, check_kl_horizon, check_objective
from roll_opd.config.plan import AgenticPlan, DataPlan, DemonstrationPlan, RewardPlan
from roll_opd.config.rewards import read_rewards
from roll_opd.config.roles import Role, Roles, choose_mode, is_agentic, read_roles
from roll_opd.config.schema import Top
from roll_opd.config.sections import read_sections
from roll_opd.config.tokenizers import has_tokenizer, largest_token_id, tokenizer_difference
from roll_opd.config.trackers import read_trackers


@dataclass(frozen=True)
class Checked:
    """Everything `assemble` needs, read and found right."""

    loaded: LoadedConfig
    roles: Roles
    top: Top
    exp_name: str
    n: int
    response: int
    mini_batch: int
    critic_mini_batch: int | None
    data: DataPlan
    validation_data: DataPlan | None
    expert: DemonstrationPlan | None
    rewards: tuple[RewardPlan, ...]
    trackers: dict[str, dict[str, Any]]
    resume: bool | str
    num_nodes: int
    agentic: AgenticPlan | None


def check(loaded: LoadedConfig, pure: bool | None, findings: Findings) -> Checked | None:
    """Read and check everything; None if too little could be read to assemble a plan."""
    vision = vision_problem(loaded.values)
    if vision:
        raise ConfigError([vision])  # everything else would be said about a model that cannot be run at all
    elsewhere = pipeline_problem(loaded.values, findings)
    if elsewhere:
        raise ConfigError([elsewhere])  # everything else would be said about another pipeline's keys
    sections = read_sections(loaded.values, loaded.variables, findings)
    if sections.top is not None:
        workers = [worker for worker in sections.workers.values() if worker is not None]
        repeats = any(worker.generating_args.num_return_sequences for worker in workers)
        sections = replace(sections, top=expand(sections.top, repeats, findings))
    top = sections.top
    mode = choose_mode(loaded.values, sections, pure, findings)
    roles = read_roles(sections, mode, findings)
    for role in roles.placed():
        checks.check_layout(role, findings)
        if role.vllm is not None and role.facts is not None:
            key = f"{role.path}.strategy_args.strategy_config.tensor_parallel_size"
            checks.check_tensor_parallel(role.facts, role.vllm.tp, key, findings, copies_kv_heads=True)
    _compare_models(roles, bool(top and (top.allow_self_teacher or top.opsd_mode)), findings)
    if top is None:
        return None
    agentic = is_agentic(loaded.values)
    if agentic:
        top = turn_lengths(top, roles.infer.worker if roles.infer else None)
    check_objective(top, mode, findings)
    if roles.shared_vocabulary:
        check_topk(top, roles.shared_vocabulary, findings)
    checks.check_devices(roles.placed(), top, findings)
    n = _responses_per_prompt(top, roles.infer, findings)
    response = _check_lengths(top, roles, findings)
    share = top.expert_data_ratio or 0.0
    mini = checks.mini_batch(top, roles.train, n, agentic, findings, share) if roles.train else None
    critic_mini = checks.mini_batch(top, roles.critic, n, agentic, findings) if roles.critic else None
    environments = read_agentic(top, findings) if agentic else None
    data = DataPlan((), top.prompt_length) if agentic else None  # environments make their own prompts
    if roles.train and not agentic:
        data = surroundings.read_data(
            roles.train.worker.data_args, f"{roles.train.path}.data_args", top, top.prompt_length, findings
        )
    validation = None
    if top.validation and not agentic:
        if sections.rewards:
            training = roles.train.worker.data_args if roles.train else None
            path = "validation.data_args"
            validation = surroundings.read_data(
                top.validation.data_args, path, top, top.prompt_length, findings, training
            )
        elif mode == "pure":
            findings.warn("validation: is left out, there is no reward to score the answers; write rewards.math_rule")
    expert = read_expert(top, top.prompt_length + (response or 0), agentic, findings)
    group = environments.train.group_size if environments else n
    check_baseline(top, mode, group, findings)
    if mode != "pure":
        check_kl_horizon(top, top.rollout_batch_size * n, findings)
    rewards = read_rewards(sections.rewards, mode, group, findings)
    if mode != "pure" and not agentic and not sections.rewards:
        switch = "use_opd: true" if mode == "mixed" else "a run without a teacher"
        findings.problem("rewards", f"is missing; {switch} learns from rewards, write at least rewards.math_rule")
    if data is not None and None not in sections.rewards.values():
        streams = read_streams(roles.train.worker.data_args, f"{roles.train.path}.data_args", data, rewards, findings)
        data = replace(data, streams=streams)
    _check_micro_batches(top, roles, response, findings)
    teacher_tags = {role.path: role.worker.tag_included or None for role in roles.teachers.values()}
    if None not in sections.teachers.values() and None not in sections.rewards.values():
        surroundings.check_tags(mode, teacher_tags, rewards, data, validation, findings)
    exp_name = top.exp_name or loaded.name
    surroundings.check_output(top, exp_name, roles.train.facts if roles.train else None, findings)
    trackers = read_trackers(top, findings)
    resume = surroundings.read_resume(top, findings)
    findings.warn_ignored()
    if findings.problems or response is None or mini is None or data is None:
        return None
    return Checked(
        loaded=loaded,
        roles=roles,
        top=top,
        exp_name=exp_name,
        n=n,
        response=response,
        mini_batch=mini,
        critic_mini_batch=critic_mini,
        data=data,
        validation_data=validation,
        expert=_expert(expert, mini, share, top.rollout_batch_size * n),
        rewards=rewards,
        trackers=trackers,
        resume=resume,
        num_nodes=checks.nodes(roles.placed(), top),
        agentic=environments,
    )


def _expert(data: DataPlan | None, mini: int, share: float, samples: int) -> DemonstrationPlan | None:
    if data is None:
        return None
    rows = expert_rows(mini, share)
    return DemonstrationPlan(data, rows, updates=samples // (mini - rows))


def _responses_per_prompt(top: Top, infer: Role | None, findings: Findings) -> int:
    """Return the group size, or the rollout's num_return_sequences where only that is written."""
    own = infer.worker.generating_args.num_return_sequences if infer else None
    group = top.num_return_sequences_in_group
    if infer and own is not None and group is not None and own != group:
        findings.problem(
            f"{infer.path}.generating_args.num_return_sequences",
            f"{own} contradicts num_return_sequences_in_group {group}; write one of them",
        )
    return group or own or 1


def _check_lengths(top: Top, roles: Roles, findings: Findings) -> int | None:
    """Return the rollout's max_new_tokens after checking it against every model's positions."""
    infer = roles.infer
    response = checks.response_length(top, infer.worker if infer else None, infer.path if infer else "", findings)
    if infer is not None:
        checks.check_sampling(infer.worker.generating_args, f"{infer.path}.generating_args", findings)
    if response is None:
        return None
    asked = infer.worker.generating_args.max_new_tokens if infer else None
    key = f"{infer.path}.generating_args.max_new_tokens" if infer and asked else "response_length"
    _check_positions(top, roles, response, key, findings)
    args = top.validation.generating_args if top.validation else None
    if args and args.max_new_tokens:
        key = "validation.generating_args.max_new_tokens"
        _check_positions(top, roles, args.max_new_tokens, key, findings)
    if infer is not None:
        longest = max(response, (args.max_new_tokens if args else None) or 0)
        checks.check_model_length(infer, top.prompt_length + longest, findings)
    return response


def _check_positions(top: Top, roles: Roles, new: int, key: str, findings: Findings) -> None:
    what = f"prompt_length {top.prompt_length} + {new} new tokens"
    checks.check_positions(roles.all(), top.prompt_length + new, what, key, findings)


def _check_micro_batches(top: Top, roles: Roles, response: int | None, findings: Findings) -> None:
    if response is None:
        return
    longest = top.prompt_length + response
    for role in (roles.train, *roles.teachers.values(), roles.reference, roles.critic):
        if role is not None:
            checks.micro_batch(role, False, longest, findings)
    for role in (roles.train, roles.critic):
        if role is not None:
            checks.micro_batch(role, True, longest, findings)


def _compare_models(roles: Roles, allow_self_teacher: bool, findings: Findings) -> None:
    """Check that the rollout runs the trained model, teachers differ from it and tokenizers agree."""
    train, infer = roles.train, roles.infer
    if train is None or train.facts is None:
        return
    check_vocabulary(train, findings)
    if infer is not None and infer.facts is not None and infer.facts.path != train.facts.path:
        findings.problem(
            f"{infer.path}.model_args.model_name_or_path",
            f"{infer.facts.path} is not the model that {train.path} trains ({train.facts.path}); leave it out",
        )
    if roles.reference is not None:
        compare_tokenizers(train, roles.reference, "reference policy", findings)
    if roles.critic is not None:
        compare_tokenizers(train, roles.critic, "critic", findings)
    for role in roles.teachers.values():
        if role.facts is None:
            continue
        key = f"{role.path}.model_args.model_name_or_path"
        if not allow_self_teacher and same_weights(train.facts, role.facts):
            same = "path" if train.facts.path == role.facts.path else "weights"
            findings.problem(
                key,
                f"the teacher has the student's {same} ({role.facts.path}), so there is nothing to"
                f" learn from it; give"
                " another model, or set allow_self_teacher: true",
            )
        if not compare_tokenizers(train, role, "teacher", findings):
            continue
        check_vocabulary(role, findings)
        if role.facts.vocab < train.facts.vocab:
            findings.warn(
                f"{role.path}: the teacher has {role.facts.vocab} token ids, the student"
                f" {train.facts.vocab}; the ids"
                " between are padding that the student must not sample"
            )


def compare_tokenizers(train: Role, role: Role, who: str, findings: Findings) -> bool:
    """Check that `role` reads the student's tokens as the student does; False if its files cannot be read."""
    if role.facts is None or train.facts is None:
        return False
    if not (has_tokenizer(role.facts.path) and has_tokenizer(train.facts.path)):
        return False  # told by the roles
    key = f"{role.path}.model_args.model_name_or_path"
    try:
        difference = tokenizer_difference(train.facts.path, role.facts.path)
    except ModelFilesError as error:
        findings.problem(key, str(error))
        return False
    if difference:
        findings.problem(
            key,
            f"the tokenizers of student and {who} differ: {difference}; a {who} can only score the student's tokens"
            " if both tokenizers and chat templates are the same",
        )
    return True


def check_vocabulary(role: Role, findings: Findings) -> None:
    if role.facts is None:
        return
    try:
        largest = largest_token_id(role.facts.path)
    except ModelFilesError as error:
        findings.problem(f"{role.path}.model_args.model_name_or_path", str(error))
        return
    if largest is not None and largest >= role.facts.vocab:
        findings.problem(
            f"{role.path}.model_args.model_name_or_path",
            f"the tokenizer uses token id {largest}, but the model has only {role.facts.vocab} (vocab_size);"
            " give model and tokenizer of the same release",
        )
