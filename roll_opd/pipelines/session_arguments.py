"""Check the arguments of a session's calls.

A call checks its arguments before it calls a role. An error here therefore ends only the call. Every error is one
sentence: the argument, its value, the problem and the remedy.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from roll_opd.base.failures import did_you_mean
from roll_opd.base.frozen import FrozenDict
from roll_opd.base.registry import type_problem
from roll_opd.config.plan import DataPlan, ObjectivePlan, RolloutPlan, RunPlan, SamplingPlan
from roll_opd.config.schema import DistillationKeys, GeneratingArgs, ReinforcementKeys, keys_of
from roll_opd.config.schema.key_types import Many, NotNegative
from roll_opd.data.dataset import Prompt
from roll_opd.data.row_formats import BadRow, Row, parse_row, with_system_prompt
from roll_opd.models.model_info import read_model
from roll_opd.objective.aggregation import MODES
from roll_opd.objective.algorithms import (
    DIVERGENCE_NAMES,
    KL_LOSSES,
    algorithm,
    algorithm_names,
    check_combination,
    loss_facts,
)
from roll_opd.objective.registry import POLICY_LOSSES, advantage, opd_advantage, policy_loss
from roll_opd.samples.sample import Sample, TargetRef

PURE = "on_policy_distill"  # name of pure distillation as an advantage estimator
SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "max_new_tokens")
NAMES = {  # keys of the objective whose value is a name -> the names
    "loss_agg_mode": MODES,
    "kl_loss": KL_LOSSES,
    "kl_penalty": ("kl", "mse", "abs", "low_var_kl", "full"),
    "opd_divergence": DIVERGENCE_NAMES,
}
_CLIPS = ("pg_clip", "pg_clip_low", "pg_clip_high", "dual_clip")
# keys of the objective that a single call cannot change -> the remedy
FIXED = {
    **dict.fromkeys(
        ("opd_topk", "opd_topk_source", "opd_vocab_size", "correction", "max_age", "paired", "loss_normaliser"),
        "set it in the configuration",
    ),
    **dict.fromkeys(("init_kl_coef", "target_kl", "kl_horizon"), "set it in the configuration"),
    **dict.fromkeys(
        ("norm_mean_type", "norm_std_type"), "pass advantage_args={'mean_cal_level': ..., 'std_cal_level': ...}"
    ),
    "ppo_epochs": "call forward_backward and optim_step several times",
    "recompute_old_logprobs": "call student.logprobs(batch)",
}


def value_of(call: str, name: str, value: Any, annotation: Any) -> Any:
    """Return the value of an argument, as a Python number if it is a number of NumPy.

    Raises ValueError if the value is not of the type `annotation`, or not finite.
    """
    value = value.item() if isinstance(value, np.generic) else value
    problem = type_problem(annotation, value)
    if problem is None and isinstance(value, float) and not math.isfinite(value):
        problem = f"should be a finite number, got {value!r}"
    if problem:
        raise ValueError(f"{call}: {name} {problem}")
    return value


def count_of(call: str, name: str, value: Any) -> int:
    """Return a number of prompts or samples. Raises ValueError unless it is an integer of at least 1."""
    return int(value_of(call, name, value, Many))


def learning_rate_of(value: Any) -> float | None:
    """Return the learning rate of an optimizer step. Raises ValueError unless it is None or a number of at least 0."""
    rate = value_of("optim_step", "learning_rate", value, NotNegative | None)
    return None if rate is None else float(rate)


def prompts_of(prompts: Any) -> list[Any]:
    """Return the prompts as a list of texts, of lists of messages, and of elements of `Session.prompts`.

    Raises TypeError or ValueError if a value is none of these, for example a single text or a single conversation.
    """
    kinds = "texts, lists of messages, or elements of session.prompts(n)"
    if isinstance(prompts, str | Prompt | Mapping) or not isinstance(prompts, Sequence):
        what = "one text" if isinstance(prompts, str) else f"a {type(prompts).__name__}"
        raise TypeError(f"sample: prompts is {what}; give a list of {kinds}")
    if not prompts:
        raise ValueError("sample: prompts is empty; give at least one prompt")
    if any(isinstance(prompt, Mapping) for prompt in prompts):
        raise TypeError("sample: prompts is one conversation; give a list of conversations: [messages]")
    for number, prompt in enumerate(prompts):
        messages = isinstance(prompt, list | tuple) and prompt and all(isinstance(part, Mapping) for part in prompt)
        if not isinstance(prompt, str | Prompt) and not messages:
            raise TypeError(f"sample: prompt {number} is {str(prompt)[:80]!r}, a {type(prompt).__name__}; give {kinds}")
    return list(prompts)


def row_of(prompt: str | Sequence[Mapping[str, Any]], fallback_id: str, data: DataPlan) -> Row:
    """Return the row of a text or of a list of messages, with the `system_prompt` of `data`.

    Raises ValueError if the prompt cannot be used, for example a text if there is a `system_prompt`.
    """
    value = {"prompt": prompt} if isinstance(prompt, str) else {"messages": [dict(message) for message in prompt]}
    try:
        return with_system_prompt(parse_row(value, fallback_id), data.system_prompt)
    except BadRow as bad:
        said = ": ".join(filter(None, (bad.kind, bad.detail)))
        raise ValueError(f"sample: prompt {str(prompt)[:80]!r} cannot be used: {said}") from None


def sampling_of(sampling: SamplingPlan, n: Any, keys: Mapping[str, Any]) -> SamplingPlan:
    """Return the settings of a `sample` call: the configured settings with `n` and `keys` changed.

    Raises ValueError for an unknown key and for a value that the configuration would not accept.
    """
    types = get_type_hints(GeneratingArgs, include_extras=True)
    _check_known("sample", keys, SAMPLING)
    changed: dict[str, Any] = {name: value_of("sample", name, value, types[name]) for name, value in keys.items()}
    if None in changed.values():
        raise ValueError(f"sample: {_listed(k for k, v in changed.items() if v is None)} is None; leave it out")
    if n is not None:
        changed["n"] = count_of("sample", "n", n)
    return replace(sampling, **changed)


def check_lengths(prompts: Sequence[Prompt], sampling: SamplingPlan, rollout: RolloutPlan, longest: int) -> None:
    """Raise ValueError if a prompt and its response do not fit into the engines.

    Args:
        sampling: settings of the call.
        longest: configured maximum number of tokens of a prompt.
    """
    for number, prompt in enumerate(prompts):
        tokens, room = len(prompt.tokens), rollout.max_model_len - len(prompt.tokens)
        asked = sampling.max_new_tokens
        is_own = asked != rollout.sampling.max_new_tokens
        if not tokens:
            raise ValueError(f"sample: prompt {number} has no tokens; give a text")
        if (tokens > longest and (room < 1 or not is_own)) or room < (asked if is_own else 1):
            raise ValueError(
                f"sample: prompt {number} has {tokens} tokens, but prompt_length is {longest}, and with max_new_tokens"
                f" {asked} a sequence may have at most {rollout.max_model_len}; shorten the prompt, or raise"
                " prompt_length or response_length in the configuration"
            )


def objective_of(plan: RunPlan, keys: Mapping[str, Any]) -> ObjectivePlan:
    """Return the objective of a `forward_backward` call: the configured objective with `keys` changed.

    Values that the planner derives from a changed key, such as the arguments of another loss, are derived again. Raises
    ValueError for an unknown key, a value that the configuration would not accept, a key that has no effect in the
    call, and a combination that trains nothing.
    """
    call, own = "forward_backward", plan.objective
    types = get_type_hints(ObjectivePlan, include_extras=True)
    known = [each.name for each in fields(ObjectivePlan) if each.name not in FIXED]
    for name in sorted(keys.keys() & FIXED):
        raise ValueError(f"{call}: {name} cannot be changed for one call; {FIXED[name]}")
    _check_known(call, keys, known)
    arguments = {name for name in keys if name.endswith("_args")}
    for name in arguments:
        value_of(call, name, keys[name], dict)
    values: dict[str, Any] = {
        name: FrozenDict(value) if name in arguments else value_of(call, name, value, types[name])
        for name, value in keys.items()
    }
    changed = replace(own, **values)
    changed = replace(changed, policy_loss_args=_loss_arguments(own, changed, keys))
    if "adv_estimator" in keys and "advantage_args" not in keys and changed.adv_estimator != own.adv_estimator:
        changed = replace(changed, advantage_args=FrozenDict())
    _check_names(changed, keys)
    _check_effects(plan, changed, keys)
    return changed


def _loss_arguments(own: ObjectivePlan, changed: ObjectivePlan, keys: Mapping[str, Any]) -> FrozenDict:
    """Return the arguments of the policy loss: those of the call, or else those of the configuration for this loss."""
    loss = changed.policy_loss
    clips: dict[str, Any] = {}
    if loss in POLICY_LOSSES.builtin and loss_facts(loss).reads_pg_clip:
        low, high = changed.pg_clip_low, changed.pg_clip_high
        low, high = changed.pg_clip if low is None else low, changed.pg_clip if high is None else high
        clips = {"clip_low": low, "clip_high": high, "dual_clip": changed.dual_clip}
    elif unread := keys.keys() & _CLIPS:
        raise ValueError(f"forward_backward: policy loss {loss} does not read {_listed(unread)}; leave it out")
    if "policy_loss_args" in keys:
        return FrozenDict({**clips, **changed.policy_loss_args})
    if loss != own.policy_loss:
        return FrozenDict(clips)
    written = {name: value for name, value in clips.items() if keys.keys() & _CLIPS}
    return FrozenDict({**own.policy_loss_args, **written})


def _check_names(objective: ObjectivePlan, keys: Mapping[str, Any]) -> None:
    """Raise AlgorithmError or ValueError if a loss, an estimator or another name does not exist."""
    loss = objective.policy_loss
    if loss in algorithm_names() and loss not in POLICY_LOSSES.builtin:
        known = algorithm(loss)
        raise ValueError(
            f"forward_backward: {loss} is an algorithm, not a policy loss; pass loss={known.policy_loss!r}"
            + (f" and adv_estimator={known.advantage!r}" if known.advantage else "")
        )
    policy_loss(loss, objective.policy_loss_args)
    if objective.adv_estimator == "gae":
        raise ValueError(
            "forward_backward: adv_estimator gae needs the values of a critic, and a session has no critic; use grpo,"
            " reinforce or another estimator"
        )
    advantage(objective.adv_estimator, objective.advantage_args)
    opd_advantage(objective.opd_advantage_fn, objective.opd_advantage_fn_args)
    for name, names in NAMES.items():
        if name in keys and keys[name] not in names:
            raise ValueError(f"forward_backward: {name} should be one of {_listed(names)}, got {keys[name]!r}")


def _check_effects(plan: RunPlan, objective: ObjectivePlan, keys: Mapping[str, Any]) -> None:
    """Raise ValueError if a key has no effect in this call, or if the objective trains nothing."""
    kind = objective.opd_objective
    if kind not in ("sampled", plan.objective.opd_objective):
        raise ValueError(
            f"forward_backward: opd_objective {kind} needs targets that this session's teachers do not compute; set"
            f" opd_objective: {kind} in the configuration"
        )
    of_sampled, of_divergence = (
        {"opd_kl_discount", "opd_chunk_credit", "opd_advantage_fn", "opd_advantage_fn_args"},
        keys_of(DistillationKeys).keys() - {"opd_objective"},
    )
    unread = dict.fromkeys(of_divergence if kind == "sampled" else of_sampled, f"opd_objective {kind}")
    if objective.adv_estimator == PURE:
        unread |= dict.fromkeys(keys_of(ReinforcementKeys).keys() - {"kl_loss_coef"}, f"adv_estimator {PURE}")
    if not objective.kl_loss_coef:
        unread["kl_loss"] = "kl_loss_coef 0"
    for name in sorted(keys.keys() & unread.keys()):
        raise ValueError(f"forward_backward: {name} has no effect with {unread[name]}; leave it out")
    wrong = check_combination(
        policy_loss=objective.policy_loss,
        advantage=objective.adv_estimator if loss_facts(objective.policy_loss).reads_advantages else None,
        kl_loss=objective.kl_loss if objective.kl_loss_coef else None,
        reference=plan.reference is not None,
        teachers=bool(plan.teachers),
        loss_agg_mode=objective.loss_agg_mode,
        opd_objective=kind,
    )
    if wrong:
        raise ValueError(f"forward_backward: {wrong[0][1]}")


def check_learnable(
    samples: Sequence[Sample], plan: RunPlan, targets: Mapping[str, Mapping[str, TargetRef]], *, rewarded: bool
) -> None:
    """Raise ValueError if samples lack a value that the objective reads: they would count with 0.

    Args:
        plan: the plan, with the objective and the coefficients of the call.
        targets: the teachers' targets of each sample, by its id.
        rewarded: whether the samples have rewards.
    """
    objective = plan.objective
    taught = [teacher for teacher in plan.teachers if teacher.opd_kl_coef]
    reads_reference = plan.reference is not None and (objective.kl_loss_coef or (rewarded and objective.init_kl_coef))
    for sample in samples:
        names = [teacher.name for teacher in taught if teacher.accepts(sample.tag)]
        if taught and not names and not rewarded:
            raise ValueError(
                f"forward_backward: sample {sample.id} has no reward, and no teacher accepts its tag {sample.tag}; add"
                " the tag to the tag_included of a teacher"
            )
        found = sample.teacher_logprobs if objective.opd_objective == "sampled" else targets.get(sample.id, {})
        missing = [f"of {name}" for name in names if name not in found]
        missing += ["of the reference policy"] if reads_reference and sample.ref_logprobs is None else []
        if missing:
            raise ValueError(
                f"forward_backward: sample {sample.id} has no log-probs {_listed(missing)}; call teacher.score(batch)"
                " first"
            )
        if (objective.correction or (rewarded and objective.init_kl_coef)) and sample.old_logprobs is None:
            raise ValueError(
                f"forward_backward: sample {sample.id} has no old log-probs, which train_infer_correction and"
                " add_token_level_kl read; call student.logprobs(batch) first"
            )
        if rewarded and not (sample.excluded or (sample.reward is not None and math.isfinite(sample.reward))):
            raise ValueError(
                f"forward_backward: the reward of sample {sample.id} is {sample.reward}, but other samples of the batch"
                " have one; give every sample a finite number"
            )
    if not (plan.teachers or rewarded or not loss_facts(objective.policy_loss).reads_advantages):
        raise ValueError(
            "forward_backward: the batch has no rewards and the configuration no teacher, so nothing would be learned;"
            " call session.reward(batch) or batch.with_rewards(numbers) first"
        )
    if not any(sample.learned_tokens for sample in samples):
        raise ValueError("forward_backward: no token of the batch is in the loss; sample other prompts")


def state_directory(directory: Path, plan: RunPlan) -> Path:
    """Return a directory that `save` wrote. Raises OSError or ValueError if it is none, or one of another model."""
    state, model = directory / "state", directory / "hf"
    if not directory.is_dir():
        raise FileNotFoundError(f"load: {directory} is not a directory; give the directory that student.save wrote")
    if not (state / ".metadata").is_file() or not (model / "config.json").is_file():
        outer = directory.parent
        hint = f"give {outer}" if (outer / "state" / ".metadata").is_file() else "give a directory that save wrote"
        what = "is a Hugging Face model" if (directory / "config.json").is_file() else "contains no state"
        start = "; to start from a model, set pretrain in the configuration" if "Hugging" in what else ""
        raise ValueError(
            f"load: {directory} {what}, but load restores the training state of student.save; {hint}{start}"
        )
    saved, own = read_model(model), read_model(Path(plan.student.model.path))
    adapter = "an adapter" if (directory / "adapter").is_dir() else "no adapter"
    expected = "an adapter" if plan.student.lora else "no adapter"
    if (saved.parameters, adapter) != (own.parameters, expected):
        raise ValueError(
            f"load: {directory} is the state of a model with {saved.parameters:,} parameters and {adapter}, but this"
            f" student has {own.parameters:,} and {expected}; open a session with the configuration that saved it"
        )
    return directory


def _check_known(call: str, keys: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := sorted(keys.keys() - set(known)):
        hint = did_you_mean(unknown[0], known)
        others = f"{f'{hint} Known' if hint else 'known'} are {', '.join(known)}"
        raise ValueError(f"{call}: no key {', '.join(unknown)}; {others}")


def _listed(names: Any) -> str:
    return ", ".join(sorted(names))
