"""Where a run gets its processes: Ray, devices and workers."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from roll_opd.cluster import runtime
from roll_opd.cluster.multihost.hosts import Hosts
from roll_opd.cluster.placement import Placement
from roll_opd.cluster.startup_progress import StartupProgress
from roll_opd.config.plan import RunPlan
from roll_opd.pipelines import start
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.roles.reward_pool import RewardPool


class Backend:
    """Starts Ray and workers for one run, and ends them with it. A subclass may keep them for several runs."""

    @contextmanager
    def cluster(self, plan: RunPlan, starting: StartupProgress, hosts: Hosts | None) -> Iterator[None]:
        """Run Ray during the block."""
        with runtime.ray_cluster(plan.devices_per_node, starting, hosts):
            yield

    def devices(self, plan: RunPlan, starting: StartupProgress, hosts: Hosts | None) -> Placement:
        """Return the devices of the cluster."""
        return Placement(
            plan.num_nodes,
            plan.devices_per_node,
            starting,
            deterministic=plan.deterministic,
            addresses=hosts.addresses if hosts else (),
        )

    def complete(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end, in the event loop of the workers."""
        asyncio.run(work)

    async def reward_pools(self, plan: RunPlan, placement: Placement) -> tuple[RewardPool, ...]:
        """Start the reward workers."""
        return await start.start_reward_pools(plan, placement)

    async def workers(self, plan: RunPlan, placement: Placement) -> RunWorkers:
        """Start the roles."""
        return await start.start_workers(plan, placement)

    async def end(self, workers: RunWorkers) -> None:
        """End the roles and reward workers of a run that has made its last step."""
        await workers.end()
        for pool in workers.reward_pools:
            await pool.end()
