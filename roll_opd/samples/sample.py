"""`Sample`: one sequence, on its way from the engine's answer to the loss.

On the driver, a sample has all of its fields. In a rank's shard, a sample has only the fields that a forward pass or a
loss reads: tokens, prompt length, routes and columns (`shard_sample`).

Columns are arrays over the response: entry t of a column belongs to token `tokens[P+t]`. A stage sets a column of a
whole batch with `with_columns`. The columns in a shard are those of `objective.columns`, and the teachers' targets
(`TargetRef`).

Legend: T tokens in all, P prompt tokens, M tokens of a batch, concatenated, L layers with experts, K experts per token.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np

from roll_opd.base.frozen import FrozenDict
from roll_opd.samples.byte_alignment import NO_CHUNK, Alignment
from roll_opd.samples.versions import Versions

_LOGPROBS = "/logprobs"
CHUNKS = "/chunks"  # suffix of the columns that hold chunks


def as_columns(**arrays: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return a map from column names to arrays. Arrays that are None are left out."""
    return {name: array for name, array in arrays.items() if array is not None}


def logprobs_column(teacher: str) -> str:
    """Return the name of the column that holds a teacher's log-probs."""
    return teacher + _LOGPROBS


def teacher_columns(logprobs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the log-prob columns of teachers: a map from column names to arrays.

    Args:
        logprobs: map from teacher names to log-probs.
    """
    return {logprobs_column(name): array for name, array in logprobs.items()}


def chunks_column(teacher: str) -> str:
    """Return the name of the column that holds the chunks of a teacher with another tokenizer."""
    return teacher + CHUNKS


def teacher_logprobs(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a map from teacher names to log-probs, taken from the columns `TEACHER/logprobs` in their order."""
    return {name.removesuffix(_LOGPROBS): array for name, array in columns.items() if name.endswith(_LOGPROBS)}


def end_to_end(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """Return the concatenation [M] of the samples' arrays [T-P]. The result is empty if there are no samples."""
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def picked(values_M: np.ndarray, mask_M: np.ndarray) -> np.ndarray:
    """Return the values at which the mask is true. If the mask is true everywhere, the values are not copied."""
    return values_M if mask_M.all() else values_M[mask_M]


_EMPTY = FrozenDict()  # one object shared by all samples, so that pickling stores it once


def _empty() -> FrozenDict:
    return _EMPTY


@dataclass
class TargetRef:
    """A reference to a teacher's targets for one sample.

    The arrays of the targets are in the object store of the host that computed them.

    For top-k targets, the arrays are:
    - `topk_ids`: int32 [T-P, K].
    - `topk_logprobs`: f32 [T-P, K].
    - `topk_rest`: f32 [T-P], the log-prob of all other tokens together.

    For targets over the whole vocabulary, the only array is:
    - `hidden`: [T-P, F], the final hidden states. A bf16 array is stored as int16 (see `samples.transport`).

    The student's ranks apply the teacher's output head to the hidden states.
    """

    bundle: Any  # a reference to the arrays of several samples; None after they were released
    place: int  # index of the sample in the bundle
    columns: Mapping[str, tuple[str, tuple[int, ...]]]  # name -> (dtype, shape) of one token's entry
    hits: np.ndarray | None = None  # bool [T-P], true for sampled tokens that are in the top-k; for records

    def for_ranks(self) -> "TargetRef":
        """Return a copy of the reference without `hits`. The copy is sent to the ranks that fetch the arrays."""
        return replace(self, hits=None)

    def released(self) -> None:
        """Drop the reference to the arrays, so that the object store can free them."""
        self.bundle = None


@dataclass(frozen=True)
class Sample:
    """One immutable sequence with its columns, which the properties below describe.

    All arrays are NumPy arrays on the CPU, so that they can travel through Ray's object store. A stage returns new
    samples. It sets arrays over the response with `with_columns(samples, ...)`, and fields with `changed(sample, ...)`.
    """

    tokens: np.ndarray  # int64 [T]
    prompt_length: int  # P >= 1
    columns: Mapping[str, np.ndarray] = field(default_factory=_empty)  # each [T-P] or [T-P, K]
    # integer [T-1, L, K], the experts that the engine chose for each token in each layer
    routes: np.ndarray | None = None
    _: KW_ONLY
    id: str = ""  # source row, draw, run, and the step of a multi-step run
    group_id: str = ""  # identifies runs of the same prompt (and kind, if a workflow makes several kinds)
    tag: str = ""
    domain: str = ""
    finish_reason: str = "stop"  # stop | length | abort
    versions: Versions = ()  # runs of (version of the weights, tokens) over [T-P]; None: tokens that were not sampled
    run: int | None = None  # number of the run among the runs of its prompt; None: the sample is a separate run
    step: int = 0  # number of the sample among the samples of its run
    state: str | None = None  # digest of the environment's state before the sample's step, if known
    demonstration: bool = False  # whether the answer comes from a row and was not sampled
    # teacher -> int64 [P], for teachers with another prompt
    teacher_prompts: Mapping[str, np.ndarray] = field(default_factory=_empty)
    # teacher -> targets in addition to log-probs
    teacher_targets: Mapping[str, TargetRef] = field(default_factory=_empty)
    # teacher with another tokenizer -> alignment with its tokens
    alignments: Mapping[str, Alignment] = field(default_factory=_empty)
    reward: float | None = None  # external reward, on the last action token
    turn_rewards: tuple[float, ...] = ()  # rewards of the environment for each turn; only recorded
    reward_parts: Mapping[str, float] = field(default_factory=_empty)  # terms of the reward and further values, by name
    reward_reason: str = ""  # reason of the reward, in a word or two
    # whether the sample is excluded from the update because its reward failed (`on_error: drop`)
    excluded: bool = False
    ground_truth: str | None = None
    extra: FrozenDict = field(default_factory=_empty)  # other keys of the row, such as test_cases; for rewards
    metrics: Mapping[str, float] = field(default_factory=_empty)

    @property
    def action_mask(self) -> np.ndarray:
        """bool [T-P], true for tokens that the student sampled and for tokens of a demonstration's answer."""
        return self.columns["action_mask"]

    @property
    def rollout_logprobs(self) -> np.ndarray | None:
        """f32 [T-P], log-probs of the inference engine. None if they are not set."""
        return self.columns.get("rollout_logprobs")

    @property
    def old_logprobs(self) -> np.ndarray | None:
        """f32 [T-P], log-probs of the training engine before the update. None if they are not set."""
        return self.columns.get("old_logprobs")

    @property
    def ref_logprobs(self) -> np.ndarray | None:
        """f32 [T-P], log-probs of the reference policy. None if they are not set."""
        return self.columns.get("ref_logprobs")

    @property
    def teacher_logprobs(self) -> dict[str, np.ndarray]:
        """Map from each teacher's name to its log-probs, f32 [T-P]."""
        return teacher_logprobs(self.columns)

    @property
    def values(self) -> np.ndarray | None:
        """f32 [T-P], the critic's values. None if they are not set."""
        return self.columns.get("values")

    @property
    def returns(self) -> np.ndarray | None:
        """f64 [T-P], the training targets of the critic."""
        return self.columns.get("returns")

    @property
    def advantages(self) -> np.ndarray | None:
        """f64 [T-P], computed from the external reward only, without the part of the teachers."""
        return self.columns.get("advantages")

    @property
    def loss_mask(self) -> np.ndarray | None:
        """bool [T-P]. If None, all action tokens are in the loss."""
        return self.columns.get("loss_mask")

    @property
    def importance_weights(self) -> np.ndarray | None:
        """f32 [T-P]. If None, all weights are 1."""
        return self.columns.get("importance_weights")

    @property
    def total_advantages(self) -> np.ndarray:
        """f32 [T-P], the advantages of the update, with the part of the teachers; 0 at observed tokens."""
        return self.columns["total_advantages"]

    @property
    def reverse_kl(self) -> np.ndarray:
        """f32 [T-P], Σ opd_kl_coef · reverse_kl of the update, over the teachers; 0 at observed tokens."""
        return self.columns["reverse_kl"]

    @property
    def student_logprobs(self) -> np.ndarray:
        """f32 [T-P], log-probs of the training engine if they are set, otherwise log-probs of the inference engine."""
        return present(self.rollout_logprobs if self.old_logprobs is None else self.old_logprobs)

    @property
    def prompt_tokens(self) -> np.ndarray:
        """int64 [P], the tokens of the prompt."""
        return self.tokens[: self.prompt_length]

    @property
    def response_tokens(self) -> np.ndarray:
        """int64 [T-P], the tokens after the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt, T-P. Observed tokens are included."""
        return len(self.tokens) - self.prompt_length

    @property
    def action_tokens(self) -> int:
        """Number of tokens that the student generated. For a demonstration, the number of tokens in its answer."""
        return int(np.count_nonzero(self.action_mask))

    @property
    def in_loss(self) -> np.ndarray:
        """bool [T-P], true for tokens in the loss: `loss_mask` if it is set, otherwise all action tokens."""
        mask = self.loss_mask
        return self.action_mask if mask is None else mask

    @property
    def learned_tokens(self) -> int:
        """Number of action tokens in the loss. It is 0 for an excluded sample."""
        return 0 if self.excluded else int(np.count_nonzero(self.action_mask & self.in_loss))

    @property
    def is_learned_from(self) -> bool:
        """Whether at least one token is in the loss."""
        return not self.excluded and (self.loss_mask is None or bool(self.loss_mask.any()))

    @property
    def is_of_a_kind(self) -> bool:
        """Whether the workflow makes several kinds of samples. If so, `group_id` ends with the draw and the kind."""
        return ":" in self.group_id.rpartition("#")[2]

    @property
    def difficulty(self) -> float | None:
        """The value `difficulty` of the row, or None if it is not a number."""
        value = self.extra.get("difficulty")
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def taught_by(self, teacher: str) -> np.ndarray:
        """Return a mask of the action tokens for which a teacher has a log-prob, bool [T-P]."""
        chunks = self.columns.get(chunks_column(teacher))
        return self.action_mask if chunks is None else self.action_mask & (chunks != NO_CHUNK)

    def acted(self, values: np.ndarray) -> np.ndarray:
        """Return the entries of an array [T-P, ...] at the action tokens."""
        return values[self.action_mask]

    def without_observed(self, values: np.ndarray) -> np.ndarray:
        """Return an array [T-P] with NaN at observed tokens, for records. Its dtype must be a floating-point type."""
        return values if self.action_mask.all() else np.where(self.action_mask, values, values.dtype.type(np.nan))

    def with_columns(self, **arrays: np.ndarray | None) -> "Sample":
        """Return the sample with new values of some columns. The value None removes a column."""
        columns = {**self.columns, **arrays}
        return changed(self, columns={name: array for name, array in columns.items() if array is not None})

    def empty(self) -> "Sample":
        """Return a sample with the same columns but without response tokens.

        It is a template: it has the names, dtypes and trailing dimensions of the arrays.
        """
        columns = {name: values[:0] for name, values in self.columns.items()}
        return Sample(self.tokens[:1], 1, columns, None if self.routes is None else self.routes[:0])


def changed(sample: Sample, **fields: Any) -> Sample:
    """Return a copy of the sample with new values of some fields.

    This function does the same as `dataclasses.replace` but is ten times as fast. A step calls it several times per
    sample.
    """
    if not fields.keys() <= sample.__dict__.keys():
        unknown = ", ".join(sorted(fields.keys() - sample.__dict__.keys()))
        raise TypeError(f"Sample has no field {unknown}; use with_columns to set arrays over the response")
    made = object.__new__(Sample)
    made.__dict__.update(sample.__dict__, **fields)
    return made


def with_columns(samples: Sequence[Sample], **columns: Iterable[np.ndarray]) -> list[Sample]:
    """Return the samples with additional columns.

    Args:
        columns: for each column name, one array per sample.
    """
    rows = zip(*columns.values(), strict=True)
    return [
        changed(sample, columns={**sample.columns, **dict(zip(columns, row, strict=True))})
        for sample, row in zip(samples, rows, strict=True)
    ]


def shard_sample(sample: Sample, *, routed: bool = False) -> Sample:
    """Return a sample with only the fields that a forward pass reads.

    The fields are the tokens and the prompt length, and also the routes if `routed` is true.
    """
    return Sample(sample.tokens, sample.prompt_length, {}, sample.routes if routed else None)


def one_a_run(samples: Sequence[Sample], *, returns: bool = False) -> list[Sample]:
    """Return the first sample of each run, with the reward of the run.

    The reward of a run is the mean of the rewards of its samples, because each sample has a copy of the run's reward.
    If `returns` is true and all samples of the run have a state, each sample is a step with a separate reward. The
    reward of the run is then the sum of these rewards.
    """
    steps: dict[tuple[str, int], list[Sample]] = {}
    for number, sample in enumerate(samples):
        run = -1 - number if sample.run is None else sample.run
        steps.setdefault((sample.group_id, run), []).append(sample)
    if len(steps) == len(samples):
        return list(samples)
    found = []
    for run_steps in steps.values():
        rewards = [step.reward for step in run_steps if step.reward is not None]
        count = 1 if returns and all(step.state is not None for step in run_steps) else len(rewards)
        found.append(changed(run_steps[0], reward=sum(rewards) / count if rewards else None))
    return found


def present(array: np.ndarray | None) -> np.ndarray:
    """Return `array`, which must not be None: an earlier stage must have set it."""
    assert array is not None
    return array
