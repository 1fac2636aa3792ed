"""The parts of a step without the pipeline: engines in plain processes, without Ray, one part at a time.

Every process gets the environment that the pipeline's worker on the same device gets. The input of a part is in its
process before the clock starts. The slowest of several processes counts.
"""

import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from roll_opd.config.plan import MegatronPlan, RolloutPlan, RunPlan, SamplingPlan, TrainPlan
from roll_opd.inference.vllm_requests import Completion

CLOSE_SECONDS = 20
TURNS = 3  # moves of a role off its device and back
# samples a step on the engines; returns the seconds of each part of the sampling, and the experiences
Sample = Callable[[Sequence["Part"]], tuple[dict[str, float], list]]


class BareError(RuntimeError):
    """The parts cannot be run without the pipeline; the message states the reason."""


def run_bare(plan: RunPlan, log: Path) -> list[dict[str, float]]:
    """Run `plan.max_steps` steps; return for each step the seconds of each part, their sum `step`, and `tokens`.

    The output of the processes is written to `log`. BareError for a plan with several teachers or nodes, and if a
    process fails.
    """
    if len(plan.teachers) != 1 or plan.num_nodes != 1:
        raise BareError("only one teacher on one node can be measured; choose such a configuration")
    if plan.objective.opd_objective != "sampled":
        raise BareError("only opd_objective: sampled can be measured; choose such a configuration")
    sample = _environments(plan) if plan.workflow else _prompts(plan)
    with ExitStack() as stack:
        engines = [stack.enter_context(engine) for engine in _engines(plan, log)]
        student = [stack.enter_context(rank) for rank in _ranks(plan, plan.student, log)]
        teacher = [stack.enter_context(rank) for rank in _ranks(plan, plan.frozen_roles()[0], log)]
        _call_all([*engines, *student, *teacher], "ready")
        _transfer(student, engines, version=0)
        return [_step(plan, sample, step, engines, student, teacher) for step in range(1, plan.max_steps + 1)]


def time_moves(plan: RunPlan, log: Path) -> dict[str, dict[str, Any]]:
    """Return role -> seconds of `TURNS` moves `away` from its device and `back`, and the `bytes` of a Megatron rank.

    Roles are measured one at a time. The first move of a Megatron role allocates host memory. BareError if a process
    fails.
    """
    roles: dict[str, Callable[[], list]] = {
        "student": lambda: _ranks(plan, plan.student, log),
        "teacher": lambda: _ranks(plan, plan.frozen_roles()[0], log),
        "engines": lambda: _engines(plan, log, sleeps=True),
    }
    found: dict[str, dict[str, Any]] = {}
    for role, started in roles.items():
        with ExitStack() as stack:
            parts = [stack.enter_context(part) for part in started()]
            _call_all(parts, "ready")
            size = _call_all(parts, "bytes")[1][0]
            turns = [[_call_all(parts, command)[0] for command in ("away", "back")] for _ in range(TURNS)]
        found[role] = {"away": [away for away, _ in turns], "back": [back for _, back in turns], "bytes": size}
    return found


def _step(
    plan: RunPlan, sample: Sample, step: int, engines: list["Part"], student: list["Part"], teacher: list["Part"]
) -> dict[str, float]:
    # imported here, because the engines' processes import this module too and do not need these modules
    from roll_opd.objective.columns import loss_columns
    from roll_opd.samples.sample import logprobs_column, with_columns

    assert plan.rollout is not None
    temperature, objective = plan.rollout.sampling.temperature, plan.objective
    seconds, experiences = sample(engines)
    sequences = [(e.tokens, e.prompt_length) for e in experiences]
    seconds["teacher"], by_rank = _call_all(teacher, "compute_logprobs", sequences, temperature)
    name, logprobs = plan.teachers[0].name, _merged(by_rank)
    experiences = with_columns(experiences, **{logprobs_column(name): [logprobs[i] for i in range(len(experiences))]})
    if objective.recompute_old_logprobs:
        seconds["old_logprobs"], by_rank = _call_all(student, "compute_logprobs", sequences, temperature)
        old = _merged(by_rank)
        experiences = with_columns(experiences, old_logprobs=[old[i] for i in range(len(experiences))])
    size = plan.student.mini_batch_sequences
    parts = [experiences[start : start + size] for start in range(0, len(experiences), size)]
    batches = [loss_columns(part, plan.teachers, objective) for part in parts] * objective.ppo_epochs
    seconds["train"] = sum(_call_all(student, "update", batch, objective, temperature)[0] for batch in batches)
    seconds["weight_sync"] = _transfer(student, engines, version=step)
    tokens = sum(int(e.action_mask.sum()) for e in experiences)
    return {**seconds, "step": sum(seconds.values()), "tokens": float(tokens)}


