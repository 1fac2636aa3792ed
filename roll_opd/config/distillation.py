"""Checks how the teachers enter: the objective, its divergence, and what of it would teach nothing."""

from roll_opd.config.errors import Findings
from roll_opd.config.plan import Mode
from roll_opd.config.schema import Top

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


def check_distillation(top: Top, mode: Mode, findings: Findings) -> None:
    """Refuse combinations of the teachers' part that teach nothing or something else than they say."""
    written = [key for key in OPD_ONLY if key in top.model_fields_set]
    if mode == "rl":
        for key in written:
            findings.ignore(key)
        return
    objective, policy_gradient = top.opd_objective, top.opd_use_policy_gradient
    if objective == "sampled":
        if policy_gradient is False:
            findings.problem(
                "opd_use_policy_gradient",
                "false makes a direct loss of student - teacher log-prob of the sampled token (k1), whose gradient does"
                " not know the teacher; leave it out, or use opd_objective: topk or full",
            )
        if top.opd_divergence != "reverse_kl":
            findings.problem(
                "opd_divergence",
                f"{top.opd_divergence} needs a sum over the vocabulary: sampled tokens estimate the reverse KL only;"
                " use opd_objective: full or topk",
            )
    else:
        if policy_gradient:
            findings.problem(
                "opd_use_policy_gradient",
                f"true makes an advantage of the {objective} divergence, which is the same whatever token was sampled,"
                " so that its expected gradient is 0; leave it out, or use opd_objective: sampled",
            )
        if top.opd_kl_discount:
            findings.problem(
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
            findings.ignore(key)


def check_topk(top: Top, vocab_size: int, findings: Findings) -> None:
    """Check a top-k against the smallest vocabulary of student and teachers."""
    if top.opd_objective == "topk" and top.opd_topk > vocab_size:
        findings.problem(
            "opd_topk", f"{top.opd_topk} is more than the {vocab_size} token ids that student and teachers all have"
        )
