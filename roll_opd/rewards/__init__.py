"""Public interface for rewards of users: `from roll_opd.rewards import Score, register`."""

from roll_opd.rewards.interface import Failure, RewardSample, Score
from roll_opd.rewards.reward_registry import register

__all__ = ["Failure", "RewardSample", "Score", "register"]