def _prompts(plan: RunPlan) -> Sample:
    """Return a function that draws a step's prompts and answers them on the engines, distributed as in the pipeline."""
    from roll_opd.data.dataset import open_prompts
    from roll_opd.data.prompt_source import PromptSource
    from roll_opd.data.templates import load_tokenizer
    from roll_opd.rollout.workflow_protocol import sample_of, sample_seed

    assert plan.rollout is not None
    sampling = plan.rollout.sampling
    prompts, _ = open_prompts(plan.data, load_tokenizer(plan.student.model.path))
    source = PromptSource(prompts, plan.seed)

    def sample(engines: Sequence["Part"]) -> tuple[dict[str, float], list]:
        drawn = source.position
        asked = [(p, i, run) for i, p in enumerate(source.take(plan.rollout_batch_size)) for run in range(sampling.n)]
        seconds, completions = _generate(
            engines,
            [(i % len(engines), p.tokens, sampling, sample_seed(plan.seed, drawn + i, run)) for p, i, run in asked],
        )
        answered = zip(asked, completions, strict=True)
        return {"generate": seconds}, [sample_of(p, drawn + i, run, written) for (p, i, run), written in answered]

    return sample


def _environments(plan: RunPlan) -> Sample:
    """Return a function that plays a step's games."""
    from bare_games import Games

    from roll_opd.extras.games.task_source import EnvironmentSource

    if not plan.is_agentic:
        raise BareError("of workflows, only those in environments can be measured; choose such a configuration")
    games, source = Games(plan), EnvironmentSource(plan.data.environments, plan.seed)

    def sample(engines: Sequence["Part"]) -> tuple[dict[str, float], list]:
        drawn = source.position
        return games.play(source.take(plan.rollout_batch_size), drawn, lambda asked: _generate(engines, asked))

    return sample


def _generate(
    engines: Sequence["Part"], asked: Sequence[tuple[int, np.ndarray, SamplingPlan, int]]
) -> tuple[float, list]:
    """Answer requests (engine, tokens, settings, seed); return the slowest engine's seconds, and the completions."""
    shares = [[request for request in asked if request[0] == number] for number in range(len(engines))]
    for engine, share in zip(engines, shares, strict=True):
        engine.send("generate", [(tokens.tolist(), sampling, seed) for _, tokens, sampling, seed in share])
    answers = [engine.receive() for engine in engines]
    written = [iter(completions) for _, completions in answers]
    return max(seconds for seconds, _ in answers), [next(written[engine]) for engine, *_ in asked]


def _transfer(student: list, engines: list, version: int) -> float:
    """Export the student's weights and load them into every engine; return seconds, without the transfer between
    processes."""
    exported, answers = _call_all(student, "weights")
    loaded, _ = _call_all(engines, "load", next(buckets for buckets in answers if buckets), version)
    return exported + loaded


def _call_all(processes: Sequence["Part"], command: str, *arguments: Any) -> tuple[float, list]:
    """Call all processes in parallel; return the seconds of the slowest, and all answers."""
    for process in processes:
        process.send(command, *arguments)
    answers = [process.receive() for process in processes]
    return max(seconds for seconds, _ in answers), [answer for _, answer in answers]


def _merged(answers: Sequence[dict | None]) -> dict:
    """Return sequence number -> log-probs, merged over the ranks with an answer."""
    return {number: values for answer in answers if answer for number, values in answer.items()}


class Part:
    """A plain process with one engine; it ends when this end of the pipe is closed."""

    def __init__(self, process: Any, pipe: Any) -> None:
        self._process, self._pipe = process, pipe

    def send(self, *command: Any) -> None:
        self._pipe.send(command)

    def receive(self) -> tuple[float, Any]:
        try:
            return self._pipe.recv()
        except EOFError:
            raise BareError(f"the process of {self._process.name} ended unexpectedly") from None

    def close(self) -> None:
        self._pipe.close()
        self._process.join(CLOSE_SECONDS)
        if self._process.is_alive():
            self._process.kill()


