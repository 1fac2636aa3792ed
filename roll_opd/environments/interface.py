"""`Environment` base class with `reset` and `step` as in GEM (https://github.com/axon-rl/gem), and its registry.

Optional keys of `info`:

- of `reset`: `env_instruction`, a text before the first observation;
- of both: `suffix`, a text for the next prompt;
- of `step`: `metrics`, name -> number or bool; `metrics_agg_mode`, name -> aggregation over the turns of an episode
  ("mean", "sum", "last", "max", "min"); `action_desc`, a sentence about the action's effect; `use_tool`, whether the
  observation is a tool's output.
"""

from typing import Any

from roll_opd.base.registry import Registry

Reset = tuple[str, dict[str, Any]]  # observation, info
Step = tuple[str, float, bool, bool, dict[str, Any]]  # observation, reward, terminated, truncated, info


class EnvironmentFailure(ValueError):
    """An environment cannot be found, created or stepped; the message says which, where and what to do."""


class Environment:
    """Base class of environments. Implement `reset` and `step`; an instance plays one episode at a time."""

    def reset(self, seed: int | None = None) -> Reset:
        """Start an episode; return (observation, info). The same seed starts the same episode."""
        raise NotImplementedError(f"{type(self).__name__} has no method `reset`; write reset(seed) -> (text, info)")

    def step(self, action: str) -> Step:
        """Process a response of the model; return (observation, reward, terminated, truncated, info).

        `terminated`: the episode ended by its rules. `truncated`: a limit ended it. After either, only `reset` follows.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method `step`; write step(action) -> five values")

    def close(self) -> None:
        """Release the environment's resources."""


ENVIRONMENTS: Registry[dict] = Registry(
    kind="environment",
    made_of="class",
    example="my_envs.MyGame",
    error=EnvironmentFailure,
    package="roll_opd.environments",
    facts_type=dict,
    decorator="ENVIRONMENTS.register",
)
