"""`Experience`, which workflows return, and its validated conversion to a `Sample`.

As in Trinity-RFT, an experience is mutable and has tensors. In array shapes, T is the number of all tokens, and P is
the number of prompt tokens.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from roll_opd.base.failures import WorkflowError as WorkflowError
from roll_opd.data.prompt_source import Prompt
from roll_opd.samples.call_settings import CALL_SETTINGS, settings_column
from roll_opd.samples.sample import Sample, as_columns, teacher_columns
from roll_opd.samples.versions import Versions


class NoRoomError(ValueError):
    """A conversation is so long that it leaves no room for a response."""


class RunFailure(RuntimeError):
    """A run has failed. It is not trained on."""

    def __init__(self, kind: str, message: str) -> None:
        """Create a failure. The metric `workflow/failed/<kind>` counts it."""
        super().__init__(message)
        self.kind = kind


TEACHER = "teacher_logprobs"  # key of `info`: the teacher's log-probs of the response, f32 [T-P]
TURN_REWARDS = "roll_opd/turn_rewards"  # key of `info`: a number for each turn of a trajectory; only recorded
STATE = "state_hash"  # key of `info`: a string that is equal for steps that start from the same state
# field of Trinity-RFT's Experience that training does not read -> alternative
UNREAD = {
    "token_level_reward": "set one number as `reward`",
    **dict.fromkeys(("advantages", "returns"), "they are computed from `reward` by the algorithm of the configuration"),
    **dict.fromkeys(("chosen", "rejected", "chosen_messages", "rejected_messages"), "use the dpo pipeline"),
    "multi_modal_inputs": "only text models are supported",
    "routed_experts": "set router_replay, so that the engines record the routes",
    "custom_fields": "no loss reads custom fields; put values to log into `metrics`",
}


@dataclass
class EID:
    """Id of an experience: its batch, task, run and step. The pipeline sets the batch and the task.

    A workflow may make several kinds of experiences. It must then set `task` to the name of the kind, because
    advantages compare only experiences of the same kind.
    """

    batch: int | str = ""
    task: int | str = ""
    run: int = 0
    step: int = 0
    suffix: str = field(default_factory=lambda: uuid4().hex[:6])

    @property
    def uid(self) -> str:
        """Id of the experience."""
        return f"{self.rid}/{self.step}/{self.suffix}"

    @property
    def tid(self) -> str:
        """Id of the experience's task."""
        return f"{self.batch}/{self.task}"

    @property
    def rid(self) -> str:
        """Id of the experience's run. It includes the id of the task."""
        return f"{self.tid}/{self.run}"

    @property
    def sid(self) -> str:
        """Id of the experience's step. The step with the same number has the same id in all runs of the task."""
        return f"{self.tid}/{self.step}"


