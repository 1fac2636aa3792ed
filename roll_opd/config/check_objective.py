"""Checks of values: what is optimised, against the mode and against itself.

Refuses what would teach nothing or something else than it says, and names what has no effect.
"""

from roll_opd.algorithms.divergences import DIVERGENCES
from roll_opd.algorithms.kl import KL_LOSSES, KL_PENALTIES
from roll_opd.algorithms.registry import ADVANTAGES, POLICY_LOSSES, advantage_defaults
from roll_opd.config import correction
from roll_opd.config.algorithms import advantage_facts, loss_facts
from roll_opd.config.errors import Diagnostics
from roll_opd.config.legacy_roll import INSTEAD, KL_PENALTIES_LATER, LATER, PURE_FIXED
from roll_opd.config.schema import CriticKeys, Top, keys_of

# keys of the teachers' part beside its coefficients
OPD_ONLY = (
    "opd_objective",
    "opd_use_policy_gradient",
    "opd_divergence",
    "opd_topk",
    "opd_topk_source",
    "opd_jsd_beta",
    "opd_skew_alpha",
)
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
    "critic_epochs",
    "value_clip",
)
FEWEST_STEPS = 5  # horizons in which an adaptive coefficient could fall to 0


def check_objective(top: Top, mode: str, diagnostics: Diagnostics) -> None:
    """Say what contradicts the mode, what has no effect in it, and what cannot be computed yet."""
    for key, harmless in LATER.items():
        value = getattr(top, key)
        if value not in harmless:
            diagnostics.block(key, f"{_text(value)} is not available yet; {INSTEAD.get(key, 'remove the key')}")
    diagnostics.is_one_of("opd_divergence", top.opd_divergence, tuple(DIVERGENCES))
    diagnostics.is_one_of("kl_loss_fn", top.kl_loss_fn or "none", ("none", "k1", *KL_LOSSES))
    diagnostics.is_one_of("kl_penalty", top.kl_penalty, (*KL_PENALTIES, *KL_PENALTIES_LATER))
    _check_functions(top, mode, diagnostics)
    check_distillation(top, mode, diagnostics)
    correction.check(top, mode, diagnostics)
    if mode == "pure":
        _check_pure(top, diagnostics)
        return
    _check_critic(top, diagnostics)
    if mode == "rl":
        for key in {"opd_kl_coef", "opd_kl_discount"} & top.written:
            diagnostics.ignore(key)
    if top.adv_estimator == "on_policy_distill":
        diagnostics.problem(
            "adv_estimator",
            "'on_policy_distill' is what pure distillation sets itself; write reinforce or grpo for the reward",
        )
    for key in ("norm_mean_type", "norm_std_type"):
        builtin = (top.adv_estimator or "gae") in ADVANTAGES.builtin
        if _given(top, key) is not None and builtin and not has_norm_levels(top.adv_estimator):
            diagnostics.ignore(key)
        if getattr(top, key) == "running":
            diagnostics.block(key, "'running' is not available yet; use batch or group")
    if top.use_kl_loss and not top.kl_loss_coef:
        diagnostics.warn("use_kl_loss: true has no effect while kl_loss_coef is 0 (ROLL's default)")
    if top.add_token_level_kl and top.init_kl_coef == 0:
        diagnostics.warn("add_token_level_kl: true has no effect while init_kl_coef is 0")
    _check_adaptive_kl(top, diagnostics)


def has_norm_levels(advantage: str | None) -> bool:
    """Whether `norm_mean_type` and `norm_std_type` are arguments of a built-in advantage."""
    name = advantage or "gae"
    return name in ADVANTAGES.builtin and {"mean_cal_level", "std_cal_level"} <= advantage_defaults(name).keys()


def _check_adaptive_kl(top: Top, diagnostics: Diagnostics) -> None:
    if top.target_kl is None or not top.add_token_level_kl:
        for key in ("target_kl", "kl_horizon"):
            if _given(top, key) is not None:
                diagnostics.ignore(key)
    elif top.init_kl_coef == 0:
        diagnostics.problem(
            "target_kl", "the coefficient is multiplied from step to step, and init_kl_coef 0 stays 0; give one above 0"
        )


