"""Text environments on GEM's contract: `from roll_opd.environments import ENVIRONMENTS, Environment, make`.

`reset(seed)` returns an observation and what is known beside it, `step(action)` an observation, a reward, whether the
episode has ended by its rules or by a limit, and what is known beside it. docs/environments.md has the whole of it.
"""

from roll_opd.environments.factory import check, check_declared, find, located, make
from roll_opd.environments.interface import ENVIRONMENTS, Environment, EnvironmentFailure

__all__ = ["ENVIRONMENTS", "Environment", "EnvironmentFailure", "check", "check_declared", "find", "located", "make"]
