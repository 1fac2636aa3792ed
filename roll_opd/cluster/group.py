"""A worker group: the ranks of one Megatron role, called together."""

import asyncio
from typing import Any

import ray

from roll_opd.cluster.placement import Placement
from roll_opd.config.plan import MegatronPlan


class WorkerGroup:
    """Every rank of one role, one process a device."""

    def __init__(self, actor: Any, plan: MegatronPlan, placement: Placement, env: dict[str, str]) -> None:
        """Start one `actor` (a Ray actor class) a device of `plan`; `setup` makes them a process group."""
        self.plan = plan
        self._ranks = []
        for rank, device in enumerate(plan.devices):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(len(plan.devices)), "LOCAL_RANK": "0"}
            options = placement.options((device,), {**env, **plan.env, **variables})
            self._ranks.append(actor.options(**options).remote())

    async def setup(self, **arguments: Any) -> None:
        """Rendezvous at rank 0 and build the engine on every rank."""
        address, port = await self._ranks[0].address.remote()
        await self.call("setup", master_addr=address, master_port=port, plan=self.plan, **arguments)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` on every rank with the same arguments; return what each answered, by rank.

        The first failure is raised at once: the other ranks may be waiting for the failed one in a collective.
        """
        return await asyncio.gather(*[getattr(rank, method).remote(*args, **kwargs) for rank in self._ranks])

    def end(self) -> None:
        """End every rank at once; one that is left to itself tidies up for seconds."""
        for rank in self._ranks:
            ray.kill(rank)
