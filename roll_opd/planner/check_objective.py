"""Checks of values: what is optimised, against the mode and against itself.

Refuses what would teach nothing or something else than it says, and names what has no effect.
"""

from collections.abc import Iterator, Sequence

from roll_opd.algorithms.combinations import check_combination
from roll_opd.algorithms.registry import ADVANTAGES, POLICY_LOSSES
from roll_opd.algorithms.table import DIVERGENCE_NAMES, KL_LOSSES, KL_PENALTIES, advantage_facts, loss_facts
from roll_opd.config.diagnostics import as_yaml
from roll_opd.config.plan import RewardPlan
from roll_opd.config.roll_keys import KL_PENALTIES_LATER, PURE_FIXED
from roll_opd.config.schema import (
    AgenticKeys,
    CriticKeys,
    DistillationKeys,
    ReinforcementKeys,
    SampleKeys,
    Top,
    keys_of,
)
from roll_opd.planner import correction
from roll_opd.planner.roles import Roles

FEWEST_STEPS = 5  # horizons in which an adaptive coefficient could fall to 0
NAMES_OF_A_LOSS = frozenset({"algorithm_type", "policy_loss_fn", "policy_loss"})  # of keys that are not ROLL's
ROLL_CLIP = 0.2  # ROLL's default of pg_clip_low and pg_clip_high
SAID_OF_TEACHERS = {"whiten_advantages", "kl_penalty"}  # a sentence of their own tells what becomes of them
NORMS = ("norm_mean_type", "norm_std_type")
STEP_KEYS = frozenset({"step_reward_gamma", "episode_reward_weight", "step_reward_weight"})


def check_objective(top: Top, mode: str, agentic: bool) -> None:
    """Say what contradicts the mode, what has no effect in it, and what cannot be computed yet."""
    top.diag.unused(*(key for key in _unread(top, mode, agentic) if _given(top, key) is not None))
    if top.importance_sampling not in (None, "token", "seq"):
        top.diag.unsupported("importance_sampling", f"{top.importance_sampling} is not available yet; remove the key")
    if top.async_generation_ratio:
        allowed = f"{top.async_generation_ratio:g} lets generation run ahead of training; here it never does"
        top.diag.note("async_generation_ratio", f"{allowed}, every sample is of the newest weights")
    if top.kl_loss_fn is not None:
        top.diag.is_one_of("kl_loss_fn", top.kl_loss_fn, ("none", "k1", *KL_LOSSES))
    top.diag.is_one_of("kl_penalty", top.kl_penalty, (*KL_PENALTIES, *KL_PENALTIES_LATER))
    _check_functions(top, mode)
    if top.diag.is_one_of("opd_divergence", top.opd_divergence, DIVERGENCE_NAMES) and mode != "rl":
        _check_distillation(top)
    correction.check(top, mode)
    _check_clip_range(top)
    if mode != "rl" and top.opd_objective == "sampled":
        _check_beside_teachers(top, mode)
    if mode == "pure":
        _check_pure(top)
    else:
        _check_reward_part(top, agentic)


def _unread(top: Top, mode: str, agentic: bool) -> Iterator[str]:
    """Yield the keys that nothing reads in this mode and beside these others."""
    sampled = top.opd_objective == "sampled"
    if mode == "rl":
        yield from ("opd_kl_coef", "opd_kl_discount", "opd_use_policy_gradient", *keys_of(DistillationKeys))
    if mode == "pure":
        told = {*PURE_FIXED, *(SAID_OF_TEACHERS if sampled else ())}
        yield from {*keys_of(ReinforcementKeys), *keys_of(CriticKeys)} - told
        if not sampled:  # there is no advantage then
            yield "advantage_clip"
    else:
        if top.adv_estimator != "gae":
            yield from ("lambd", *keys_of(CriticKeys))
        if not top.use_kl_loss:
            yield "kl_loss_coef"
        if top.adv_estimator in ADVANTAGES.builtin and not has_norm_levels(top.adv_estimator or ""):
            yield from NORMS
        if top.target_kl is None or not top.add_token_level_kl:
            yield from ("target_kl", "kl_horizon")
    if top.opd_objective != "topk":
        yield from ("opd_topk", "opd_topk_source")
    if top.opd_divergence != "jsd":
        yield "opd_jsd_beta"
    if not top.opd_divergence.startswith("skewed"):
        yield "opd_skew_alpha"
    of_steps = set() if mode == "pure" else keys_of_steps(top.adv_estimator or "")
    if agentic:  # ROLL's environments know none of the first
        yield from {*keys_of(SampleKeys), *(STEP_KEYS - of_steps)}
    else:
        yield from (keys_of(AgenticKeys).keys() & top.written) - of_steps
    if not top.difficulty_mask:
        yield from ("difficulty_low_threshold", "difficulty_high_threshold")
    if not top.error_max_len_clip:
        yield "error_max_len_threshold"


