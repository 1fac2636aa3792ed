"""Prompts ready to sample from, and the endless, resumable order in which a run takes them.

The order of an epoch depends on the seed and the number of the epoch alone, so the whole state of a run's
data is one integer: how many prompts have been taken.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_opd.config.plan import DataPlan
from roll_opd.data.rows import DataError, Row
from roll_opd.data.templates import TEMPLATES, encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IDS_NAMED = 5  # prompts named in a report; the rest are only counted


@dataclass(frozen=True)
class Prompt:
    """A tokenised row. Two draws of one row in different epochs are the same `Prompt`."""

    id: str
    index: int  # position among the prompts of the data set
    tag: str
    tokens: np.ndarray = field(compare=False)  # int64 [P]
    ground_truth: str | None = None


@dataclass(frozen=True)
class PromptReport:
    """How many rows became prompts, and which did not fit or could not be encoded."""

    prompts: int
    prompt_length: int  # the limit, in tokens
    longest: int  # tokens of the longest row, dropped ones included
    too_long: int = 0
    too_long_ids: tuple[str, ...] = ()  # the first few
    unusable: int = 0  # rows that the template refuses or that have no token
    unusable_reasons: tuple[str, ...] = ()  # the first few

    def describe_bad(self) -> str:
        """The rows that are not prompts, one line a kind; empty where there are none."""
        lines = []
        if self.too_long:
            more = ", ..." if self.too_long > len(self.too_long_ids) else ""
            lines.append(
                f"  {self.too_long} x longer than prompt_length={self.prompt_length} tokens "
                f"(longest {self.longest}): {', '.join(self.too_long_ids)}{more}"
            )
        if self.unusable:
            lines.append(f"  {self.unusable} x not encodable: {'; '.join(self.unusable_reasons)}")
        return "\n".join(lines)

    def summary(self) -> str:
        """What to tell the user."""
        dropped = self.too_long + self.unusable
        text = f"{self.prompts} prompts, the longest row has {self.longest} tokens"
        return text if not dropped else f"{text}; {dropped} rows dropped:\n{self.describe_bad()}"


def build_prompts(
    rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", data: DataPlan
) -> tuple[list[Prompt], PromptReport]:
    """Tokenise `rows` with `data.template`, in order.

    Rows longer than `data.prompt_length` tokens are dropped or refused as `data.on_long_prompt` says; rows
    that the template refuses, or that come out empty, as `data.on_bad_row` says. Raises `DataError` on
    refusal, for an unknown template, and where no prompt is left.
    """
    if data.template not in TEMPLATES:
        raise DataError(f"unknown template {data.template!r}; known are {', '.join(sorted(TEMPLATES))}")
    prompts: list[Prompt] = []
    too_long: list[str] = []
    unusable: list[str] = []
    longest = 0
    for row in rows:
        try:
            tokens = encode_prompt(tokenizer, row, data.template)
        except DataError as error:
            unusable.append(str(error))
            continue
        longest = max(longest, len(tokens))
        if not tokens:
            unusable.append(f"row {row.id}: no token")
        elif len(tokens) > data.prompt_length:
            too_long.append(f"{row.id} ({len(tokens)})")
        else:
            array = np.asarray(tokens, dtype=np.int64)
            prompts.append(Prompt(row.id, len(prompts), row.tag, array, row.ground_truth))
    report = PromptReport(
        prompts=len(prompts),
        prompt_length=data.prompt_length,
        longest=longest,
        too_long=len(too_long),
        too_long_ids=tuple(too_long[:IDS_NAMED]),
        unusable=len(unusable),
        unusable_reasons=tuple(unusable[:IDS_NAMED]),
    )
    _refuse_if_asked(report, data)
    return prompts, report


def _refuse_if_asked(report: PromptReport, data: DataPlan) -> None:
    remedies = []
    if report.too_long and data.on_long_prompt == "refuse":
        remedies.append("raise `prompt_length` or set `on_long_prompt: drop`")
    if report.unusable and data.on_bad_row == "refuse":
        remedies.append("correct the rows that are not encodable or set `on_bad_row: drop`")
    if remedies:
        raise DataError(f"rows that cannot be prompts:\n{report.describe_bad()}\nTo go on, {' and '.join(remedies)}.")
    if not report.prompts:
        raise DataError(
            f"no row is left to sample from:\n{report.describe_bad()}\nCheck `prompt_length` and `template`."
        )


class PromptSource:
    """An endless stream of prompts: each epoch is a fresh permutation drawn from (seed, epoch).

    A batch that spans the end of an epoch may hold the same prompt twice; `position` before `take` numbers
    the draws uniquely over the whole run, where a unique name for each is needed.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise DataError("a prompt source needs at least one prompt")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._fingerprint = fingerprint(self._prompts)
        self._position = 0
        self._order: tuple[int, np.ndarray] | None = None  # (epoch, permutation), the newest one used

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._prompts)

    @property
    def position(self) -> int:
        """Prompts taken since the run began."""
        return self._position

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._position // len(self._prompts)

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts, on into the next epoch where this one ends."""
        batch = [self._at(position) for position in range(self._position, self._position + n)]
        self._position += n
        return batch

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the position, and what the order depends on (JSON types only)."""
        return {"position": self._position, "seed": self._seed, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state` exactly; `DataError` where the prompts or the seed are not those it was saved
        with.
        """
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                "the prompts are not the ones this run was saved with (a file, `limit`, `prompt_length`, the "
                "template or the tokenizer has changed), so it cannot go on from where it stopped. "
                "Restore them, or start a new run."
            )
        if state["seed"] != self._seed:
            raise DataError(
                f"the run was saved with seed {state['seed']} and is resumed with seed {self._seed}, which "
                f"gives another order of the prompts. Set `seed: {state['seed']}`, or start a new run."
            )
        self._position = state["position"]

    def _at(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self._prompts))
        if self._order is None or self._order[0] != epoch:
            generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            self._order = (epoch, generator.permutation(len(self._prompts)))
        return self._prompts[self._order[1][offset]]


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """A digest of the ids and tokens of `prompts`, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.id}\0{len(prompt.tokens)}\0".encode())
        digest.update(prompt.tokens.tobytes())
    return digest.hexdigest()
