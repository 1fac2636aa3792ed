"""The algorithms as data: a row an `algorithm_type`, and what its advantage and its loss are called with.

Names and flags are Trinity-RFT's. The functions themselves, found by these names, are in `roll_opd.algorithms`.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from roll_opd.algorithms.registry import AlgorithmError
from roll_opd.config.frozen import FrozenDict
from roll_opd.extensions import Registry

ROLL_LOSS_AGG_MODE = "seq-mean-token-mean"


Answered = Literal["sft", "dpo"]
Schema = Literal["experience", Answered]  # what a row holds: a prompt, one with its answer, one with two


@dataclass(frozen=True)
class Algorithm:
    """What an `algorithm_type` means where a user writes nothing else.

    `advantage` and `policy_loss` are names of the tables below, registered names or dotted paths.
    """

    policy_loss: str
    advantage: str | None = None  # None: the loss reads no advantages
    policy_loss_args: Mapping[str, object] = field(default_factory=FrozenDict)
    advantage_args: Mapping[str, object] = field(default_factory=FrozenDict)
    use_critic: bool = False
    use_reference: bool = True
    compute_advantage_in_trainer: bool = False  # token by token, rather than from the rewards of a group
    can_balance_batch: bool = True  # samples may go to any rank; not where some of them belong together
    schema: Schema = "experience"
    repeat: int | None = 2  # responses a prompt; None: there is no rollout to repeat, or any number will do
    kl_loss: str | None = "k2"  # estimator of the KL loss to the reference policy
    entropy: Literal["default", "mix"] | None = "default"  # mix: of the student's own samples only
    expert_data_ratio: float = 0.0  # share of a batch that an expert wrote


PLAIN = {"use_reference": False, "kl_loss": None, "entropy": None}

ALGORITHMS: dict[str, Algorithm] = {
    "sft": Algorithm("sft", schema="sft", repeat=None, **PLAIN),
    "ppo": Algorithm("ppo", "gae", use_critic=True, compute_advantage_in_trainer=True, repeat=1),
    "grpo": Algorithm("ppo", "grpo"),
    "reinforceplusplus": Algorithm("ppo", "reinforceplusplus", compute_advantage_in_trainer=True),
    "rloo": Algorithm("ppo", "rloo", compute_advantage_in_trainer=True),
    "opmd": Algorithm("opmd", "opmd"),
    "asymre": Algorithm("opmd", "asymre", **PLAIN),
    "dpo": Algorithm("dpo", schema="dpo", can_balance_batch=False, entropy=None),
    "topr": Algorithm("topr", "reinforce"),
    "cispo": Algorithm("cispo", "grpo"),
    "gspo": Algorithm("gspo", "grpo"),
    "sapo": Algorithm("sapo", "grpo"),
    "mix": Algorithm("mix", "grpo", repeat=8, entropy="mix", expert_data_ratio=0.5),
    "mix_chord": Algorithm("mix_chord", "grpo", repeat=8, entropy="mix", expert_data_ratio=0.5),
    "raft": Algorithm("sft", repeat=None, **PLAIN),
    "sppo": Algorithm("sppo", "opmd", **PLAIN),
    "rec": Algorithm("rec", "rec"),
    "multi_step_grpo": Algorithm("ppo", "step_wise_grpo", repeat=8),
    "on_policy_distill": Algorithm(
        "importance_sampling", "on_policy_distill", compute_advantage_in_trainer=True, repeat=8, **PLAIN
    ),
}
KL_LOSS_COEF = 0.001  # where a row has a KL loss
EXPERT_DATA_RATIO = 0.5  # where a loss without a row reads demonstrations


def algorithm(name: str) -> Algorithm:
    """Return the row of this name, or a user's own by its dotted path. Raises `AlgorithmError`."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        known = f"known are {', '.join(sorted(ALGORITHMS))}, or a dotted path such as mypackage.MINE"
        raise AlgorithmError(f"unknown algorithm {name!r}; {known}")
    try:
        found = vars(importlib.import_module(module_name)).get(attribute)
    except ImportError as error:
        raise AlgorithmError(f"algorithm {name}: the module {module_name} cannot be imported: {error}") from error
    if not isinstance(found, Algorithm):
        raise AlgorithmError(f"algorithm {name}: {module_name} has no Algorithm named {attribute}")
    return found


@dataclass(frozen=True)
class LossFacts:
    """What the configuration must know of a policy loss without calling it."""

    defaults: Mapping[str, object] = field(default_factory=FrozenDict)
    reads_advantages: bool = True
    clips: bool = False  # reads clip_low and clip_high, ROLL's pg_clip keys
    needs: Literal["demonstrations", "pairs"] | None = None
    loss_agg_mode: str | None = None  # its own; None: ROLL's default


_CLIP = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}

