"""The table of algorithms: the defaults of each `algorithm_type`, and a check of combinations. Does not import torch.

Names and flags are Trinity-RFT's. The functions, with their own defaults and facts, are in `losses` and `advantages`.
This module also has the names of KL estimators and divergences, which users cannot extend.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from roll_opd.base.entry_points import entries
from roll_opd.base.frozen import FrozenDict
from roll_opd.base.user_modules import users_module
from roll_opd.objective.registry import ADVANTAGES, POLICY_LOSSES, AdvantageFacts, AlgorithmError, PolicyLossFacts

ROLL_LOSS_AGG_MODE = "seq-mean-token-mean"  # without an `algorithm_type`


@dataclass(frozen=True)
class Algorithm:
    """The defaults of an `algorithm_type`.

    `advantage` and `policy_loss` are built-in names, registered names or dotted paths.
    """

    policy_loss: str
    advantage: str | None = None  # None: the loss reads no advantages
    policy_loss_args: Mapping[str, object] = field(default_factory=FrozenDict)
    advantage_args: Mapping[str, object] = field(default_factory=FrozenDict)
    schema: str = "experience"  # schema of the data; sft and dpo have separate pipelines
    repeat: int | None = 2  # responses per prompt; None: no rollout, or any number
    kl_loss: str | None = "k2"  # estimator of the KL loss to the reference policy
    expert_data_ratio: float = 0.0  # fraction of demonstrations in an update
    loss_agg_mode: str = "token-mean"  # used unless the loss defines a mode


ALGORITHMS: dict[str, Algorithm] = {
    "sft": Algorithm("sft", schema="sft", repeat=None, kl_loss=None),
    "ppo": Algorithm("ppo", "gae", repeat=1),
    "grpo": Algorithm("ppo", "grpo"),
    "reinforceplusplus": Algorithm("ppo", "reinforceplusplus"),
    "dpo": Algorithm("dpo", schema="dpo"),
    "raft": Algorithm("sft", repeat=None, kl_loss=None),
    "on_policy_distill": Algorithm("ppo", "on_policy_distill", repeat=8, kl_loss=None),
}
KL_LOSS_COEF = 0.001  # default KL coefficient of algorithms with a KL loss
EXPERT_DATA_RATIO = 0.5  # default fraction for other losses with demonstrations

# names of `reference_kl.KL_ESTIMATORS` usable as a KL loss: their gradient depends on the other model
KL_LOSSES = ("abs", "k2", "k3", "low_var_kl", "corrected_k3")
# names usable as kl_penalty of token rewards -> ROLL's name
KL_PENALTIES = {"kl": "kl", "k1": "kl", "abs": "abs", "mse": "mse", "k2": "mse", "k3": "low_var_kl"}
KL_PENALTIES["low_var_kl"] = "low_var_kl"
DIVERGENCE_NAMES = ("reverse_kl", "forward_kl", "jsd", "skewed_reverse_kl", "skewed_forward_kl")  # of `divergences`

# Trinity-RFT's names -> names here
FUNCTION_ALIASES = {"ppo": "gae"}  # of its advantage_fn
ARGUMENT_ALIASES: dict[str, tuple[str, ...]] = {
    "clip_range": ("clip_low", "clip_high"),
    "clip_range_low": ("clip_low",),
    "clip_range_high": ("clip_high",),
    "clip_ratio_c": ("dual_clip",),
    "lam": ("lambd",),
}


def algorithm_names() -> tuple[str, ...]:
    """Return the names of the rows of the core and of entry points in the group `roll_opd.algorithms`."""
    return (*ALGORITHMS, *(name for name in entries("algorithms") if name not in ALGORITHMS))


def algorithm(name: str) -> Algorithm:
    """Return the algorithm with this name; raise `AlgorithmError` if it is unknown.

    The name may be the dotted path of a user's algorithm.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if name in entries("algorithms"):
        name = entries("algorithms")[name].value.replace(":", ".")
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        known = f"known are {', '.join(sorted(algorithm_names()))}, or a dotted path such as mypackage.MINE"
        raise AlgorithmError(f"unknown algorithm {name!r}; {known}")
    try:
        found = vars(users_module(module_name)).get(attribute)
    except ImportError as error:
        raise AlgorithmError(f"algorithm {name}: {error}") from error
    if not isinstance(found, Algorithm):
        raise AlgorithmError(f"algorithm {name}: {module_name} has no Algorithm named {attribute}")
    return found


