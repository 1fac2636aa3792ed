"""Check that the keys of the objective fit the mode and each other.

An objective is refused if it gives no training signal, or another signal than the configured one. Keys without effect
are reported.
"""

from collections.abc import Sequence
from typing import Any

from roll_opd.config.diagnostics import as_yaml
from roll_opd.config.plan import RewardPlan
from roll_opd.config.roll_keys import KL_PENALTIES_LATER, PURE_FIXED
from roll_opd.config.schema import Top, unread
from roll_opd.objective.algorithms import (
    DIVERGENCE_NAMES,
    KL_LOSSES,
    KL_PENALTIES,
    advantage_facts,
    check_combination,
    loss_facts,
)
from roll_opd.objective.registry import ADVANTAGES, OPD_ADVANTAGES, POLICY_LOSSES, AlgorithmError
from roll_opd.planner.objective_plan import (
    LEVELS,
    NAMES_OF_A_LOSS,
    check_clip_range,
    check_correction,
    taken_by,
)
from roll_opd.planner.validate_sections import Sections

FEWEST_STEPS = 5  # the number of horizons after which an adaptive coefficient could reach 0
REPORTED_WITH_TEACHERS = {"whiten_advantages", "kl_penalty"}  # by `_check_beside_teachers`
NORMS = ("norm_mean_type", "norm_std_type")


def check_objective(top: Top, mode: str) -> None:
    """Report problems of the keys of the objective.

    Keys may contradict the mode, may have no effect in it, or may select an objective that is not available yet.
    """
    reported = {*PURE_FIXED, *(REPORTED_WITH_TEACHERS if top.opd_objective == "sampled" else ())}
    top.diag.unused(*(unread(top, _facts(top, mode)).keys() - (reported if mode == "pure" else set())))
    if top.importance_sampling not in (None, "token", "seq"):
        top.diag.unsupported("importance_sampling", f"{top.importance_sampling} is not available yet; remove the key")
    if top.kl_loss_fn is not None:
        top.diag.is_one_of("kl_loss_fn", top.kl_loss_fn, ("none", "k1", *KL_LOSSES))
    top.diag.is_one_of("kl_penalty", top.kl_penalty, (*KL_PENALTIES, *KL_PENALTIES_LATER))
    _check_functions(top, mode)
    if mode != "rl":
        _check_opd_advantage(top)
    if top.diag.is_one_of("opd_divergence", top.opd_divergence, DIVERGENCE_NAMES) and mode != "rl":
        _check_distillation(top)
    check_correction(top, mode)
    check_clip_range(top)
    if mode != "rl" and top.opd_objective == "sampled":
        _check_beside_teachers(top, mode)
    if mode == "pure":
        _check_pure(top)
    else:
        _check_reward_part(top)


def _facts(top: Top, mode: str) -> dict[str, Any]:
    """Return what the conditions of keys (`Section.read_if`) need to know in addition to the keys."""
    pure, name = mode == "pure", top.adv_estimator
    takes = taken_by(name) if name in ADVANTAGES.builtin else frozenset(LEVELS)
    return {
        "teachers": mode != "rl",
        "rewards": not pure,
        "advantages": not pure or top.opd_objective == "sampled",
        "advantage": frozenset() if pure else takes,
        "prompts": not top.makes_tasks,
    }


