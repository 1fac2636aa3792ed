"""Which combinations of losses, advantages and models are mathematically empty or wrong."""

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
            f"{name} is made of demonstrations and the student's own samples, and with expert_data_ratio"
            f" {expert_data_ratio:g} one of them is empty; choose one between 0 and 1"
        )
    if expert_data_ratio and critic:
        wrong.append("nobody sampled demonstrations, so a critic has no values to learn from them; use no critic")
    if policy_loss in POLICY_LOSSES.builtin and facts.needs != "demonstrations" and expert_data_ratio:
        wrong.append(f"{name} would take demonstrations for the student's own samples; use mix or mix_chord")
    return wrong
