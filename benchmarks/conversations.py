"""Idle time of the inference engines while conversations are running.

Runs `--conversations` conversations of `--turns` turns concurrently, through the workflow processes and engines of a
run, and records when each engine had requests. An engine is idle if it has no request although some of its
conversations are not finished. The tokens per second are compared with the same number of answers that are requested
together.

    python benchmarks/conversations.py [--conversations 256] [--turns 4] [--rounds 3] [--json OUT] [--at-most 0.1]
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
from pipeline_run import REPOSITORY, machine

from roll_opd.base.frozen import freeze
from roll_opd.cluster.forkserver.forkserver_start import fork_server
from roll_opd.cluster.placement import Placement
from roll_opd.cluster.ray_runtime import ray_cluster
from roll_opd.config.plan import RunPlan
from roll_opd.data.dataset import Prompt
from roll_opd.data.templates import load_tokenizer
from roll_opd.pipelines import start_roles
from roll_opd.planner.load_plan import load_plan
from roll_opd.rollout.workflow_protocol import SingleTurn, Workflow
from roll_opd.rollout.workflow_runs import PendingRewards, RolloutContext, roll_out
from roll_opd.samples.sample import Sample
from roll_opd.tracking.phase_clock import PhaseClock
from roll_opd.workers.sampler import RolloutWorker, Sampler

SLICE = 0.02  # seconds between two points of the timeline


@ray.remote
class WatchedEngine(RolloutWorker.__ray_actor_class__):  # type: ignore[name-defined]
    """An engine that records its number of requests."""

    async def setup(self, *arguments: Any) -> None:
        """Start it."""
        self._events: list[tuple[float, int]] = []  # (time, change in the number of requests)
        await super().setup(*arguments)

    async def generate(self, requests: Sequence[Any], *arguments: Any) -> Any:
        """Answer as ever."""
        left = len(requests)
        self._events.append((time.time(), left))
        try:
            async with aclosing(super().generate(requests, *arguments)) as answers:
                async for answer in answers:
                    done = len(answer._value)
                    left -= done
                    self._events.append((time.time(), -done))
                    yield answer
        finally:
            self._events.append((time.time(), -left))

    async def take_events(self) -> list[tuple[float, int]]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


def main() -> int:
    """Measure and print the figures; return 1 if the engines were idle for more than `--at-most`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48, help="maximum tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--at-most", type=float, metavar="SHARE")
    options = parser.parse_args()
    plan = load_plan(
        str(REPOSITORY / "examples/demo"),
        "onpolicy_distill",
        [
            *(
                "validation=null",
                "eval_steps=0",
                "prompt_length=32",
                "num_return_sequences_in_group=1",
                "rollout_batch_size=256",
            ),
            f"++student_infer.strategy_args.strategy_config.max_model_len={40 + options.turns * (options.tokens + 24)}",
            f"workflow_args={{turns: {options.turns}}}",
            f"student_infer.generating_args.max_new_tokens={options.tokens}",
            *("workflow=conversation", f"plugin_dir={REPOSITORY}/benchmarks/workflows"),
        ],
    )
    start_roles.RolloutWorker = WatchedEngine  # type: ignore[misc]
    with fork_server() as server:
        server.serve(plan)
        with ray_cluster(plan.devices_per_node):
            rounds = asyncio.run(measured(plan, options))
    result = {
        "idle_share": median(share for one in rounds for share in one["idle_shares"]),
        "tokens_per_second": median(one["tokens_per_second"] for one in rounds),
        "tokens_per_second_at_once": median(one["tokens_per_second_at_once"] for one in rounds),
        "rounds": rounds,
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "machine": machine(),
    }
    print(
        f"idle {result['idle_share']:.1%} of the time; {result['tokens_per_second']:.0f} tokens/s in conversations,"
        f" {result['tokens_per_second_at_once']:.0f} when all answers are requested together"
    )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result) + "\n")
    return int(options.at_most is not None and result["idle_share"] > options.at_most)


async def measured(plan: RunPlan, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of each round; an additional first round is not counted."""
    assert plan.rollout
    placement = Placement(plan.num_nodes, plan.devices_per_node)
    sampler = await start_roles.start_sampler(plan, plan.rollout, placement)
    pool = await start_roles.start_workflow(plan, sampler, placement)
    assert pool
    rng, tokenizer = random.Random(0), load_tokenizer(plan.rollout.model.path)

    async def played(workflow: Workflow, number: int) -> tuple[list[Sample], float]:
        texts = [f"{rng.randrange(100, 1000)}+{rng.randrange(100, 1000)}=" for _ in range(number)]
        prompts = [prompt(place, text, tokenizer) for place, text in enumerate(texts)]
        return await rolled_out(plan, sampler, workflow, prompts)

    rounds = []
    for number in range(options.rounds + 1):
        conversations, seconds = await played(pool, options.conversations)
        timelines = await sampler.engines.call("take_events")
        at_once, seconds_at_once = await played(SingleTurn(), options.conversations * options.turns)
        await sampler.engines.call("take_events")
        if number:
            rounds.append(
                {
                    "idle_shares": [idle_share(events) for events in timelines],
                    "tokens_per_second": sum(int(one.action_mask.sum()) for one in conversations) / seconds,
                    "tokens_per_second_at_once": sum(one.response_length for one in at_once) / seconds_at_once,
                    "seconds": seconds,
                    "slice": SLICE,
                    "under_way": [timeline(events) for events in timelines],
                }
            )
    await pool.end()
    await sampler.end()
    return rounds


async def rolled_out(
    plan: RunPlan, sampler: Sampler, workflow: Workflow, prompts: Sequence[Prompt]
) -> tuple[list[Sample], float]:
    """Return the samples that a workflow makes from the prompts, and its seconds."""
    assert plan.rollout
    context = RolloutContext(sampler, plan.rollout.sampling, (), plan.seed, 16, PhaseClock(), workflow=workflow)
    began = time.perf_counter()
    async with aclosing(roll_out(context, prompts, PendingRewards(context), 0)) as runs:
        made = [one async for _, found in runs for one in found or ()]
    return made, time.perf_counter() - began


def prompt(number: int, text: str, tokenizer: Any) -> Prompt:
    """Return a question as a row's prompt."""
    messages = [{"role": "user", "content": text}]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return Prompt(f"p{number}", number, "", np.array(tokens), "", freeze({"messages": messages}))


def under_way(events: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return (time, number of running requests) after each change."""
    found, number = [], 0
    for at, change in sorted(events):
        number += change
        found.append((at, number))
    return found


def idle_share(events: Sequence[tuple[float, int]]) -> float:
    """Return the share of the time without a request, between the first and the last event."""
    found = under_way(events)
    idle = sum(until - at for (at, number), (until, _) in pairwise(found) if number == 0)
    return idle / (found[-1][0] - found[0][0])


def timeline(events: Sequence[tuple[float, int]]) -> list[int]:
    """Return the number of running requests at the end of each slice."""
    found = under_way(events)
    first, last, place, points = found[0][0], found[-1][0], 0, []
    for number in range(int((last - first) / SLICE) + 1):
        while place + 1 < len(found) and found[place + 1][0] <= first + (number + 1) * SLICE:
            place += 1
        points.append(found[place][1])
    return points


if __name__ == "__main__":
    raise SystemExit(main())