def _check_reward_part(top: Top) -> None:
    """Check the keys of a run with rewards: critic, normalisation of rewards, and KL to the reference policy."""
    if top.adv_estimator == "gae" and top.critic_warmup >= top.max_steps:
        top.diag.error(
            "critic_warmup",
            f"{top.critic_warmup} steps that train only the critic leave none of max_steps {top.max_steps} for the"
            " student; lower it",
        )
    if top.adv_estimator == "on_policy_distill":
        top.diag.error(
            "adv_estimator",
            "'on_policy_distill' is set by pure distillation itself and takes no rewards; write reinforce or grpo",
        )
    if top.adv_estimator in ADVANTAGES.elsewhere:
        known = " or ".join(name for name in ADVANTAGES.builtin if name != "on_policy_distill")
        top.diag.unsupported("adv_estimator", f"{top.adv_estimator!r} is not available yet; use {known}")
    if (top.use_kl_loss or top.add_token_level_kl) and top.kl_penalty in KL_PENALTIES_LATER:
        known = ", ".join(dict.fromkeys(KL_PENALTIES.values()))
        top.diag.unsupported("kl_penalty", f"{top.kl_penalty!r} is not available yet; use one of {known}")
    # ROLL's environments have reward_normalization instead
    is_rolls_grpo = not top.makes_tasks and top.adv_estimator == "grpo" and NAMES_OF_A_LOSS.isdisjoint(top.written)
    for key in NORMS:
        value = getattr(top, key)
        if is_rolls_grpo and key in top.written and value not in ("group", "running"):
            top.diag.warn(key, f"{value or 'null'} is used; ROLL's grpo uses group, which is the default here")
        if value == "running":
            top.diag.unsupported(key, "'running' is not available yet; use batch or group")
    if top.use_kl_loss and not top.kl_loss_coef:
        top.diag.note("use_kl_loss", "true has no effect while kl_loss_coef is 0 (ROLL's default)")
    if top.add_token_level_kl and top.init_kl_coef == 0:
        top.diag.note("add_token_level_kl", "true has no effect while init_kl_coef is 0")
        if top.target_kl is not None:
            top.diag.error("target_kl", "with init_kl_coef 0, the coefficient stays 0; set init_kl_coef above 0")


def check_samples(top: Top, has_rewards: bool) -> None:
    """Report masks that remove every sample, and masks that need rewards if the run has none."""
    if not has_rewards:
        for key in ("difficulty_mask", "error_max_len_clip"):
            if getattr(top, key):
                top.diag.error(key, "true needs rewards, but the run has none; remove this key, or write rewards")
    if top.difficulty_mask and top.responses == 1:
        top.diag.warn("difficulty_mask", "true has no effect with one response per prompt, as in ROLL")
    if top.difficulty_mask and top.difficulty_low_threshold >= top.difficulty_high_threshold:
        top.diag.error(
            "difficulty_low_threshold",
            f"{top.difficulty_low_threshold:g} and difficulty_high_threshold {top.difficulty_high_threshold:g} leave"
            " no prompt; lower it",
        )
    if top.rl_loss_coef == 0:
        top.diag.warn("rl_loss_coef", "0 removes the policy loss, so rewards and advantages have no effect")


def _check_beside_teachers(top: Top, mode: str) -> None:
    """Warn about keys that change the teachers' part of an advantage only in ROLL."""
    if top.whiten_advantages:
        pure = mode == "pure"
        instead = "has no effect in pure distillation" if pure else "whitens only the reward's part of an advantage"
        top.diag.warn(
            "whiten_advantages",
            f"true {instead}; ROLL also whitens the teachers' part, where positive values below the mean become"
            " negative",
        )
    if KL_PENALTIES.get(top.kl_penalty) != "kl":
        top.diag.warn(
            "kl_penalty",
            f"{top.kl_penalty} is not applied to the teachers' part, unlike in ROLL: this part is always the student's"
            " log-prob minus the teacher's (kl), whose expected gradient is that of the reverse KL",
        )


def check_steps(top: Top) -> bool:
    """Report an advantage that needs the rewards or states of single steps if the samples of the run have no steps.

    Return whether rewards are compared among the samples of a prompt.
    """
    name, facts = top.adv_estimator, advantage_facts(top.adv_estimator)
    if top.makes_tasks:
        return top.check_advantage(facts)
    if facts.reads_states and not top.workflow:
        top.diag.error(
            "adv_estimator",
            f"{name} compares actions from the same state of an environment, but answers to a prompt have none; use"
            " grpo",
        )
    if facts.reads_states and top.workflow and top.norm_mean_type is None and top.norm_std_type is None:
        instead = "norm_mean_type and norm_std_type are null; write norm_mean_type: group"
        top.diag.note("adv_estimator", f"{name} compares nothing while {instead}")
    return True