class Experience:
    """A trajectory, or one step of a trajectory.

    Sequences are converted to tensors. Unknown keyword arguments become entries of `info`.
    """

    def __init__(
        self,
        *,
        tokens: Tensor | Sequence[int],
        prompt_length: int = 1,
        logprobs: Tensor | Sequence[float] | None = None,
        reward: float | None = None,
        action_mask: Tensor | Sequence[bool] | None = None,
        info: dict[str, Any] | None = None,
        metrics: dict[str, float] | None = None,
        eid: EID | None = None,
        response_text: str | Callable[[], str] | None = None,
        prompt_text: str | None = None,
        messages: list[dict] | None = None,
        tools: list[dict] | None = None,
        truncate_status: str | None = None,
        finish_reason: str = "stop",
        versions: Versions = (),
        call_settings: np.ndarray | None = None,
        **more: Any,
    ) -> None:
        """Create an experience from a response of the model.

        Args:
            tokens: int [T], prompt and response.
            prompt_length: P, at least 1.
            logprobs: f32 [T-P], log-probs of the response tokens in the sampling distribution.
            reward: reward of the whole trajectory. If None, the rewards of the configuration score the trajectory.
            action_mask: bool [T-P], True for tokens that the model generated. None means all tokens.
            info: a mapping with any keys. `teacher_logprobs`, f32 [T-P], replace the log-probs of the teachers. Steps
                that start from the same state must have the same `state_hash`.
            metrics: numbers to log. The mean over all experiences is logged.
            response_text: text of the response, or a function that returns the text. The function is called on first
                use.
        """
        self.eid = EID(**eid) if isinstance(eid, dict) else eid or EID()
        self.tokens = torch.as_tensor(tokens)
        self.prompt_length = prompt_length
        self.logprobs = None if logprobs is None else torch.as_tensor(logprobs, dtype=torch.float32)
        self._action_mask = None if action_mask is None else torch.as_tensor(action_mask).bool()
        self.reward, self.info, self.metrics = reward, {**(info or {}), **more}, metrics or {}
        self._response_text, self.prompt_text, self.messages, self.tools = response_text, prompt_text, messages, tools
        self.truncate_status, self.finish_reason, self.versions = truncate_status, finish_reason, versions
        self.call_settings = call_settings  # of `samples.call_settings`, f32 [T-P, 4]; None: not known

    @property
    def action_mask(self) -> Tensor:
        """Mask of the tokens that the model generated, bool [T-P]."""
        if self._action_mask is None:
            self._action_mask = torch.ones(max(len(self.tokens) - self.prompt_length, 0), dtype=torch.bool)
        return self._action_mask

    @action_mask.setter
    def action_mask(self, mask: Any) -> None:
        self._action_mask = mask

    @property
    def teacher_logprobs(self) -> Any:
        """Teacher log-probs that the workflow has set in `info`, f32 [T-P], or None."""
        return (self.info or {}).get(TEACHER)

    @teacher_logprobs.setter
    def teacher_logprobs(self, logprobs: Any) -> None:
        self.info = {**(self.info or {}), TEACHER: logprobs}

    @property
    def response_text(self) -> str | None:
        """Text of the response without special tokens."""
        if callable(self._response_text):
            self._response_text = self._response_text()
        return self._response_text

    @response_text.setter
    def response_text(self, text: str | Callable[[], str] | None) -> None:
        self._response_text = text


@dataclass(frozen=True)
class TokenLimits:
    """Maximum sequence length and vocabulary size of the student."""

    tokens: int  # maximum tokens of prompt and response together
    vocabulary: int


def by_run(made: Sequence[Any], runs: Sequence[int]) -> dict[int, list[tuple[int, Experience]]]:
    """Sort the experiences of one call by run and step. Return a dict from run to a list of (step, experience).

    If a call makes several runs, `eid.run` is the run of each experience. If no experience sets `eid.run`, and there
    are as many experiences as runs, each run gets one experience.

    If `eid.step` is 0 in all experiences of a run, each experience becomes a step, numbered in order. Experiences with
    different `eid.task` are numbered separately.

    Raises TypeError or ValueError if an experience cannot be assigned to a run.
    """
    found: dict[int, list[tuple[int, Experience]]] = {}
    for one in made:
        if not isinstance(one, Experience):
            raise TypeError(f"a run returned {type(one).__name__} where an Experience was expected")
    if len({id(one) for one in made}) < len(made):
        raise ValueError("a run returned the same Experience twice; return each experience once")
    unnumbered = len(made) == len(runs) and not any(one.eid.run for one in made)
    for place, one in enumerate(made):
        run = runs[0] if len(runs) == 1 else runs[place] if unnumbered else one.eid.run
        if run not in runs:
            raise ValueError(f"eid.run is {run}; this call made runs {runs[0]} to {runs[-1]}")
        found.setdefault(run, []).append((one.eid.step, one))
    for run, steps in found.items():
        if any(step for step, _ in steps):
            steps.sort(key=lambda pair: pair[0])
        else:
            places: dict[str, Iterator[int]] = {}
            found[run] = [(next(places.setdefault(str(one.eid.task), count())), one) for _, one in steps]
    return found


