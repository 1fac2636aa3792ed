"""Check combinations of loss, advantage and models for mathematically empty or wrong ones."""

from roll_opd.algorithms.registry import POLICY_LOSSES
from roll_opd.algorithms.table import loss_facts


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
    """Return a message for each mathematically empty or wrong part of a combination.

    User functions without facts are assumed to be correct.
    """
    facts = loss_facts(policy_loss)
    name = f"policy loss {policy_loss}"
    wrong = []
    if not facts.reads_advantages and teachers and opd_objective == "sampled":
        wrong.append(
            f"{name} reads no advantages, so the teachers' term, which is part of them, would have no effect; use"
            " importance_sampling or ppo"
        )
    elif not facts.reads_advantages and advantage is not None:
        wrong.append(f"{name} reads no advantages, so advantage {advantage} would have no effect; remove it")
    if facts.reads_advantages and advantage is None:
        wrong.append(f"{name} is a multiple of advantages, and without an advantage function it is 0; set one")
    if advantage == "on_policy_distill" and not teachers:
        wrong.append("advantage on_policy_distill is only the teachers' term, and without a teacher it is 0; add one")
    if (advantage == "gae") != critic:
        wrong.append(
            "advantage gae needs the values of a critic, but there is none; set use_critic or use another advantage"
            if advantage == "gae"
            else f"only advantage gae uses a critic's values, but the advantage is {advantage}; remove the critic"
        )
    if kl_loss in ("k1", "kl"):
        wrong.append(
            f"{kl_loss} as a KL loss has the gradient of log π, which is independent of the reference policy and has"
            " expectation 0; use k2, whose gradient is that of the reverse KL"
        )
    if kl_loss is not None and not reference:
        wrong.append(f"a KL loss ({kl_loss}) needs a reference policy, but there is none; add reference")
    if facts.needs == "pairs":
        if not reference:
            wrong.append(f"{name} needs a reference policy, but there is none; add reference")
        if loss_agg_mode not in (None, "seq-mean-token-mean"):
            wrong.append(
                f"{name} is one number per pair; loss_agg_mode {loss_agg_mode} would weight pairs by their length; use"
                " seq-mean-token-mean"
            )
    if facts.needs == "demonstrations" and not 0 < expert_data_ratio < 1:
        wrong.append(
            f"{name} combines demonstrations and the student's samples, and with expert_data_ratio"
            f" {expert_data_ratio:g} one of them is empty; choose a ratio between 0 and 1"
        )
    if expert_data_ratio and critic:
        wrong.append("demonstrations are not sampled, so a critic cannot be trained on them; remove the critic")
    if policy_loss in POLICY_LOSSES.builtin and facts.needs != "demonstrations" and expert_data_ratio:
        wrong.append(f"{name} would treat demonstrations as the student's samples; use mix or mix_chord")
    return wrong
