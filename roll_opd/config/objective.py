"""Reads what is optimised, checks it against the mode, and freezes it.

Pure distillation fixes most of it; mixed mode and reinforcement learning take ROLL's keys with ROLL's defaults.
"""

from roll_opd.config.algorithms import (
    ADVANTAGES,
    LOSSES,
    ROLL_LOSS_AGG_MODE,
    AdvantageFacts,
    LossFacts,
    check_combination,
)
from roll_opd.config.correction import check_correction, read_correction
from roll_opd.config.distillation import check_distillation
from roll_opd.config.errors import Findings
from roll_opd.config.frozen import FrozenDict
from roll_opd.config.plan import Mode, ObjectivePlan
from roll_opd.config.schema import Top

# what pure distillation fixes: key -> values that agree with it
PURE_FIXED = {
    "adv_estimator": ("reinforce", "on_policy_distill"),
    "gamma": (0,),
    "use_kl_loss": (False,),
    "add_token_level_kl": (False,),
    "init_kl_coef": (0,),
    "critic_warmup": (0,),
}
# keys of a critic's training; critic_warmup is one more
CRITIC_ONLY = ("critic_epochs", "value_clip")
# keys of the reward's part of the advantage, which pure distillation does not have
REWARD_ONLY = (
    "lambd",
    "whiten_rewards",
    "whiten_advantages",
    "norm_mean_type",
    "norm_std_type",
    "reward_clip",
    "advantage_clip",
    "kl_loss_coef",
    "kl_penalty",
    "target_kl",
    "kl_horizon",
    "entropy_loss_coef",
    *CRITIC_ONLY,
)
# keys that change what is learnt and that nothing here computes yet -> the values that change nothing
LATER: dict[str, tuple[object, ...]] = {
    "opsd_mode": (False,),
    "infer_correction": (False,),
    "opd_token_kld_clip": (None,),
    "importance_sampling": (None, "token", "seq"),
    "use_topr_neg_loss_coef": (0,),
    "postive_loss_coef": (0,),
    "reward_norm": (None,),
    "reward_shift": (False,),
    "reward_scale": (False,),
}
INSTEAD = {
    **dict.fromkeys(("reward_norm", "reward_shift", "reward_scale"), "write norm_mean_type and norm_std_type"),
    "infer_correction": "write train_infer_correction",
}
ROLL_INIT_KL_COEF = 0.2
FEWEST_STEPS = 5  # horizons in which an adaptive coefficient could fall to 0
ALIASES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}  # of kl_penalty


def check_objective(top: Top, mode: Mode, findings: Findings) -> None:
    """Say what contradicts the mode, what has no effect in it, and what cannot be computed yet."""
    for key, harmless in LATER.items():
        value = _value(top, key)
        if value not in harmless:
            findings.block(key, f"{_text(value)} is not available yet; {INSTEAD.get(key, 'remove the key')}")
    _check_functions(top, mode, findings)
    check_distillation(top, mode, findings)
    check_correction(top, mode, findings)
    if mode == "pure":
        _check_pure(top, findings)
        return
    _check_critic(top, findings)
    if mode == "rl":
        for key in ("opd_kl_coef", "opd_kl_discount"):
            if _value(top, key) is not None and key in top.model_fields_set:
                findings.ignore(key)
    if top.adv_estimator == "on_policy_distill":
        findings.problem(
            "adv_estimator",
            "'on_policy_distill' is what pure distillation sets itself; write reinforce or grpo for the reward",
        )
    levels = {"mean_cal_level", "std_cal_level"}  # only where a function has both are they these keys' business
    facts = ADVANTAGES.get(top.adv_estimator or "gae")
    for key in ("norm_mean_type", "norm_std_type"):
        if _value(top, key) is not None and facts is not None and not levels <= facts.defaults.keys():
            findings.ignore(key)
        if _value(top, key) == "running":
            findings.block(key, "'running' is not available yet; use batch or group")
    if top.use_kl_loss and not top.kl_loss_coef:
        findings.warn("use_kl_loss: true has no effect while kl_loss_coef is 0 (ROLL's default)")
    if top.add_token_level_kl and top.init_kl_coef == 0:
        findings.warn("add_token_level_kl: true has no effect while init_kl_coef is 0")
    _check_adaptive_kl(top, findings)


