"""What an environment is: a class with `reset` and `step`, as GEM (https://github.com/axon-rl/gem) defines them.

Keys of `info` with a meaning, all of which may be missing:

- of `reset`: `env_instruction`, a text that is said once, before the first observation;
- of both: `suffix`, a text for the next prompt;
- of `step`: `metrics`, numbers and truth values by name; `metrics_agg_mode`, how
  the turns of an episode are put together, by name of a metric ("mean", "sum", "last", "max", "min"); `action_desc`, a
  sentence about what the action did; `use_tool`, whether the observation is a tool's output.
"""

from typing import Any

from roll_opd.base.registry import Registry

Reset = tuple[str, dict[str, Any]]  # observation, info
Step = tuple[str, float, bool, bool, dict[str, Any]]  # observation, reward, terminated, truncated, info


class EnvironmentFailure(ValueError):
    """An environment cannot be found, made or played on; the message says which, where and what to do."""


class Environment:
    """One game, task or tool world. Subclass it and write `reset` and `step`; one instance plays one episode a time."""

    def reset(self, seed: int | None = None) -> Reset:
        """Begin an episode; return its first observation and info. The same seed begins the same episode."""
        raise NotImplementedError(f"{type(self).__name__} has no method `reset`; write reset(seed) -> (text, info)")

    def step(self, action: str) -> Step:
        """Take a response of the model; return (observation, reward, terminated, truncated, info).

        `terminated`: the episode ended by its rules. `truncated`: a limit ended it. After either, only `reset` follows.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method `step`; write step(action) -> five values")

    def close(self) -> None:
        """Give back what the environment holds; it is not used afterwards."""


ENVIRONMENTS: Registry[dict] = Registry(
    kind="environment",
    made_of="class",
    example="my_envs.MyGame",
    error=EnvironmentFailure,
    package="roll_opd.environments",
    facts_type=dict,
    decorator="ENVIRONMENTS.register",
)