@contextmanager
def _start(
    log: Path, serve: Callable[..., None], name: str, environment: dict[str, Any], *arguments: Any
) -> Iterator[Part]:
    """Run `serve(pipe, *arguments)` in a new process that starts with `environment`, like Ray's workers."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_born, args=(log, serve, theirs, *arguments), name=name)
    before = dict(os.environ)
    os.environ.update({key: str(value) for key, value in environment.items()})
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    theirs.close()
    part = Part(process, ours)
    try:
        yield part
    finally:
        part.close()


def _born(log: Path, serve: Callable[..., None], *arguments: Any) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    serve(*arguments)


def _shared_environment(plan: RunPlan, devices: Sequence[int]) -> dict[str, Any]:
    """Return the environment that cluster/placement.py sets for a process on `devices`."""
    threads = max(1, len(os.sched_getaffinity(0)) // plan.devices_per_node)
    visible = ",".join(map(str, devices))
    return {"OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": visible, "LOCAL_RANK": 0, **plan.env}


def _engines(plan: RunPlan, log: Path, sleeps: bool = False) -> list:
    rollout = plan.rollout
    assert rollout is not None
    devices = [rollout.devices[e * rollout.tp : (e + 1) * rollout.tp] for e in range(rollout.engines)]
    return [
        _start(log, serve_engine, "generate", {**_shared_environment(plan, own), **rollout.env}, rollout, plan, sleeps)
        for own in devices
    ]


def _ranks(plan: RunPlan, worker: MegatronPlan, log: Path) -> list:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": probe.getsockname()[1]}
    parts = []
    for rank, device in enumerate(worker.devices):
        group = {"RANK": rank, "WORLD_SIZE": len(worker.devices), **meeting}
        environment = {**_shared_environment(plan, (device,)), **worker.env, **group}
        parts.append(_start(log, serve_rank, worker.name, environment, worker, plan))
    return parts


def serve_rank(pipe: Any, worker: MegatronPlan, plan: RunPlan) -> None:
    """Serve one rank of a Megatron role: read a command with its input, wait for the other ranks, time the work."""
    import torch
    import torch.distributed as dist

    from roll_opd.megatron.engine import MegatronEngine
    from roll_opd.megatron.student_engine import MegatronTrainer
    from roll_opd.models.device_phases import Part as Memory
    from roll_opd.models.device_phases import Phase

    engine: Any
    if isinstance(worker, TrainPlan):
        engine = MegatronTrainer(worker, seed=plan.seed, deterministic=plan.deterministic)
    else:
        engine = MegatronEngine(worker, seed=plan.seed, deterministic=plan.deterministic)
    calls = {
        "ready": lambda: None,
        "compute_logprobs": engine.compute_logprobs,
        "weights": lambda: _buckets(engine),
        "away": lambda: engine.offload(tuple(Memory), Phase.GENERATE),
        "back": lambda: engine.memory.onload(tuple(Memory)),
        "bytes": lambda: sum(engine.memory.bytes_on_device().values()),
    }
    if isinstance(worker, TrainPlan):
        calls["update"] = engine.update
    while command := _received(pipe):
        dist.barrier()
        began = time.perf_counter()
        answer = calls[command[0]](*command[1:])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        pipe.send((time.perf_counter() - began, answer))


def _buckets(engine: Any) -> list:
    import torch

    from roll_opd.megatron.export import weight_buckets
    from roll_opd.samples.transport import as_array
    from roll_opd.samples.weight_bucket import BucketMemory, map_bucket

    memory = BucketMemory()
    written = weight_buckets(engine, [memory], torch.float32)
    found = [{name: as_array(t).copy() for name, t in map_bucket(**memory.describe())[1]} for memory, _ in written]
    memory.close()
    return found


def serve_engine(pipe: Any, rollout: RolloutPlan, plan: RunPlan, sleeps: bool) -> None:
    """One inference engine."""
    asyncio.run(_serve_engine(pipe, rollout, plan, sleeps))


async def _serve_engine(pipe: Any, rollout: RolloutPlan, plan: RunPlan, sleeps: bool) -> None:
    from roll_opd.inference.vllm_engine import InferenceEngine
    from roll_opd.inference.weight_updates import PARTS
    from roll_opd.samples.transport import as_tensor
    from roll_opd.samples.weight_bucket import BucketMemory

    engine = await InferenceEngine.start(
        rollout.model,
        max_model_len=rollout.max_model_len,
        seed=plan.seed,
        tensor_parallel_size=rollout.tp,
        engine_args=rollout.engine_args,
        deterministic=plan.deterministic,
        sleeps=sleeps,
    )

    async def generate(requests: list[tuple[list[int], SamplingPlan, int]]) -> list:
        done: dict[int, Completion] = {}

        async def batch(sampling: SamplingPlan) -> None:
            places = [place for place, request in enumerate(requests) if request[1] == sampling]
            prompts, seeds = [requests[p][0] for p in places], [requests[p][2] for p in places]
            async for index, completion in engine.generate_batch(prompts, sampling, seeds):
                done[places[index]] = completion

        await asyncio.gather(*[batch(sampling) for sampling in {sampling for _, sampling, _ in requests}])
        return [done[place] for place in range(len(requests))]

    async def load(buckets: list, version: int) -> None:
        await engine.updates.begin(version)
        memory = BucketMemory()
        for bucket in buckets:
            memory.clear()
            for name, array in bucket.items():
                memory.add(name, as_tensor(array), engine._llm.vllm_config.model_config.dtype)
            await engine.updates.load({**memory.describe(), "version": version})
        await engine.updates.finish()
        memory.close()

    async def ready() -> None:
        return None

    calls: dict[str, Any] = {
        "ready": ready,
        "generate": generate,
        "load": load,
        "away": lambda: engine.sleep(rollout.sleep_level, "measured"),
        "back": lambda: engine.wake_up(PARTS),
        "bytes": ready,  # vLLM does not say
    }
    while command := await asyncio.to_thread(_received, pipe):
        began = time.perf_counter()
        answer = await calls[command[0]](*command[1:])
        pipe.send((time.perf_counter() - began, answer))
    await engine.close()


def _received(pipe: Any) -> tuple | None:
    """Return the next command, or None if the other end is closed."""
    try:
        return pipe.recv()
    except EOFError:
        return None
