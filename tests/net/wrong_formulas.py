"""Wrong formulas, each a replacement of a text in the package, and the test files of which one must fail.

The text is searched in the whole package and must occur once, so a formula may move to another file. A test file may
also move: it is named by the end of its path. If a text is rewritten, rewrite it here, and keep the formula wrong.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class WrongFormula:
    """The text of a formula, its wrong replacement, and the test files of which at least one test must fail."""

    name: str
    right: str
    wrong: str
    tests: tuple[str, ...]


KL, GAE, TOKENS = "test_kl.py", "test_gae.py", "test_token_advantages.py"
LOSSES, ADVANTAGES, DIVERGENCES = "test_losses.py", "test_advantage_functions.py", "test_divergences.py"
CORRECTIONS, MASKS, STEPS = "test_corrections.py", "test_sample_masks.py", "test_steps_of_runs.py"
WHOLE_LOSS, STEP_REWARDS = "test_megatron_loss_formulas.py", "test_step_rewards.py"
PREFIXES, STALE = "test_prefix_logprobs.py", "test_stale_samples.py"

WRONG_FORMULAS = (
    # estimators of KL
    WrongFormula("k1 with the wrong sign", "    return logprobs - other\n", "    return other - logprobs\n", (KL,)),
    WrongFormula("k2 without the half", "(logprobs - other).square() / 2", "(logprobs - other).square()", (KL,)),
    WrongFormula(
        "k3 with the log-ratio added", "return log_ratio.exp() - 1 - log_ratio", "return log_ratio.exp() - 1", (KL,)
    ),
    WrongFormula("KL coefficient that moves away from its target", "kl / target - 1", "1 - kl / target", (KL,)),
    # divergences, their gradients, and what they are taken over
    WrongFormula(
        "forward KL with its gradient turned round",
        "return student.exp() - teacher.exp()",
        "return teacher.exp() - student.exp()",
        (DIVERGENCES,),
    ),
    WrongFormula(
        "jsd with the two weights exchanged",
        "beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)",
        "(1 - beta) * _kl(teacher, mixture) + beta * _kl(student, mixture)",
        (DIVERGENCES,),
    ),
    WrongFormula(
        "skewed reverse KL whose mixture has no gradient",
        "_times(probability, log_ratio) - _times(alpha * probability, torch.expm1(log_ratio))",
        "_times(probability, log_ratio)",
        (DIVERGENCES,),
    ),
    WrongFormula(
        "top-k without the bucket of the other tokens",
        "measure(*(side_ML.double().log_softmax(-1)",
        "measure(*(side_ML[:, :-1].double().log_softmax(-1)",
        (DIVERGENCES, WHOLE_LOSS),
    ),
    WrongFormula(
        "full vocabulary without the gradient of the normaliser",
        "ctx.measure.slope(*logprobs) - logprobs[0].exp() * slope_M[rows, None]",
        "ctx.measure.slope(*logprobs)",
        (WHOLE_LOSS,),
    ),
    WrongFormula(
        "distillation without the teacher's coefficient",
        "mask * (shares[name] if name in sample.teacher_targets else np.float32(0))",
        "mask * np.float32(name in sample.teacher_targets)",
        ("test_columns.py",),
    ),
    # the teachers' part of the advantage
    WrongFormula(
        "reverse KL with the teacher added",
        "coefficients_M * student_M) - weighted_teacher_M",
        "coefficients_M * student_M) + weighted_teacher_M",
        (WHOLE_LOSS,),
    ),
    WrongFormula(
        "advantage plus the reverse KL",
        "tokens.external_M - to_go_M",
        "tokens.external_M + to_go_M",
        (WHOLE_LOSS,),
    ),
    WrongFormula(
        "prefix probability without the response's own tokens",
        "np.logaddexp.reduce([shifts[student], *terms])",
        "np.logaddexp.reduce(terms)",
        (PREFIXES,),
    ),
    WrongFormula(
        "log-prob of a token without the prefix before it",
        "shifts - np.append(0.0, np.where(follows, shifts[:-1], 0.0))",
        "shifts",
        (PREFIXES,),
    ),
    # returns and GAE
    WrongFormula(
        "return without powers of the discount", "ahead_K *= discount**reach", "ahead_K *= discount", (TOKENS, GAE)
    ),
    WrongFormula(
        "turns without a discount", ".sum() + discount * later", ".sum() + later", ("objective/test_turns.py",)
    ),
    WrongFormula(
        "temporal difference without gamma",
        "rewards_K + gamma * next_K - values_K",
        "rewards_K + next_K - values_K",
        (GAE,),
    ),
    WrongFormula("GAE that discounts by lambda alone", "lengths, gamma * lambd)", "lengths, lambd)", (GAE,)),
    WrongFormula(
        "value loss with the smaller of the two",
        "torch.maximum(loss_M, (clipped_values(",
        "torch.minimum(loss_M, (clipped_values(",
        (GAE,),
    ),
    # policy losses
    WrongFormula(
        "PPO with the larger of the two objectives",
        "torch.maximum(minus_M * ratio_M,",
        "torch.minimum(minus_M * ratio_M,",
        (LOSSES,),
    ),
    WrongFormula(
        "dual clip at positive advantages",
        "torch.where(minus_M > 0, torch.minimum",
        "torch.where(minus_M < 0, torch.minimum",
        (LOSSES,),
    ),
    WrongFormula(
        "importance sampling without the ratio",
        "-batch.advantages_M * batch.ratio_M * batch.mask_M",
        "-batch.advantages_M * batch.action_logprobs_M * batch.mask_M",
        (LOSSES,),
    ),
    WrongFormula(
        "DPO that prefers the rejected answer", "gap_B[0::2] - gap_B[1::2]", "gap_B[1::2] - gap_B[0::2]", (LOSSES,)
    ),
    WrongFormula(
        "token mean over sequences",
        "1.0 / max(sum(tokens), 1)",
        "1.0 / max(len(tokens), 1)",
        ("test_algorithms.py", LOSSES),
    ),
    WrongFormula(
        "sequence mean over all sequences, empty ones too",
        "max(sum(count > 0 for count in tokens), 1)",
        "max(len(tokens), 1)",
        ("test_algorithms.py", LOSSES),
    ),
    WrongFormula(
        "loss without its importance weights",
        'losses_M * torch.where(mask_M, columns["importance_weights"], 1)',
        "losses_M",
        (WHOLE_LOSS,),
    ),
    # advantages of rewards
    WrongFormula(
        "group deviation with the biased estimator",
        "rewards_B[members].std() + STD_FLOOR",
        "rewards_B[members].std(correction=0) + STD_FLOOR",
        (ADVANTAGES,),
    ),
    WrongFormula(
        "leave-one-out that divides by the whole group",
        "(rewards.sum() - rewards) / (len(rewards) - 1)",
        "(rewards.sum() - rewards) / len(rewards)",
        (ADVANTAGES,),
    ),
    WrongFormula(
        "whitening without the square root",
        "(kept.var() + VARIANCE_FLOOR).sqrt()",
        "(kept.var() + VARIANCE_FLOOR)",
        (TOKENS,),
    ),
    WrongFormula(
        "reward plus the KL to the reference",
        "rewards_M - kl_coef * torch.cat(",
        "rewards_M + kl_coef * torch.cat(",
        (STEP_REWARDS, STEPS),
    ),
    # masks and corrections
    WrongFormula("longest responses kept", "[length < longest for", "[length <= longest for", (MASKS,)),
    WrongFormula(
        "difficulties with their bounds included",
        "not low < sum(found) / len(found) < high",
        "not low <= sum(found) / len(found) <= high",
        (MASKS,),
    ),
    WrongFormula(
        "ratio of inference over training",
        "(self.train_M - self.infer_M).masked_fill_",
        "(self.infer_M - self.train_M).masked_fill_",
        (CORRECTIONS,),
    ),
    WrongFormula(
        "truncation from below", "ratio_M.clamp(max=upper_bound)", "ratio_M.clamp(min=upper_bound)", (CORRECTIONS,)
    ),
    WrongFormula(
        "weights of stale tokens with the ratio turned round",
        "torch.where(sampled_M, student_M - sampling_M, 0)",
        "torch.where(sampled_M, sampling_M - student_M, 0)",
        (STALE,),
    ),
    WrongFormula(
        "gap of negatives with the wrong sign",
        '-mismatch.log_ratio("geometric") > delta',
        'mismatch.log_ratio("geometric") > delta',
        (CORRECTIONS,),
    ),
)