def _check_reward_part(top: Top, agentic: bool) -> None:
    """Check what a run that learns from rewards has: a critic, normalised rewards, KLs to the reference policy."""
    if top.adv_estimator == "gae" and top.critic_warmup >= top.max_steps:
        top.diag.error(
            "critic_warmup",
            f"{top.critic_warmup} steps of the critic alone leave none of max_steps {top.max_steps} for the student;"
            " lower it",
        )
    if top.adv_estimator == "on_policy_distill":
        top.diag.error(
            "adv_estimator",
            "'on_policy_distill' is what pure distillation sets itself; write reinforce or grpo for the reward",
        )
    if top.adv_estimator in ADVANTAGES.elsewhere:
        known = " or ".join(name for name in ADVANTAGES.builtin if name != "on_policy_distill")
        top.diag.unsupported("adv_estimator", f"{top.adv_estimator!r} is not available yet; use {known}")
    if (top.use_kl_loss or top.add_token_level_kl) and top.kl_penalty in KL_PENALTIES_LATER:
        known = ", ".join(dict.fromkeys(KL_PENALTIES.values()))
        top.diag.unsupported("kl_penalty", f"{top.kl_penalty!r} is not available yet; use one of {known}")
    # in environments reward_normalization says it
    is_rolls_grpo = not agentic and top.adv_estimator == "grpo" and NAMES_OF_A_LOSS.isdisjoint(top.written)
    for key in NORMS:
        value = getattr(top, key)
        if is_rolls_grpo and key in top.written and value not in ("group", "running"):
            top.diag.warn(key, f"{value or 'null'} counts; ROLL's grpo takes group, as it is here without the key")
        if value == "running":
            top.diag.unsupported(key, "'running' is not available yet; use batch or group")
    if top.use_kl_loss and not top.kl_loss_coef:
        top.diag.note("use_kl_loss", "true has no effect while kl_loss_coef is 0 (ROLL's default)")
    if top.add_token_level_kl and top.init_kl_coef == 0:
        top.diag.note("add_token_level_kl", "true has no effect while init_kl_coef is 0")
        if top.target_kl is not None:
            top.diag.error(
                "target_kl",
                "the coefficient is multiplied from step to step, and init_kl_coef 0 stays 0; give one above 0",
            )


def check_samples(top: Top, responses: int, has_rewards: bool) -> None:
    """Say where a mask of samples leaves nothing, or has nothing to decide by. `responses` are those of a prompt."""
    if not has_rewards:
        for key in ("difficulty_mask", "error_max_len_clip"):
            if getattr(top, key):
                top.diag.error(key, "true decides by rewards, and there are none; remove it, or write rewards")
    if top.difficulty_mask and responses == 1:
        top.diag.warn("difficulty_mask", "true has no effect with one response a prompt, as in ROLL")
    if top.difficulty_mask and top.difficulty_low_threshold >= top.difficulty_high_threshold:
        top.diag.error(
            "difficulty_low_threshold",
            f"{top.difficulty_low_threshold:g} is not below difficulty_high_threshold"
            f" {top.difficulty_high_threshold:g}, so that no prompt is learned from; lower it",
        )
    if top.rl_loss_coef == 0:
        top.diag.warn("rl_loss_coef", "0 takes the policy loss away, and with it all that rewards and advantages teach")


def clip_range(top: Top) -> tuple[float, float]:
    """Return how far a ratio may be below and above 1: pg_clip, or the two keys for each side where they count.

    In ROLL they count with use_pg_clip_range: true, and are 0.2 where they are not written. They count too where a
    key that is not ROLL's names the loss.
    """
    if not _reads_clip_range(top):
        return top.pg_clip, top.pg_clip
    other = ROLL_CLIP if top.use_pg_clip_range else top.pg_clip
    low, high = top.pg_clip_low, top.pg_clip_high
    return other if low is None else low, other if high is None else high


def _reads_clip_range(top: Top) -> bool:
    if top.use_pg_clip_range is not None:
        return top.use_pg_clip_range
    return not NAMES_OF_A_LOSS.isdisjoint(top.written)


def _check_clip_range(top: Top) -> None:
    written = {key: value for key in ("pg_clip_low", "pg_clip_high") if (value := getattr(top, key)) is not None}
    if written and not _reads_clip_range(top) and set(written.values()) != {top.pg_clip}:
        shown = ", ".join(f"{key} {value:g}" for key, value in written.items())
        top.diag.warn(
            next(iter(written)),
            f"without use_pg_clip_range: true, {shown} have no effect, as in ROLL; pg_clip {top.pg_clip:g} counts",
        )