def _check_functions(top: Top, mode: str, diagnostics: Diagnostics) -> None:
    """Say what is empty or wrong about this loss, these advantages and this KL loss together."""
    policy_loss = top.policy_loss or ("importance_sampling" if mode == "pure" else "ppo")
    facts = loss_facts(policy_loss)
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
        diagnostics.problem("kl_loss_fn" if "KL loss" in sentence else "policy_loss", sentence)


def _check_critic(top: Top, diagnostics: Diagnostics) -> None:
    if top.adv_estimator not in (None, "gae"):
        for key in keys_of(CriticKeys):
            if _given(top, key) is not None:
                diagnostics.ignore(key)
    elif top.critic_warmup >= top.max_steps:
        diagnostics.problem(
            "critic_warmup",
            f"{top.critic_warmup} steps of the critic alone leave none of max_steps {top.max_steps} for the student;"
            " lower it",
        )


def check_groups(top: Top, mode: str, responses: int, agentic: bool, diagnostics: Diagnostics) -> None:
    """Check what the number of responses a prompt decides: baselines, and the horizon of the adaptive KL.

    A group of one response has no mean that its reward could be compared with. In a horizon that is too short a step's
    samples could take the whole coefficient away, or more.
    """
    if mode == "pure":
        return
    compares = advantage_facts(top.adv_estimator or "gae").baseline
    if compares and top.norm_mean_type != "batch" and responses == 1 and not agentic:
        diagnostics.warn(
            f"adv_estimator: {top.adv_estimator} has no baseline with one response a prompt, so each reward counts as"
            " it is; set num_return_sequences_in_group to 2 or more"
        )
    samples = top.rollout_batch_size * responses
    if top.add_token_level_kl and top.target_kl is not None and samples >= FEWEST_STEPS * top.kl_horizon:
        diagnostics.problem(
            "kl_horizon",
            f"{top.kl_horizon} samples are too few for {samples} a step: the coefficient changes by up to a fifth in as"
            f" many, and would fall to 0 or below it; give more than {samples // FEWEST_STEPS}",
        )


def _check_pure(top: Top, diagnostics: Diagnostics) -> None:
    for key in REWARD_ONLY:
        if _given(top, key) is not None:
            diagnostics.ignore(key)
    wrong = [
        f"{key} {_text(value)}"
        for key, allowed in PURE_FIXED.items()
        if (value := _given(top, key)) is not None and value not in allowed
    ]
    if wrong:
        diagnostics.warn(
            "pure distillation fixes adv_estimator (on_policy_distill), gamma 0, no critic, no KL loss and no"
            f" token-level KL; these settings have no effect: {', '.join(wrong)}"
        )


def _given(top: Top, key: str) -> object:
    """Return what is written for a key, or what the algorithm says for it; None where neither does."""
    value = getattr(top, key)
    return value if key in top.written or value != getattr(Top, key) else None


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_distillation(top: Top, mode: str, diagnostics: Diagnostics) -> None:
    """Refuse combinations of the teachers' part that teach nothing or something else than they say."""
    written = [key for key in OPD_ONLY if key in top.written]
    if mode == "rl":
        for key in written:
            diagnostics.ignore(key)
        return
    objective, policy_gradient = top.opd_objective, top.opd_use_policy_gradient
    if objective == "sampled":
        if policy_gradient is False:
            diagnostics.problem(
                "opd_use_policy_gradient",
                "false makes a direct loss of student - teacher log-prob of the sampled token (k1), whose gradient does"
                " not know the teacher; leave it out, or use opd_objective: topk or full",
            )
        if top.opd_divergence != "reverse_kl":
            diagnostics.problem(
                "opd_divergence",
                f"{top.opd_divergence} needs a sum over the vocabulary: sampled tokens estimate the reverse KL only;"
                " use opd_objective: full or topk",
            )
    else:
        if policy_gradient:
            diagnostics.problem(
                "opd_use_policy_gradient",
                f"true makes an advantage of the {objective} divergence, which is the same whatever token was sampled,"
                " so that its expected gradient is 0; leave it out, or use opd_objective: sampled",
            )
        if top.opd_kl_discount:
            diagnostics.problem(
                "opd_kl_discount",
                f"{top.opd_kl_discount:g} sums later tokens into an advantage, and opd_objective: {objective} has none"
                " from the teacher; set it to 0, or use opd_objective: sampled",
            )
    used = {
        "opd_topk": objective == "topk",
        "opd_topk_source": objective == "topk",
        "opd_jsd_beta": top.opd_divergence == "jsd",
        "opd_skew_alpha": top.opd_divergence.startswith("skewed"),
    }
    for key in written:
        if not used.get(key, True):
            diagnostics.ignore(key)