def loss_facts(name: str | None) -> PolicyLossFacts:
    """Return the facts of a policy loss. An unknown loss has the default facts."""
    try:
        return POLICY_LOSSES.facts(name) if name else PolicyLossFacts()
    except AlgorithmError:
        return PolicyLossFacts()


def advantage_facts(name: str | None) -> AdvantageFacts:
    """Return the facts of an advantage. An unknown advantage has the default facts."""
    try:
        return ADVANTAGES.facts(name) if name else AdvantageFacts()
    except AlgorithmError:
        return AdvantageFacts()


def merged_arguments(given: Mapping[str, object], defaults: Mapping[str, object]) -> tuple[FrozenDict, tuple[str, ...]]:
    """Return (arguments, unknown names).

    The arguments are the function's defaults, updated with the given arguments.
    """
    ours: dict[str, object] = {}
    # clip_range is applied before clip_range_low and clip_range_high
    for name in sorted(given, key=lambda name: len(ARGUMENT_ALIASES.get(name, ())) != 2):
        for own in ARGUMENT_ALIASES.get(name, (name,)):
            ours[own] = given[name]
    unknown = tuple(name for name in given if not {*ARGUMENT_ALIASES.get(name, (name,))} <= {*defaults})
    return FrozenDict({**defaults, **ours}), unknown


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
) -> list[tuple[str, str]]:
    """Return (key, reason) for each part that has no effect or is mathematically wrong in this combination.

    A user's function that declares no facts is assumed to be correct.
    """
    facts, name = loss_facts(policy_loss), f"policy loss {policy_loss}"
    mixes = facts.needs == "demonstrations"
    of_loss = {
        f"{name} reads no advantages, so the teachers' term, which is a part of the advantages, would have no effect;"
        " use importance_sampling or ppo": not facts.reads_advantages and teachers and opd_objective == "sampled",
        f"{name} reads no advantages, so advantage {advantage} would have no effect; remove the advantage": (
            not facts.reads_advantages and advantage is not None and not (teachers and opd_objective == "sampled")
        ),
        f"{name} is a multiple of the advantages, which are 0 without an advantage function; set one": (
            facts.reads_advantages and advantage is None
        ),
        "advantage on_policy_distill has only the teachers' term, which is 0 without a teacher; add a teacher": (
            advantage == "on_policy_distill" and not teachers
        ),
        "advantage gae needs the values of a critic, but there is none; set use_critic or use another advantage": (
            advantage == "gae" and not critic
        ),
        f"only advantage gae uses a critic's values, but the advantage is {advantage}; remove the critic": (
            advantage != "gae" and critic
        ),
        f"{name} needs a reference policy, but there is none; write a reference section": (
            facts.needs == "pairs" and not reference
        ),
        f"{name} gives one value per pair, but loss_agg_mode {loss_agg_mode} would weight pairs by their length; use"
        " seq-mean-token-mean": facts.needs == "pairs" and loss_agg_mode not in (None, "seq-mean-token-mean"),
        f"{name} combines demonstrations and the student's samples, but with expert_data_ratio {expert_data_ratio:g}"
        " one of these two parts is empty; choose a ratio between 0 and 1": mixes and not 0 < expert_data_ratio < 1,
        "demonstrations are not sampled, so a critic cannot be trained on demonstrations; remove the critic": (
            bool(expert_data_ratio) and critic
        ),
        f"{name} would treat demonstrations as the student's samples; use mix or mix_chord": (
            policy_loss in POLICY_LOSSES.builtin and not mixes and bool(expert_data_ratio)
        ),
    }
    of_kl = {
        f"{kl_loss} as a KL loss has the gradient of log π, which is independent of the reference policy and has"
        " expectation 0; use k2, whose gradient is the gradient of the reverse KL": kl_loss in ("k1", "kl"),
        f"a KL loss ({kl_loss}) needs a reference policy, but there is none; write a reference section": (
            kl_loss is not None and not reference
        ),
    }
    wrong = [("policy_loss", reason) for reason, holds in of_loss.items() if holds]
    return wrong + [("kl_loss_fn", reason) for reason, holds in of_kl.items() if holds]
