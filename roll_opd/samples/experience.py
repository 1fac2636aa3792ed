"""`Experience`, the one currency of a run: a trajectory from rollout to train step.

Legend: T tokens in all, P prompt tokens. Position t of every [T-P] array speaks of token `tokens[P+t]`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll_opd.base.frozen import FrozenDict
from roll_opd.samples.training import TargetRef
from roll_opd.samples.versions import Versions


@dataclass(frozen=True)
class Experience:
    """One trajectory; numpy arrays on the CPU, so that it travels through Ray's object store without a copy.

    A stage that learns something new about it returns `changed(experience, ...)`.
    """

    id: str  # source row, draw, run, and step where its run has several
    group_id: str  # runs at one prompt, of one kind where a workflow makes several
    tag: str
    domain: str
    tokens: np.ndarray  # int64 [T]
    prompt_length: int  # P
    action_mask: np.ndarray  # bool [T-P], True where the student (or a demonstration) chose the token
    rollout_logprobs: (
        np.ndarray | None
    )  # f32 [T-P], of the sampling distribution, from the engine; None: nobody sampled
    finish_reason: str  # stop | length | abort
    versions: Versions = ()  # runs of (version of the weights, tokens) over [T-P]; None: tokens that were not sampled
    routes: np.ndarray | None = None  # integer [T-1, layers, K], the K experts of each token, from the engine
    run: int | None = None  # which of the runs at its prompt; None: one of its own
    step: int = 0  # which of the experiences of its run
    state: str | None = None  # digest of what its step began from, where the run says so
    demonstration: bool = False  # a row that brought its answer, which nobody sampled
    old_logprobs: np.ndarray | None = None  # f32 [T-P], same weights, training engine, sampling temperature
    teacher_prompts: dict[str, np.ndarray] = field(
        default_factory=dict
    )  # teacher -> int64 [its P], of those that read another prompt
    teacher_logprobs: dict[str, np.ndarray] = field(default_factory=dict)  # teacher -> f32 [T-P]
    teacher_targets: dict[str, TargetRef] = field(default_factory=dict)  # teacher -> more than log-probs
    ref_logprobs: np.ndarray | None = None  # f32 [T-P], of the frozen reference policy
    reward: float | None = None  # external reward, on the last action token
    turn_rewards: tuple[float, ...] = ()  # of each turn, from the environment; recorded only
    reward_parts: dict[str, float] = field(default_factory=dict)  # what it is made of, or was found beside it, by name
    reward_reason: str = ""  # why, in a word or two, where the reward worker says so
    excluded: bool = False  # its reward failed and nobody is to learn from it (`on_error: drop`)
    values: np.ndarray | None = None  # f32 [T-P], of the state before each token, from the critic
    returns: np.ndarray | None = None  # f64 [T-P], what the values are to become; 0 off the action mask
    advantages: np.ndarray | None = None  # f64 [T-P], of the external reward alone; 0 off the action mask
    loss_mask: np.ndarray | None = None  # bool [T-P], action tokens that are learned from; None: all
    importance_weights: np.ndarray | None = None  # f32 [T-P], of the policy loss; None: 1
    ground_truth: str | None = None
    extra: FrozenDict = field(default_factory=FrozenDict)  # the row's other keys, such as test_cases; for rewards
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def response_length(self) -> int:
        """Tokens after the prompt (T-P), observed ones included."""
        return len(self.tokens) - self.prompt_length

    def acted(self, values: np.ndarray) -> np.ndarray:
        """Return the entries of a [T-P, ...] array at action tokens, for means, shares and checks."""
        return values[self.action_mask]

    def without_observed(self, values: np.ndarray) -> np.ndarray:
        """Return a floating [T-P] array with NaN at observed tokens, for records."""
        return values if self.action_mask.all() else np.where(self.action_mask, values, values.dtype.type(np.nan))

    @property
    def action_tokens(self) -> int:
        """Number of tokens that the student generated, or of a demonstration's answer."""
        return int(np.count_nonzero(self.action_mask))

    @property
    def learned_tokens(self) -> int:
        """Number of action tokens in the loss."""
        if self.excluded:
            return 0
        mask = self.action_mask if self.loss_mask is None else self.action_mask & self.loss_mask
        return int(np.count_nonzero(mask))

    @property
    def is_learned_from(self) -> bool:
        """Whether any token is in the loss."""
        return not self.excluded and (self.loss_mask is None or bool(self.loss_mask.any()))

    @property
    def is_of_a_kind(self) -> bool:
        """Whether its workflow makes several kinds; `group_id` then names this one behind the number of the draw."""
        return ":" in self.group_id.rpartition("#")[2]

    @property
    def difficulty(self) -> float | None:
        """The row's own `difficulty`; None where it has none that is a number."""
        value = self.extra.get("difficulty")
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def prompt_tokens(self) -> np.ndarray:
        """int64 [P]."""
        return self.tokens[: self.prompt_length]

    @property
    def response_tokens(self) -> np.ndarray:
        """int64 [T-P]."""
        return self.tokens[self.prompt_length :]

    @property
    def student_logprobs(self) -> np.ndarray:
        """f32 [T-P], from the training engine, or from the inference engine where that has not computed them."""
        return present(self.rollout_logprobs if self.old_logprobs is None else self.old_logprobs)


def supervised_samples(rows: Iterable[tuple[np.ndarray, tuple[np.ndarray, ...]]]) -> list[Experience]:
    """Return one sample for each answer of (prompt, answers) in tokens; the loss covers every token of the answer."""
    return [
        Experience(
            id=f"{row}/{number}",
            group_id=str(row),
            tag="",
            domain="",
            tokens=np.concatenate([prompt, answer]),
            prompt_length=len(prompt),
            action_mask=np.ones(len(answer), dtype=bool),
            rollout_logprobs=None,
            finish_reason="stop",
        )
        for row, (prompt, answers) in enumerate(rows)
        for number, answer in enumerate(answers)
    ]


def changed(experience: Experience, **news: Any) -> Experience:
    """Return `experience` with new values of some fields.

    It is `dataclasses.replace` at a tenth of its price, which a step pays some times for each of its samples.
    """
    if not news.keys() <= experience.__dict__.keys():
        raise TypeError(f"an Experience has no {', '.join(sorted(news.keys() - experience.__dict__.keys()))}")
    made = object.__new__(Experience)
    made.__dict__.update(experience.__dict__, **news)
    return made


def one_a_run(experiences: Sequence[Experience], *, returns: bool = False) -> list[Experience]:
    """Return the first experience of each run, with the mean reward of them all; what has no run is one of its own.

    With `returns` a run whose every step says its state has their sum: the rewards are then each step's own, and not
    the run's, said once for each.
    """
    steps: dict[tuple[str, int], list[Experience]] = {}
    for number, experience in enumerate(experiences):
        run = -1 - number if experience.run is None else experience.run
        steps.setdefault((experience.group_id, run), []).append(experience)
    if len(steps) == len(experiences):
        return list(experiences)
    found = []
    for run_steps in steps.values():
        rewards = [step.reward for step in run_steps if step.reward is not None]
        count = 1 if returns and all(step.state is not None for step in run_steps) else len(rewards)
        found.append(changed(run_steps[0], reward=sum(rewards) / count if rewards else None))
    return found


def present(array: np.ndarray | None) -> np.ndarray:
    """Return an optional array that an earlier stage has filled in."""
    assert array is not None
    return array