def _check_beside_teachers(top: Top, mode: str) -> None:
    """Say what ROLL would do with the teachers' part of an advantage, and is not done here."""
    if top.whiten_advantages:
        pure = mode == "pure"
        instead = "has no effect in pure distillation" if pure else "whitens the reward's part of an advantage alone"
        top.diag.warn(
            "whiten_advantages",
            f"true {instead}; ROLL whitens the teachers' too, after which half of all tokens are learned as if the"
            " student were likelier than the teacher there",
        )
    if KL_PENALTIES.get(top.kl_penalty) != "kl":
        top.diag.warn(
            "kl_penalty",
            f"{top.kl_penalty} is not taken of the teachers here (ROLL does): their part stays student - teacher"
            " log-prob, whose expected gradient is that of the reverse KL",
        )


def has_norm_levels(advantage: str) -> bool:
    """Whether `norm_mean_type` and `norm_std_type` are arguments of a built-in advantage."""
    levels = {"mean_cal_level", "std_cal_level"}
    return advantage in ADVANTAGES.builtin and levels <= ADVANTAGES.defaults(advantage).keys()


def keys_of_steps(advantage: str) -> set[str]:
    """Return the keys of the rewards of steps that are arguments of a built-in advantage."""
    return set(STEP_KEYS & ADVANTAGES.defaults(advantage).keys()) if advantage in ADVANTAGES.builtin else set()


def check_steps(top: Top, agentic: bool, whole: Sequence[str]) -> None:
    """Say where an advantage that adds up the rewards of steps, or compares their states, has none of them.

    `whole` are the tags of which a sample is a whole trajectory.
    """
    name, facts = top.adv_estimator, advantage_facts(top.adv_estimator)
    if facts.adds_steps and whole:
        top.diag.error(
            "adv_estimator",
            f"{name} reads the reward of each action, and {', '.join(whole)} makes one sample of a trajectory; write"
            " env_manager_cls: roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager there, or use"
            " agentic_reinforce or grpo",
        )
    if facts.reads_states and not (agentic or top.workflow):
        top.diag.error(
            "adv_estimator",
            f"{name} compares actions from one state of an environment, and an answer to a prompt has none; use grpo",
        )
    if facts.reads_states and (agentic or top.workflow) and top.norm_mean_type is None and top.norm_std_type is None:
        instead = (
            f"reward_normalization.method is {top.reward_normalization.method}; write mean, and grouping: traj_group_id"
            if agentic
            else "norm_mean_type and norm_std_type are null; write norm_mean_type: group"
        )
        top.diag.note("adv_estimator", f"{name} compares nothing while {instead}")


def _check_functions(top: Top, mode: str) -> None:
    """Say what is empty or wrong about this loss, these advantages and this KL loss together."""
    advantage = "on_policy_distill" if mode == "pure" else top.adv_estimator
    measures_kl = top.use_kl_loss and mode != "pure"
    facts = loss_facts(top.policy_loss)
    if facts.needs == "pairs":
        top.diag.unsupported(
            "policy_loss",
            f"{top.policy_loss!r} reads pairs, which no rollout gives; run it with start_dpo_pipeline.py, or use"
            " another loss",
        )
    for sentence in check_combination(
        policy_loss=top.policy_loss or "",
        advantage=advantage if facts.reads_advantages else None,
        kl_loss=(top.kl_loss_fn or "low_var_kl") if measures_kl else None,
        # whether there is a reference policy or a critic has checks of its own
        reference=True,
        critic=advantage == "gae",
        teachers=mode != "rl" or advantage == "on_policy_distill",
        loss_agg_mode=top.loss_agg_mode,
        expert_data_ratio=top.expert_data_ratio or 0.0,
        opd_objective=top.opd_objective,
    ):
        top.diag.error("kl_loss_fn" if "KL loss" in sentence else "policy_loss", sentence)


def check_groups(top: Top, responses: int, *, agentic: bool, by_tag: bool) -> None:
    """Check what the number of responses a prompt decides: baselines, and the horizon of the adaptive KL.

    A group of one response has no mean that its reward could be compared with, unless groups are tags. In a horizon
    that is too short a step's samples could take the whole coefficient away, or more.
    """
    compares = advantage_facts(top.adv_estimator).baseline and not by_tag
    key = "train_env_manager.group_size" if agentic else "num_return_sequences_in_group"
    if compares and top.norm_mean_type != "batch" and responses == 1:
        top.diag.note(
            "adv_estimator",
            f"{top.adv_estimator} has no baseline with one response a prompt, so each reward counts as it is; set {key}"
            " to 2 or more",
        )
    samples = top.rollout_batch_size * responses
    if top.add_token_level_kl and top.target_kl is not None and samples >= FEWEST_STEPS * top.kl_horizon:
        top.diag.error(
            "kl_horizon",
            f"{top.kl_horizon} samples are too few for {samples} a step: the coefficient changes by up to a fifth in as"
            f" many, and would fall to 0 or below it; give more than {samples // FEWEST_STEPS}",
        )


