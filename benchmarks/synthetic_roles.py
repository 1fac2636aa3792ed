"""Engines, ranks and reward workers without a model: real processes that answer immediately with random numbers."""

import asyncio
import functools
import itertools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from driver_cost import DriverCost
from lengths import LONGEST, lengths_of

from roll_opd.config.plan import SamplingPlan
from roll_opd.inference.vllm_requests import Completion
from roll_opd.pipelines import start_roles
from roll_opd.pipelines.run_logger import RunLogger
from roll_opd.rewards.interface import Score, Scored
from roll_opd.samples import transport
from roll_opd.samples.micro_batches import Packing, TrainResult
from roll_opd.samples.transport import Compact
from roll_opd.samples.weight_bucket import BucketMemory, bucketed
from roll_opd.weight_sync.bucket_writer import BucketHost, Written
from roll_opd.workers import model_worker, student
from roll_opd.workers.batched_calls import Answers
from roll_opd.workers.sampler import Request

HIDDEN, VOCABULARY = 64, 256  # a real hidden state is much wider; see README.md
LENGTHS = "DATA_PLANE_LENGTHS"  # environment variable of the engines


class Engine(BucketHost):
    """Answers like an inference engine."""

    async def setup(self, *_: Any, **__: Any) -> None:
        self._noise = noise()
        self._calls = itertools.count()
        self._version = 0

    async def begin_update(self, version: int) -> None:
        self._version = version

    async def load_weights(self, *_: Any, **__: Any) -> None:
        pass

    async def close(self) -> None:
        pass

    async def generate(
        self, requests: Sequence[Request], sampling: SamplingPlan, chunk: int | None = None
    ) -> AsyncIterator[Compact]:
        lengths = lengths_of(os.environ[LENGTHS], len(requests), next(self._calls))
        answers = []
        for number in np.argsort(lengths, kind="stable").tolist():
            tokens = np.random.default_rng(requests[number].seed).integers(0, VOCABULARY, lengths[number])
            versions = ((self._version, len(tokens)),)
            answers.append((number, Completion(tokens, self._noise[: len(tokens)], "stop", versions)))
            if len(answers) == chunk:
                yield Compact(answers)
                answers = []
                await asyncio.sleep(0)
        if answers:
            yield Compact(answers)


class Model:
    """Replaces the engine of a rank; its data-parallel rank is its rank."""

    adapters, is_last_stage = None, True

    def __init__(self, ranks: int) -> None:
        self.data_parallel_rank, self.packing, self._noise = int(os.environ["RANK"]), Packing(ranks), noise()

    def compute_logprobs(
        self, sequences: Sequence[Any], temperature: float, assigned: Sequence[Sequence[int]], **_: Any
    ) -> dict[int, np.ndarray]:
        own = [number for part in assigned for number in part]
        return {n: self._noise[: len(sequences[n][0]) - sequences[n][1]] for n in own}

    def compute_targets(
        self, sequences: Sequence[Any], temperature: float, assigned: Sequence[Sequence[int]], **wanted: Any
    ) -> dict[int, dict[str, np.ndarray]]:
        return {
            number: {"logprobs": logprobs, **targets(len(logprobs), wanted.get("topk"))}
            for number, logprobs in self.compute_logprobs(sequences, temperature, assigned).items()
        }

    def update(self, samples: Sequence[Any], *_: Any, assigned: Sequence[Sequence[int]], **__: Any) -> TrainResult:
        names = ("old_logprobs", "total_advantages", "reverse_kl")
        lengths = {n: samples[n].response_length for part in assigned for n in part}
        columns = {n: {name: self._noise[:length] for name in names} for n, length in lengths.items()}
        sums = {"tokens": 1.0, "weighted_loss": 0.0, "policy_loss": 0.0, "kl_loss": 0.0}
        return TrainResult(sums, columns, 1.0, 1e-4, applied=True)

    def output_head(self) -> np.ndarray:
        return np.zeros((VOCABULARY, HIDDEN), np.float32)

    def load_teacher_head(self, *_: Any) -> None:
        pass


def targets(tokens: int, topk: int | None) -> dict[str, np.ndarray]:
    """Return a teacher's targets for this number of tokens: a top-k, or hidden states."""
    if topk is None:
        return {"hidden": np.zeros((tokens, HIDDEN), np.float32)}
    ids, logprobs = np.zeros((tokens, topk), np.int32), np.full((tokens, topk), -5.0, np.float32)
    return {"topk_ids": ids, "topk_logprobs": logprobs, "topk_rest": logprobs[:, 0].copy()}


TeacherRank: Any = model_worker.LogprobWorker.__ray_metadata__.modified_class  # type: ignore[attr-defined]
StudentRank: Any = student.TrainWorker.__ray_metadata__.modified_class  # type: ignore[attr-defined]


class Teacher(TeacherRank):
    def _build(self, plan: Any, *_: Any) -> Model:
        return Model(plan.layout.dp)


class Student(StudentRank):
    _build = Teacher._build

    def begin_writing(self, memories: Sequence[BucketMemory], dtype: str) -> Written:
        if not memories:  # on a rank that sends nothing
            return iter(())
        return bucketed([(["weight"], torch.zeros(1, 1))], memories, torch.float32, 64)

    def save(self, directory: Path) -> None:
        self._write(lambda: [])


class Scorer:
    """Answers like a reward worker."""

    async def setup(self, *_: Any, **__: Any) -> None:
        self._random = np.random.default_rng(0)

    async def alive(self) -> None:
        pass

    async def run(self, samples: Sequence[Any]) -> AsyncIterator[Compact]:
        scores: list[tuple[int, Scored]] = [
            (number, Score(float(self._random.integers(2)))) for number in range(len(samples))
        ]
        yield Compact(Answers(scores, hung=False))


def put_in_place(lengths: str, cost: DriverCost) -> None:
    """Replace the roles that a launch in this process starts by these, and count from the end of the first step on."""
    here = str(Path(__file__).parent)
    os.environ |= {LENGTHS: lengths, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    replaced = {"RolloutWorker": Engine, "TrainWorker": Student, "LogprobWorker": Teacher, "RewardWorker": Scorer}
    for name, role in replaced.items():
        setattr(start_roles, name, ray.remote(role))

    def counted(function: Callable, after: Callable[[Any, Any], None]) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            after(args, value)
            return value

        return call

    def logged(args: tuple, _: None) -> None:
        if cost.is_counted:
            cost.step_ended(sum(experience.response_length for experience in args[3]))
        cost.begin()

    setattr(RunLogger, "step", counted(RunLogger.step, logged))  # noqa: B010
    transport._opened = counted(transport._opened, lambda args, _: cost.count(received=args[1].nbytes))
    reduce = counted(Compact.__reduce__, lambda _, reduced: cost.count(sent=reduced[1][1].nbytes))
    setattr(Compact, "__reduce__", reduce)  # noqa: B010


def noise() -> np.ndarray:
    """Return random log-probs for the longest response, f32."""
    return -np.random.default_rng(0).random(LONGEST).astype(np.float32)