def _check_adaptive_kl(top: Top, findings: Findings) -> None:
    if top.target_kl is None or not top.add_token_level_kl:
        for key in ("target_kl", "kl_horizon"):
            if _value(top, key) is not None:
                findings.ignore(key)
    elif top.init_kl_coef == 0:
        findings.problem(
            "target_kl", "the coefficient is multiplied from step to step, and init_kl_coef 0 stays 0; give one above 0"
        )


def check_kl_horizon(top: Top, samples: int, findings: Findings) -> None:
    """Refuse a horizon in which a step of `samples` could take the whole coefficient away, or more."""
    horizon = top.kl_horizon or ObjectivePlan.kl_horizon
    if top.add_token_level_kl and top.target_kl is not None and samples >= FEWEST_STEPS * horizon:
        findings.problem(
            "kl_horizon",
            f"{horizon} samples are too few for {samples} a step: the coefficient changes by up to a fifth in as many,"
            f" and would fall to 0 or below it; give more than {samples // FEWEST_STEPS}",
        )


def _check_functions(top: Top, mode: Mode, findings: Findings) -> None:
    """Say what is empty or wrong about this loss, these advantages and this KL loss together."""
    policy_loss = top.policy_loss or ("importance_sampling" if mode == "pure" else "ppo")
    facts = LOSSES.get(policy_loss, LossFacts())
    advantage = "on_policy_distill" if mode == "pure" else top.adv_estimator or "gae"
    measures_kl = top.use_kl_loss and mode != "pure"
    for sentence in check_combination(
        policy_loss=policy_loss,
        advantage=advantage if facts.reads_advantages else None,
        kl_loss=(top.kl_loss_fn or "k3") if measures_kl else None,
        # whether there is a reference policy or a critic has checks of its own
        reference=True,
        critic=advantage == "gae",
        teachers=mode != "rl" or advantage == "on_policy_distill",
        loss_agg_mode=top.loss_agg_mode,
        expert_data_ratio=top.expert_data_ratio or 0.0,
        opd_objective=top.opd_objective,
    ):
        findings.problem("kl_loss_fn" if "KL loss" in sentence else "policy_loss", sentence)


def _check_critic(top: Top, findings: Findings) -> None:
    if top.adv_estimator not in (None, "gae"):
        for key in ("critic_warmup", *CRITIC_ONLY):
            if _value(top, key) is not None:
                findings.ignore(key)
    elif (top.critic_warmup or 0) >= top.max_steps:
        findings.problem(
            "critic_warmup",
            f"{top.critic_warmup} steps of the critic alone leave none of max_steps {top.max_steps} for the student;"
            " lower it",
        )


def check_baseline(top: Top, mode: Mode, responses: int, findings: Findings) -> None:
    """Warn of a group of one response, whose mean the reward is not compared with."""
    compares = ADVANTAGES.get(top.adv_estimator or "gae", AdvantageFacts()).baseline
    if mode != "pure" and compares and top.norm_mean_type != "batch" and responses == 1:
        findings.warn(
            f"adv_estimator: {top.adv_estimator} has no baseline with one response a prompt, so each reward counts as"
            " it is; set num_return_sequences_in_group to 2 or more"
        )


def _check_pure(top: Top, findings: Findings) -> None:
    for key in REWARD_ONLY:
        if _value(top, key) is not None:
            findings.ignore(key)
    wrong = [
        f"{key} {_text(value)}"
        for key, allowed in PURE_FIXED.items()
        if (value := _value(top, key)) is not None and value not in allowed
    ]
    if wrong:
        findings.warn(
            "pure distillation fixes adv_estimator (on_policy_distill), gamma 0, no critic, no KL loss and no"
            f" token-level KL; these settings have no effect: {', '.join(wrong)}"
        )