def check_rewards(top: Top, rewards: Sequence[RewardPlan]) -> None:
    """Say where rewards teach nothing: the loss reads no advantages, and no filter selects what it learns."""
    if top.policy_loss not in POLICY_LOSSES.builtin or loss_facts(top.policy_loss).reads_advantages:
        return
    for reward in rewards:
        if not (reward.query_filter or reward.response_filter):
            top.diag.note(
                f"rewards.{reward.domain}",
                f"teaches nothing, as policy loss {top.policy_loss} reads no advantages and no"
                " filter selects samples by their reward; write response_filter_config (rejection sampling), or"
                " another loss",
            )


def check_signals(top: Top, roles: Roles, rewards: Sequence[RewardPlan]) -> None:
    """Refuse a run of which everything that could teach the student has the coefficient 0.

    Teachers and rewards that are missing are told elsewhere. A user's own functions may learn from samples alone.
    """
    facts, teachers = loss_facts(top.policy_loss), roles.teachers.values()
    own_coefs = [teacher.worker.opd_kl_coef for teacher in teachers]
    if own_coefs and None not in own_coefs and "opd_kl_coef" in top.written:
        top.diag.note("opd_kl_coef", "has no effect, as every teacher has its own; remove it")
    distils = any(top.opd_kl_coef if own is None else own for own in own_coefs)
    learns_samples = top.policy_loss not in POLICY_LOSSES.builtin or not facts.reads_advantages or facts.needs
    if distils or learns_samples or top.entropy_loss_coef:
        return
    else_nothing = "and nothing else teaches the student, whose weights would stay as they are"
    if roles.mode == "pure":
        diag = next((role.diag for role in teachers if role.worker.opd_kl_coef is not None), top.diag)
        if teachers:
            diag.error("opd_kl_coef", f"0 takes away what the teachers teach, {else_nothing}; give one above 0")
        return
    compares = (top.use_kl_loss and top.kl_loss_coef) or (top.add_token_level_kl and top.init_kl_coef)
    rewarded = top.workflow or any(term.weight for reward in rewards for term in reward.terms)
    if rewards and not (rewarded or compares) and top.adv_estimator in ADVANTAGES.builtin:
        also = " (as opd_kl_coef 0 does what the teachers teach)" if teachers else ""
        top.diag.error(
            f"rewards.{rewards[0].domain}.weight",
            f"0 takes away what the rewards teach{also}, {else_nothing}; give one another weight",
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
    """Return what is written for a key, or what the algorithm says for it; None where neither does."""
    value = getattr(top, key)
    return value if key in top.written or value != getattr(Top, key) else None


def _check_distillation(top: Top) -> None:
    """Refuse combinations of the teachers' part that teach nothing or something else than they say."""
    objective, policy_gradient = top.opd_objective, top.opd_use_policy_gradient
    if objective == "sampled":
        if policy_gradient is False:
            top.diag.error(
                "opd_use_policy_gradient",
                "false makes a direct loss of student - teacher log-prob of the sampled token (k1), whose gradient does"
                " not know the teacher; leave it out, or use opd_objective: topk or full",
            )
        if top.opd_divergence != "reverse_kl":
            top.diag.error(
                "opd_divergence",
                f"{top.opd_divergence} needs a sum over the vocabulary: sampled tokens estimate the reverse KL only;"
                " use opd_objective: full or topk",
            )
        return
    if policy_gradient:
        top.diag.error(
            "opd_use_policy_gradient",
            f"true makes an advantage of the {objective} divergence, which is the same whatever token was sampled,"
            " so that its expected gradient is 0; leave it out, or use opd_objective: sampled",
        )
    if top.opd_kl_discount:
        top.diag.error(
            "opd_kl_discount",
            f"{top.opd_kl_discount:g} sums later tokens into an advantage, and opd_objective: {objective} has none"
            " from the teacher; set it to 0, or use opd_objective: sampled",
        )


def check_topk(top: Top, vocab_size: int) -> None:
    """Check a top-k against the smallest vocabulary of student and teachers."""
    if vocab_size and top.opd_objective == "topk" and top.opd_topk > vocab_size:
        top.diag.error(
            "opd_topk", f"{top.opd_topk} is more than the {vocab_size} token ids that student and teachers all have"
        )
