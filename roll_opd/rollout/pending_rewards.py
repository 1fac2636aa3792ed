"""Rewards on their way: asked for the moment a sample is finished, waited for only where they are needed."""

import asyncio
from collections.abc import Sequence

from roll_opd.data.experience import Experience
from roll_opd.workers.reward_pool import RewardPool, RewardResult


class PendingRewards:
    """What the reward_pools have been asked and not yet been told for."""

    def __init__(self, reward_pools: Sequence[RewardPool]) -> None:
        self._pools = reward_pools
        self._asked: dict[str, asyncio.Future[RewardResult]] = {}  # by sample

    def ask(self, experience: Experience) -> None:
        """Have a sample scored by the pool of its tag, if there is one."""
        for pool in self._pools:
            if pool.plan.accepts(experience.tag):
                self._asked[experience.id] = pool.submit(experience)

    async def answered(self, experiences: Sequence[Experience]) -> list[Experience]:
        """The samples with their rewards, as soon as all have them; those that nobody was asked for as they are.

        Raises what `RewardPool.submit` says.
        """
        asked = [experience.id for experience in experiences if experience.id in self._asked]
        await asyncio.gather(*[self._asked[name] for name in asked])
        verdicts = {name: self._asked[name].result() for name in asked}
        return [verdicts[e.id].of(e) if e.id in verdicts else e for e in experiences]

    def forget(self) -> None:
        """Nobody waits any more for what has not come."""
        for verdict in self._asked.values():
            verdict.cancel()
        self._asked.clear()