def _check_opd_advantage(top: Top) -> None:
    """Refuse an unknown function of opd_advantage_fn. Arguments of a user's function are checked before the start."""
    name, given = top.opd_advantage_fn, top.opd_advantage_fn_args
    if name == "reverse_kl":
        if given:
            top.diag.error("opd_advantage_fn_args", "reverse_kl takes no arguments; name another function")
        return
    with top.diag.catching("opd_advantage_fn", AlgorithmError):
        OPD_ADVANTAGES.located(name)


def _check_functions(top: Top, mode: str) -> None:
    """Report combinations of policy loss, advantage and KL loss that train nothing or do not fit together."""
    advantage = "on_policy_distill" if mode == "pure" else top.adv_estimator
    measures_kl = top.use_kl_loss and mode != "pure"
    facts = loss_facts(top.policy_loss)
    if facts.needs == "pairs":
        top.diag.unsupported(
            "policy_loss",
            f"{top.policy_loss!r} needs pairs of answers, but a rollout makes none; run it with start_dpo_pipeline.py,"
            " or use another loss",
        )
    for key, reason in check_combination(
        policy_loss=top.policy_loss or "",
        advantage=advantage if facts.reads_advantages else None,
        kl_loss=(top.kl_loss_fn or "low_var_kl") if measures_kl else None,
        # other checks report a missing reference policy or critic
        reference=True,
        critic=advantage == "gae",
        teachers=mode != "rl" or advantage == "on_policy_distill",
        loss_agg_mode=top.loss_agg_mode,
        expert_data_ratio=top.expert_data_ratio or 0.0,
        opd_objective=top.opd_objective,
    ):
        top.diag.error(key, reason)


def check_groups(top: Top, compares_prompts: bool) -> None:
    """Check the keys that depend on the number of responses per prompt.

    These are the baseline and the horizon of the adaptive KL. If rewards are compared among the responses to a prompt,
    a group of one response has no baseline. If the horizon is too short for the samples of a step, one step could
    reduce the coefficient of the adaptive KL to 0 or below.
    """
    compares = advantage_facts(top.adv_estimator).baseline and compares_prompts
    if compares and top.norm_mean_type != "batch" and top.responses == 1:
        top.diag.note(
            "adv_estimator",
            f"{top.adv_estimator} has no baseline with one response per prompt, so rewards are used unchanged; set"
            f" {top.group_key} to 2 or more",
        )
    samples = top.rollout_batch_size * top.responses
    if top.add_token_level_kl and top.target_kl is not None and samples >= FEWEST_STEPS * top.kl_horizon:
        top.diag.error(
            "kl_horizon",
            f"{top.kl_horizon} is too small: the coefficient changes by up to a fifth for every {top.kl_horizon}"
            " samples, so"
            f" one step of {samples} samples could take it to 0; write more than {samples // FEWEST_STEPS}",
        )


def check_rewards(top: Top, rewards: Sequence[RewardPlan]) -> None:
    """Warn about rewards without effect on training.

    A reward has no effect if the loss reads no advantages and no filter selects samples by this reward.
    """
    if top.policy_loss not in POLICY_LOSSES.builtin or loss_facts(top.policy_loss).reads_advantages:
        return
    for reward in rewards:
        if not (reward.query_filter or reward.response_filter):
            top.diag.note(
                f"rewards.{reward.domain}",
                f"teaches nothing, as policy loss {top.policy_loss} reads no advantages and no filter selects samples"
                " by their"
                " reward; write response_filter_config (rejection sampling), or another loss",
            )