def trained(
    made: Experience,
    limits: TokenLimits,
    prompt: Prompt,
    draw: int,
    run: int,
    place: int,
    step: int | None = None,
    settings: Collection[bytes] = (),
) -> Sample:
    """Validate an experience and convert it to a `Sample`.

    The sample lacks the ground truth and the other columns of the dataset row, which the receiver adds. Raises
    TypeError or ValueError if the experience cannot be trained on correctly.

    Args:
        made: the experience.
        limits: limits of the student.
        prompt: prompt of the task.
        draw: position in the sequence of prompts.
        run: number of the run.
        place: number of the experience in its run.
        step: number of the step. None means `place`.
        settings: settings of the run's calls (`RunState.settings`).
    """
    info, metrics = made.info or {}, {} if made.metrics is None else made.metrics  # may be None in Trinity-RFT
    for name, instead in UNREAD.items():
        if vars(made).get(name, info.get(name)) is not None:
            raise ValueError(f"Experience.{name} is not used in training; {instead}")
    tokens = made.tokens.cpu().numpy()
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TypeError(f"tokens should be integers [T], not {tokens.dtype} {list(tokens.shape)}")
    length = len(tokens) - made.prompt_length
    if made.prompt_length < 1 or length < 0:
        raise ValueError(f"prompt_length {made.prompt_length} of {len(tokens)} tokens: expected 1 to {len(tokens)}")
    if len(tokens) > limits.tokens:
        raise ValueError(f"{len(tokens)} tokens; the maximum of prompt and response together is {limits.tokens}")
    if not 0 <= tokens.min() <= tokens.max() < limits.vocabulary:
        raise ValueError(f"tokens from {tokens.min()} to {tokens.max()} exceed the vocabulary of {limits.vocabulary}")
    logprobs = _column(made.logprobs, "logprobs", length)
    given = _column(made._action_mask, "action_mask", length)
    mask = np.ones(length, bool) if given is None else given.astype(bool)
    teacher = _column(info.get(TEACHER), f"info[{TEACHER!r}]", length)
    if mask.any() and logprobs is None:
        raise ValueError(
            "logprobs of the tokens that the model wrote are missing; keep the values that `chat` returned"
        )
    if logprobs is not None and not np.isfinite(logprobs[mask]).all():
        raise ValueError("logprobs of tokens that the model wrote are not all finite")
    if teacher is not None and not np.isfinite(teacher[mask]).all():
        raise ValueError(f"info[{TEACHER!r}] of tokens that the model wrote are not all finite")
    reward = None if made.reward is None else float(made.reward)
    if reward is not None and not np.isfinite(reward):
        raise ValueError(f"the reward is {reward}")
    state = info.get(STATE)
    if state is not None and not isinstance(state, str):
        raise TypeError(f"info[{STATE!r}] should be a string, not {type(state).__name__}")
    turn_rewards = tuple(float(one) for one in info.get(TURN_REWARDS, ()))
    suffix = f".{place}" if place else ""
    group = _group(prompt, draw, made.eid.task)
    columns = as_columns(action_mask=mask, rollout_logprobs=None if logprobs is None else logprobs.astype(np.float32))
    used = settings_column(made.call_settings, settings, length)
    if used is not None:
        columns[CALL_SETTINGS] = used
    if teacher is not None:
        columns |= teacher_columns({TEACHER: teacher.astype(np.float32)})
    return Sample(
        tokens.astype(np.int64),
        made.prompt_length,
        columns,
        id=f"{group}/{run}{suffix}",
        group_id=group,
        run=run,
        step=place if step is None else int(step),
        state=state,
        tag=prompt.tag,
        finish_reason=made.finish_reason,
        versions=_versions(made.versions, length),
        reward=reward,
        turn_rewards=turn_rewards,
        metrics=_numbers(metrics),
    )


def _group(prompt: Prompt, draw: int, task: Any) -> str:
    """Return the group id of an experience.

    It consists of the prompt's id, the draw, and the kind of the experience if the workflow sets a kind.
    """
    kind = "" if task is None or str(task) in ("", str(prompt.id)) else ":" + str(task).replace("#", "%23")
    return f"{prompt.id}#{draw}{kind}"  # the part before the last # is the prompt's id


def _column(values: Any, name: str, length: int) -> np.ndarray | None:
    if values is None:
        return None
    array = torch.as_tensor(values).cpu().numpy()
    if array.shape != (length,):
        raise ValueError(f"{name} has shape {list(array.shape)}, expected [{length}] for a response of {length} tokens")
    return array


def _versions(versions: Versions, length: int) -> Versions:
    """Return the weight versions of a response.

    If the workflow has changed the length of the response, the versions are not known, so the result is empty.
    """
    return versions if sum(tokens for _, tokens in versions) == length else ()


def _numbers(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics should map names to numbers, not {type(metrics).__name__}")
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"metrics[{name!r}] is {str(value)[:40]!r}, expected a number") from None
    return numbers