def _value(top: Top, key: str) -> object:
    """Return the value of a key that the tables of this module name."""
    return top.model_dump(include={key})[key]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_objective(top: Top, mode: Mode, updates: int, response: int, vocab_size: int) -> ObjectivePlan:
    """Return the objective of a run with `updates` optimizer updates a step.

    `vocab_size` is how many token ids student and teachers all have.
    """
    pure = mode == "pure"
    ranged = top.use_pg_clip_range is not False
    low, high = (top.pg_clip_low, top.pg_clip_high) if ranged else (None, None)
    dual = top.dual_clip_loss
    if isinstance(dual, bool):
        dual = 1 + 2 * top.pg_clip if dual else None  # ROLL's factor
    correction = read_correction(top)
    common = {
        "policy_loss": top.policy_loss or ("importance_sampling" if pure else "ppo"),
        "policy_loss_args": FrozenDict(top.policy_loss_fn_args),
        "pg_clip_low": top.pg_clip if low is None else low,
        "pg_clip_high": top.pg_clip if high is None else high,
        "dual_clip": dual,
        "loss_agg_mode": top.loss_agg_mode or ROLL_LOSS_AGG_MODE,
        "loss_normaliser": float(response),
        "opd_kl_discount": top.opd_kl_discount,
        "ppo_epochs": top.ppo_epochs,
        "correction": correction,
        # a correction is of the weights that sampled, before the update
        "recompute_old_logprobs": updates > 1 or top.enable_old_logprobs_recompute or correction is not None,
    }
    if mode != "rl" and top.opd_objective != "sampled":
        common |= {
            "opd_objective": top.opd_objective,
            "opd_divergence": top.opd_divergence,
            "opd_topk": top.opd_topk,
            "opd_topk_source": top.opd_topk_source,
            "opd_jsd_beta": top.opd_jsd_beta,
            "opd_skew_alpha": top.opd_skew_alpha,
            "opd_vocab_size": vocab_size,
        }
    if pure:
        return ObjectivePlan(adv_estimator="on_policy_distill", **common)
    token_kl = ROLL_INIT_KL_COEF if top.init_kl_coef is None else top.init_kl_coef
    token_kl = token_kl if top.add_token_level_kl else 0.0
    if token_kl:
        common["recompute_old_logprobs"] = True  # the token rewards need them before the update
    norms = {"norm_mean_type": top.norm_mean_type, "norm_std_type": top.norm_std_type}
    if top.adv_estimator == "grpo":  # what the estimator is; writing null takes it away
        norms = {key: value if key in top.model_fields_set else "group" for key, value in norms.items()}
    penalty = top.kl_penalty or "kl"
    written = {
        "adv_estimator": top.adv_estimator or "gae",
        "advantage_args": FrozenDict(top.advantage_fn_args),
        "kl_loss": None if top.kl_loss_fn == "none" else top.kl_loss_fn,
        "gamma": 1.0 if top.gamma is None else top.gamma,
        "lambd": top.lambd,
        "whiten_rewards": top.whiten_rewards,
        "whiten_advantages": top.whiten_advantages,
        **norms,
        "reward_clip": top.reward_clip,
        "advantage_clip": top.advantage_clip,
        "kl_loss_coef": top.kl_loss_coef if top.use_kl_loss else 0.0,
        "kl_penalty": ALIASES.get(penalty, penalty),
        "entropy_loss_coef": top.entropy_loss_coef,
        "init_kl_coef": token_kl,
        "target_kl": top.target_kl if token_kl else None,
        "kl_horizon": top.kl_horizon if token_kl and top.target_kl else None,
    }
    return ObjectivePlan(**{key: value for key, value in written.items() if value is not None}, **common)