def check_topk(top: Top, vocab_size: int, diagnostics: Diagnostics) -> None:
    """Check a top-k against the smallest vocabulary of student and teachers."""
    if vocab_size and top.opd_objective == "topk" and top.opd_topk > vocab_size:
        diagnostics.problem(
            "opd_topk", f"{top.opd_topk} is more than the {vocab_size} token ids that student and teachers all have"
        )


def check_combination(
    *,
    policy_loss: str,
    advantage: str | None,
    kl_loss: str | None = None,
    reference: bool = False,
    critic: bool = False,
    teachers: bool = False,
    loss_agg_mode: str | None = None,
    expert_data_ratio: float = 0.0,
    opd_objective: str = "sampled",
) -> list[str]:
    """Return a sentence for each thing that is mathematically empty or wrong about a combination; none if it is sound.

    A user's own functions without facts are taken to be what their user says.
    """
    facts = loss_facts(policy_loss)
    name = f"policy loss {policy_loss}"
    wrong = []
    if not facts.reads_advantages and teachers and opd_objective == "sampled":
        wrong.append(
            f"{name} reads no advantages, so the teachers' term, which is part of them, would teach nothing; use"
            " importance_sampling or ppo"
        )
    elif not facts.reads_advantages and advantage is not None:
        wrong.append(f"{name} reads no advantages, so advantage {advantage} would change nothing; remove it")
    if facts.reads_advantages and advantage is None:
        wrong.append(f"{name} is a multiple of advantages, and without an advantage function it is 0; name one")
    if advantage == "on_policy_distill" and not teachers:
        wrong.append("advantage on_policy_distill is the teachers' term alone, and without a teacher it is 0; add one")
    if (advantage == "gae") != critic:
        wrong.append(
            "advantage gae reads the values of a critic, and there is none; use use_critic or another advantage"
            if advantage == "gae"
            else f"a critic's values are read by advantage gae only, and the advantage is {advantage}; use no critic"
        )
    if kl_loss in ("k1", "kl"):
        wrong.append(
            f"{kl_loss} as a KL loss has the gradient of log π alone: it carries nothing of the reference policy, and"
            " its expectation is 0; use k2, whose gradient is that of the reverse KL"
        )
    if kl_loss is not None and not reference:
        wrong.append(f"a KL loss ({kl_loss}) is measured against a reference policy, and there is none; add reference")
    if facts.needs == "pairs":
        if not reference:
            wrong.append(f"{name} compares with a reference policy, and there is none; add reference")
        if loss_agg_mode not in (None, "seq-mean-token-mean"):
            wrong.append(
                f"{name} is one number a pair; loss_agg_mode {loss_agg_mode} would weigh pairs by their length; use"
                " seq-mean-token-mean"
            )
    if facts.needs == "demonstrations" and not 0 < expert_data_ratio < 1:
        wrong.append(
            f"{name} is made of an expert's part and the student's own, and with expert_data_ratio"
            f" {expert_data_ratio:g} one of them is empty; choose one between 0 and 1"
        )
    if expert_data_ratio and critic:
        wrong.append("nobody sampled demonstrations, so a critic has no values to learn from them; use no critic")
    if policy_loss in POLICY_LOSSES.builtin and facts.needs != "demonstrations" and expert_data_ratio:
        wrong.append(f"{name} would take demonstrations for the student's own samples; use mix or mix_chord")
    return wrong
