"""The policy losses and advantages that a configuration can name.

A function registers itself where it is defined, with what the configuration must know of it before a run; its arguments
and their defaults are its signature. A module in `losses` or `advantages` is found by itself. A user's own function
needs no more than the same signature; `register_*` gives it a name and facts.

Importing this module imports no torch, and neither do names, facts and defaults; looking a function up does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from roll_opd.base.frozen import FrozenDict
from roll_opd.base.registry import Registry, argument_problems

if TYPE_CHECKING:
    from torch import Tensor

    from roll_opd.algorithms.advantages.batch import Normalised

PolicyLoss = Callable[..., "Tensor"]  # (LossBatch, *, its arguments) -> [M]
Advantage = Callable[..., "Normalised"]  # (RewardBatch, *, its arguments) -> Normalised


class AlgorithmError(Exception):
    """An algorithm, advantage or policy loss that cannot be used; the message says why and what is known."""


@dataclass(frozen=True)
class PolicyLossFacts:
    """What the configuration must know of a policy loss without calling it."""

    reads_advantages: bool = True
    reads_pg_clip: bool = False  # takes clip_low, clip_high and dual_clip, which ROLL's pg_clip keys decide
    needs: Literal["demonstrations", "pairs"] | None = None
    loss_agg_mode: str | None = None  # its own; None: ROLL's default


@dataclass(frozen=True)
class AdvantageFacts:
    """What the configuration must know of an advantage function without calling it."""

    baseline: bool = False  # compares the samples of a prompt, so a single sample has nothing to be compared with
    reads_runs: bool = False  # wants the steps of each run; others get a run as one sample
    reads_states: bool = False  # compares steps that began from one state
    adds_steps: bool = False  # adds up a run's rewards, so that each must be of a step alone
    discounts_turns: bool = False  # gamma is of a turn, whose tokens have one value; else of a token
    # keys of the objective that decide what happens to the tokens; they may be given as arguments too
    token_defaults: Mapping[str, object] = field(default_factory=lambda: FrozenDict({"gamma": 1.0}))


POLICY_LOSSES = Registry(
    kind="policy loss",
    made_of="function",
    example="mypackage.my_loss",
    error=AlgorithmError,
    package="roll_opd.algorithms.losses",
    facts_type=PolicyLossFacts,
    decorator="register_policy_loss",
)
ADVANTAGES = Registry(
    kind="advantage",
    made_of="function",
    example="mypackage.my_advantage",
    error=AlgorithmError,
    package="roll_opd.algorithms.advantages",
    facts_type=AdvantageFacts,
    decorator="register_advantage",
    elsewhere=("skip_obs_gae",),  # ROLL's, not available yet
)
register_policy_loss = POLICY_LOSSES.register
register_advantage = ADVANTAGES.register


def policy_loss(name: str, arguments: Mapping[str, Any] | None = None) -> PolicyLoss:
    """Return the function, after checking that it takes `arguments`. Raises `AlgorithmError`."""
    return _checked(POLICY_LOSSES, name, arguments or {})


def advantage(name: str, arguments: Mapping[str, Any] | None = None) -> Advantage:
    """Return the function, after checking that it takes `arguments`. Raises `AlgorithmError`."""
    return _checked(ADVANTAGES, name, arguments or {})


def _checked(registry: Registry[Any], name: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    function = registry.find(name)
    for argument, problem in argument_problems(function, arguments, given_by_us=1):
        raise AlgorithmError(f"{registry.kind} {name} cannot be called with {dict(arguments)}: {argument}: {problem}")
    return function
