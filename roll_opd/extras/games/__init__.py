"""Text environments on GEM's contract: `from roll_opd.extras.games import ENVIRONMENTS, Environment, make`.

`reset(seed)` returns (observation, info); `step(action)` returns (observation, reward, terminated, truncated, info).
docs/environments.md describes the contract.
"""

from roll_opd.extras.games.environment_interface import ENVIRONMENTS, Environment, EnvironmentFailure
from roll_opd.extras.games.factory import check, check_declared, find, make

__all__ = ["ENVIRONMENTS", "Environment", "EnvironmentFailure", "check", "check_declared", "find", "make"]