def check_signals(top: Top, roles: Sections, rewards: Sequence[RewardPlan]) -> None:
    """Refuse a run in which the coefficients of all training signals are 0.

    Missing teachers and rewards are reported elsewhere. A loss or advantage of the user is always accepted, because it
    may need no signal except the samples.
    """
    facts, teachers = loss_facts(top.policy_loss), roles.teachers.values()
    own_coefs = [teacher.opd_kl_coef for teacher in teachers]
    if own_coefs and None not in own_coefs and "opd_kl_coef" in top.written:
        top.diag.note("opd_kl_coef", "has no effect, as every teacher sets this key itself; remove it")
    distils = any(top.opd_kl_coef if own is None else own for own in own_coefs)
    learns_samples = top.policy_loss not in POLICY_LOSSES.builtin or not facts.reads_advantages or facts.needs
    if distils or learns_samples or top.entropy_loss_coef:
        return
    else_nothing = "and no other signal trains the student, so its weights would not change"
    if roles.mode == "pure":
        diag = next((role.diag for role in teachers if role.opd_kl_coef is not None), top.diag)
        if teachers:
            diag.error(
                "opd_kl_coef", f"0 removes the teachers' part of the loss, {else_nothing}; set opd_kl_coef above 0"
            )
        return
    compares = (top.use_kl_loss and top.kl_loss_coef) or (top.add_token_level_kl and top.init_kl_coef)
    rewarded = top.workflow or any(term.weight for reward in rewards for term in reward.terms)
    if rewards and not (rewarded or compares) and top.adv_estimator in ADVANTAGES.builtin:
        also = " (as opd_kl_coef 0 removes the teachers' part)" if teachers else ""
        top.diag.error(
            f"rewards.{rewards[0].domain}.weight",
            f"0 removes the rewards' part of the loss{also}, {else_nothing}; give one of the rewards a weight"
            " other than 0",
        )


def _check_pure(top: Top) -> None:
    wrong = [
        f"{key} {as_yaml(value)}"
        for key, allowed in PURE_FIXED.items()
        if (value := _given(top, key)) is not None and value not in allowed
    ]
    if wrong:
        top.diag.add_warning(
            "pure distillation fixes adv_estimator (on_policy_distill), gamma 0, no critic, no KL loss and no"
            f" token-level KL; these settings have no effect: {', '.join(wrong)}"
        )


def _given(top: Top, key: str) -> object:
    """Return the value of a key that the user or the algorithm has set, or None if the key is not set."""
    value = getattr(top, key)
    return value if key in top.written or value != getattr(Top, key, {}) else None  # a default may be an empty mapping


def _check_distillation(top: Top) -> None:
    """Refuse teacher keys that give no training signal, or another signal than the configured one."""
    objective, policy_gradient = top.opd_objective, top.opd_use_policy_gradient
    if objective == "sampled":
        if policy_gradient is False:
            top.diag.error(
                "opd_use_policy_gradient",
                "false uses the k1 estimate of the sampled tokens as a direct loss, whose gradient depends on no"
                " teacher;"
                " remove this key, or use opd_objective: topk or full",
            )
        if top.opd_divergence != "reverse_kl":
            top.diag.error(
                "opd_divergence",
                f"{top.opd_divergence} needs a sum over the vocabulary, and sampled tokens estimate only the reverse"
                " KL; use"
                " opd_objective: full or topk",
            )
        return
    if policy_gradient:
        top.diag.error(
            "opd_use_policy_gradient",
            f"true uses the {objective} divergence as an advantage, whose expected gradient is 0; remove this key, or"
            " use opd_objective: sampled",
        )
    if "opd_advantage_fn" in top.written:
        top.diag.error(
            "opd_advantage_fn",
            f"{top.opd_advantage_fn} has no effect, as opd_objective: {objective} has no advantage from the teacher;"
            " remove it, or use opd_objective: sampled",
        )
    if top.opd_kl_discount:
        top.diag.error(
            "opd_kl_discount",
            f"{top.opd_kl_discount:g} has no effect, as opd_objective: {objective} has no advantage from the teacher;"
            " write 0, or use opd_objective: sampled",
        )


def check_topk(top: Top, vocab_size: int) -> None:
    """Check that opd_topk is not larger than the smallest vocabulary of student and teachers."""
    if vocab_size and top.opd_objective == "topk" and top.opd_topk > vocab_size:
        top.diag.error("opd_topk", f"{top.opd_topk} is more than the {vocab_size} token ids of all models; lower it")
