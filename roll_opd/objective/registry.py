"""`POLICY_LOSSES`, `ADVANTAGES` and `OPD_ADVANTAGES`: registries of functions that a configuration can name.

A function is registered where it is defined, together with facts for the planner. The arguments and their defaults are
read from its signature. Modules in `losses` and `advantages` are found automatically, and so are entry points in the
groups `roll_opd.losses` and `roll_opd.advantages`. A user's function must have the same signature;
`register_policy_loss` and `register_advantage` give it a name and facts.

Names, facts and defaults can be read without importing torch. torch is imported when a function is looked up.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from roll_opd.base.frozen import FrozenDict
from roll_opd.base.registry import NoFacts, Registry, argument_problems

if TYPE_CHECKING:
    from torch import Tensor

    from roll_opd.objective.advantages.reward_normalisation import Normalised

PolicyLoss = Callable[..., "Tensor"]  # (LossBatch, *, arguments) -> [M]
Advantage = Callable[..., "Normalised"]  # (RewardBatch, *, arguments) -> Normalised
OpdAdvantage = Callable[..., "Tensor"]  # (TaughtTokens, *, arguments) -> [M]


class AlgorithmError(Exception):
    """An algorithm, an advantage or a policy loss is unknown or misused.

    The message states the reason and the known names.
    """


@dataclass(frozen=True)
class PolicyLossFacts:
    """Properties of a policy loss that the planner reads."""

    reads_advantages: bool = True
    reads_pg_clip: bool = False  # takes clip_low, clip_high and dual_clip from ROLL's pg_clip keys
    needs: Literal["demonstrations", "pairs"] | None = None
    loss_agg_mode: str | None = None  # None: ROLL's default


@dataclass(frozen=True)
class AdvantageFacts:
    """Properties of an advantage function that the planner reads."""

    baseline: bool = False  # compares the samples of a prompt, so each prompt needs several samples
    reads_runs: bool = False  # gets one sample per step of a run; other functions get one sample per run
    reads_states: bool = False  # compares steps that start from the same state
    adds_steps: bool = False  # sums the rewards of a run, so each reward must belong to a single step
    discounts_turns: bool = False  # whether gamma is applied per turn instead of per token
    # defaults of the keys for token advantages; the configuration may also set these keys as arguments of the function
    token_defaults: Mapping[str, object] = field(default_factory=lambda: FrozenDict({"gamma": 1.0}))


POLICY_LOSSES = Registry(
    kind="policy loss",
    made_of="function",
    example="mypackage.my_loss",
    error=AlgorithmError,
    package="roll_opd.objective.losses",
    facts_type=PolicyLossFacts,
    decorator="register_policy_loss",
    group="losses",
)
ADVANTAGES = Registry(
    kind="advantage",
    made_of="function",
    example="mypackage.my_advantage",
    error=AlgorithmError,
    package="roll_opd.objective.advantages",
    facts_type=AdvantageFacts,
    decorator="register_advantage",
    elsewhere=("skip_obs_gae",),  # estimators of ROLL that are not available yet
    group="advantages",
)
OPD_ADVANTAGES: Registry[NoFacts] = Registry(
    kind="opd_advantage_fn",
    made_of="function",
    example="mypackage.my_advantages",
    error=AlgorithmError,
    package="roll_opd.objective",
    facts_type=NoFacts,
    decorator="register_opd_advantage",
)
register_policy_loss = POLICY_LOSSES.register
register_advantage = ADVANTAGES.register
register_opd_advantage = OPD_ADVANTAGES.register


def policy_loss(name: str, arguments: Mapping[str, Any] | None = None) -> PolicyLoss:
    """Check the arguments of a policy loss and return its function.

    Raises:
        AlgorithmError: if the name is unknown or the arguments do not match.
    """
    return _checked(POLICY_LOSSES, name, arguments or {})


def advantage(name: str, arguments: Mapping[str, Any] | None = None) -> Advantage:
    """Check the arguments of an advantage and return its function.

    Raises:
        AlgorithmError: if the name is unknown or the arguments do not match.
    """
    return _checked(ADVANTAGES, name, arguments or {})


def opd_advantage(name: str, arguments: Mapping[str, Any] | None = None) -> OpdAdvantage:
    """Check the arguments of an `opd_advantage_fn` and return its function.

    Raises:
        AlgorithmError: if the name is unknown or the arguments do not match.
    """
    return _checked(OPD_ADVANTAGES, name, arguments or {})


def _checked(registry: Registry[Any], name: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    function = registry.find(name)
    for argument, problem in argument_problems(function, arguments, given_by_us=1):
        raise AlgorithmError(f"{registry.kind} {name} cannot be called with {dict(arguments)}: {argument}: {problem}")
    return function
