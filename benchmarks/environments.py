"""Idle time of the inference engines with slow games.

Plays `--environments` games of FrozenLake concurrently, with steps of up to `--think` seconds, through the workflow
processes and engines of a run, as in conversations.py. An engine is idle if it has no request although some of its
games are not finished.

    python benchmarks/environments.py [--environments 512] [--think 0.2] [--rounds 3] [--json OUT] [--at-most 0.1]
"""

import argparse
import asyncio
import json
from pathlib import Path
from statistics import median
from typing import Any

from conversations import SLICE, WatchedEngine, idle_share, rolled_out, timeline
from pipeline_run import REPOSITORY, machine

from roll_opd.cluster.forkserver.forkserver_start import fork_server
from roll_opd.cluster.placement import Placement
from roll_opd.cluster.ray_runtime import ray_cluster
from roll_opd.config.plan import RunPlan
from roll_opd.extras.games.task_source import EnvironmentSource
from roll_opd.pipelines import start_roles
from roll_opd.planner.load_plan import load_plan


def main() -> int:
    """Measure and print the figures; return 1 if the engines were idle for more than `--at-most`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environments", type=int, default=512)
    parser.add_argument("--think", type=float, default=0.2, help="maximum seconds of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--at-most", type=float, metavar="SHARE")
    options = parser.parse_args()
    game = "custom_envs.FrozenLake"
    plan = load_plan(
        str(REPOSITORY / "examples/games"),
        "frozen_lake",
        [
            *(f"{game}.env_type=pondering", f"++{game}.env_config.think={options.think}"),
            f"plugin_dir={REPOSITORY}/benchmarks/workflows",
            *("eval_steps=0", "val_env_manager=null"),
            *("train_env_manager.group_size=1", "workflow_workers=2"),
            f"workflow_concurrency={-(-options.environments // 2)}",
        ],
    )
    start_roles.RolloutWorker = WatchedEngine  # type: ignore[misc]
    with fork_server() as server:
        server.serve(plan)
        with ray_cluster(plan.devices_per_node):
            rounds = asyncio.run(measured(plan, options))
    result = {
        "idle_share": median(share for one in rounds for share in one["idle_shares"]),
        "rounds": rounds,
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "machine": machine(),
    }
    print(f"idle {result['idle_share']:.1%} of the time")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result) + "\n")
    return int(options.at_most is not None and result["idle_share"] > options.at_most)


async def measured(plan: RunPlan, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of each round; an additional first round is not counted."""
    assert plan.rollout and plan.data
    placement = Placement(plan.num_nodes, plan.devices_per_node)
    sampler = await start_roles.start_sampler(plan, plan.rollout, placement)
    pool = await start_roles.start_workflow(plan, sampler, placement)
    assert pool
    tasks = EnvironmentSource(plan.data.environments, plan.seed)
    rounds = []
    for number in range(options.rounds + 1):
        games, seconds = await rolled_out(plan, sampler, pool, tasks.take(options.environments))
        timelines = await sampler.engines.call("take_events")
        turns = pool.drain_metrics()["env/FrozenLake/turns"]
        if number:
            rounds.append(
                {
                    "idle_shares": [idle_share(events) for events in timelines],
                    "tokens_per_second": sum(int(one.action_mask.sum()) for one in games) / seconds,
                    "turns": turns,
                    "seconds": seconds,
                    "slice": SLICE,
                    "under_way": [timeline(events) for events in timelines],
                }
            )
    await pool.end()
    await sampler.end()
    return rounds


if __name__ == "__main__":
    raise SystemExit(main())
