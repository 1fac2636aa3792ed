"""The interface of a workflow. One run takes a prompt, calls the model one or more times, and returns samples.

A rollout consists of many runs, and each run is a coroutine. For every workflow, samples are scored, selected and
trained on in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from roll_opd.config.plan import SamplingPlan
from roll_opd.data.prompt_source import Prompt, derived_seed
from roll_opd.inference.vllm_requests import Completion
from roll_opd.samples.sample import Sample, as_columns
from roll_opd.workers.sampler import Request, SamplingSession


@dataclass(frozen=True)
class Task:
    """One run of a workflow on one prompt.

    Attributes:
        prompt: the prompt.
        draw: number of the prompt in the order in which training draws prompts.
        run: index of this run among the runs on the prompt.
        runs: number of runs on the prompt.
        is_eval: whether the run belongs to a validation.
    """

    prompt: Prompt
    draw: int
    run: int = 0
    runs: int = 1
    is_eval: bool = False


class Model:
    """The student's model for one run. Runs of the same draw use the same engine."""

    def __init__(self, session: SamplingSession, task: Task, seed: int, sampling: SamplingPlan) -> None:
        self.group, self.sampling = task.draw, sampling
        self._session, self._task, self._seed = session, task, seed
        self._calls = 0

    async def generate(self, tokens: np.ndarray) -> Completion:
        """Return the engine's response to a prompt.

        Args:
            tokens: int64 [P], the tokens of the prompt.
        """
        seed = sample_seed(self._seed, self._task.draw, self._task.run, self._calls)
        self._calls += 1
        return await self._session.ask(Request(self.group, tokens, seed), self.sampling)


class Workflow(Protocol):
    """A workflow returns any number of samples for a task, or None if the run failed."""

    async def run(self, task: Task, model: Model) -> Sequence[Sample] | None: ...


class SingleTurn:
    """The workflow that samples one response to the prompt."""

    async def run(self, task: Task, model: Model) -> Sequence[Sample]:
        """Return the response as a list of one sample."""
        completion = await model.generate(task.prompt.tokens)
        return [sample_of(task.prompt, task.draw, task.run, completion)]


def sample_seed(seed: int, draw: int, run: int, call: int = 0) -> int:
    """Return the seed of a model call.

    The seed depends on the seed of the training, the draw, the run and the index of the call in the run.
    """
    return derived_seed(seed, draw, run, *([call] if call else []))


def sample_of(prompt: Prompt, draw: int, run: int, completion: Completion) -> Sample:
    """Return a sample made from an engine's response.

    Args:
        draw: number of the draw of the prompt.
        run: index of the run in the draw.
    """
    return Sample(
        np.concatenate([prompt.tokens, completion.tokens]),
        len(prompt.tokens),
        as_columns(action_mask=np.ones(len(completion.tokens), dtype=bool), rollout_logprobs=completion.logprobs),
        completion.routes,
        id=f"{prompt.id}#{draw}/{run}",
        group_id=f"{prompt.id}#{draw}",
        run=run,
        tag=prompt.tag,
        finish_reason=completion.finish_reason,
        versions=completion.versions,
        teacher_prompts=prompt.teacher_prompts,
        ground_truth=prompt.ground_truth,
        extra=prompt.extra,
    )
