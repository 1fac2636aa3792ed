"""An agent that plays one rollout of a task of sums_env with the student."""

import functools
import os
import uuid

import verifiers.v1 as vf


@functools.cache
def environment() -> tuple[vf.Env, list[vf.Task]]:
    """The environment and its tasks, made once a process."""
    agent = {"runtime": {"type": "subprocess"}}
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "sums_env"}, "agent": agent}))
    return env, list(env.taskset)


async def solve(row: dict, base_url: str, api_key: str) -> float:
    """Plays one rollout of the row's task. Returns the environment's reward."""
    env, tasks = environment()
    name = f"POLICY_{uuid.uuid4().hex}"  # verifiers takes a key by the name of a variable alone
    os.environ[name] = api_key
    try:
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=name)
        episode = await env.run_episode(tasks[row["task"]], vf.ModelContext("policy", client))
    finally:
        del os.environ[name]
    errors = [error.message for part in (episode, *episode.traces) for error in part.errors]
    if not episode.ok:
        raise RuntimeError("; ".join(errors))
    return sum(trace.reward for trace in episode.traces)