LOSSES: dict[str, LossFacts] = {
    "importance_sampling": LossFacts(),
    "ppo": LossFacts(FrozenDict({**_CLIP, "ratio_type": "token"}), clips=True),
    "gspo": LossFacts(FrozenDict({"clip_low": 3e-4, "clip_high": 4e-4}), loss_agg_mode="seq-mean-token-mean"),
    "cispo": LossFacts(FrozenDict({"clip_low": 1.0, "clip_high": 0.28})),
    "sapo": LossFacts(FrozenDict({"tau_pos": 1.0, "tau_neg": 1.05})),
    "sppo": LossFacts(FrozenDict({"epsilon": 0.3})),
    "sft": LossFacts(reads_advantages=False),
    "vanilla": LossFacts(),
    "opmd": LossFacts(FrozenDict({"tau": 1.0})),
    "tis": LossFacts(FrozenDict({"lower_bound": 0.0, "upper_bound": 1.0})),
    "topr": LossFacts(FrozenDict({"positive_weight": 1.0, "negative_weight": 1.0})),
    "kimi15": LossFacts(FrozenDict({"tau": 0.1})),
    "rec": LossFacts(
        FrozenDict(
            {
                "clip_mode": "none",
                "epsilon_low": 0.2,
                "epsilon_high": 0.2,
                "epsilon_low_prime": 0.6,
                "epsilon_high_prime": 2.0,
                "weight": "none",
                "temp": 1.0,
                "regularizer": "none",
                "regularizer_coef": 0.0,
            }
        )
    ),
    "mix": LossFacts(FrozenDict({"mu": 0.1, **_CLIP}), clips=True, needs="demonstrations"),
    "mix_chord": LossFacts(
        FrozenDict(
            {
                "mu_warmup_steps": 0,
                "mu_decay_steps": 0,
                "mu_peak": 0.1,
                "mu_valley": 0.1,
                "enable_phi_function": True,
                **_CLIP,
            }
        ),
        clips=True,
        needs="demonstrations",
    ),
    "dpo": LossFacts(
        FrozenDict({"beta": 0.1, "label_smoothing": 0.0}),
        reads_advantages=False,
        needs="pairs",
        loss_agg_mode="seq-mean-token-mean",
    ),
}


@dataclass(frozen=True)
class AdvantageFacts:
    """What the configuration must know of an advantage function without calling it."""

    defaults: Mapping[str, object] = field(default_factory=FrozenDict)
    # of what happens to its tokens: keys of the objective, which may be given as arguments too
    tokens: Mapping[str, object] = field(default_factory=lambda: FrozenDict({"gamma": 1.0}))
    baseline: bool = False  # compares the samples of a prompt, so that one alone learns nothing from the others


ADVANTAGES: dict[str, AdvantageFacts] = {
    "reinforce": AdvantageFacts(FrozenDict({"mean_cal_level": None, "std_cal_level": None})),
    "grpo": AdvantageFacts(
        FrozenDict({"mean_cal_level": "group", "std_cal_level": "group", "std_threshold": None, "rank_penalty": None}),
        baseline=True,
    ),
    "reinforceplusplus": AdvantageFacts(
        FrozenDict({"mean_cal_level": None, "std_cal_level": None}),
        FrozenDict({"gamma": 1.0, "whiten_advantages": True}),
    ),
    "step_wise_grpo": AdvantageFacts(
        FrozenDict({"std_cal_level": "group", "std_threshold": None, "enable_step_norm": False}), baseline=True
    ),
    "rloo": AdvantageFacts(baseline=True),
    "opmd": AdvantageFacts(FrozenDict({"opmd_baseline": "mean", "tau": 1.0}), baseline=True),
    "asymre": AdvantageFacts(FrozenDict({"baseline_shift": -0.1}), baseline=True),
    "rec": AdvantageFacts(FrozenDict({"std_normalize": False, "drop": None}), baseline=True),
    "gae": AdvantageFacts(
        FrozenDict({"mean_cal_level": None, "std_cal_level": None}),
        FrozenDict({"gamma": 1.0, "lambd": 0.95, "whiten_advantages": True}),
    ),
    # nothing of the reward; the teachers' term has keys of its own
    "on_policy_distill": AdvantageFacts(tokens=FrozenDict()),
}


def located(functions: Registry, name: str) -> str:
    return functions.located(name)


# Trinity-RFT's names -> ours
FUNCTION_ALIASES = {"ppo": "gae"}  # of its advantage_fn
ARGUMENT_ALIASES: dict[str, tuple[str, ...]] = {
    "clip_range": ("clip_low", "clip_high"),
    "clip_range_low": ("clip_low",),
    "clip_range_high": ("clip_high",),
    "clip_ratio_c": ("dual_clip",),
    "lam": ("lambd",),
}


def merged_arguments(given: Mapping[str, object], defaults: Mapping[str, object]) -> tuple[FrozenDict, tuple[str, ...]]:
    """Return what a user gave merged over a function's defaults, and the names that the function does not have."""
    ours: dict[str, object] = {}
    for name in sorted(given, key=lambda name: len(ARGUMENT_ALIASES.get(name, ())) != 2):  # clip_range before its ends
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
) -> list[str]:
    """Return a sentence for each thing that is mathematically empty or wrong about a combination; none if it is sound.

    Names that are not of the tables here (a user's own functions) are taken to be what their user says.
    """
    facts = LOSSES.get(policy_loss, LossFacts())
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
    if policy_loss in LOSSES and facts.needs != "demonstrations" and expert_data_ratio:
        wrong.append(f"{name} would take demonstrations for the student's own samples; use mix or mix_chord")
    return wrong
