"""What follows from the rows of a ledger: the draws that are used up after each step, and the settings of each step.

Compare the logged samples of a run with its ledger, its prompts and its metrics.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

from roll_opd.rollout.staleness import Pace
from roll_opd.tracking.audit_records import Evidence, LedgerRow, LoggedSample, PartSettings
from roll_opd.tracking.run_directory import LEDGER, METRICS, PROMPTS, SAMPLES
from roll_opd.tracking.summary import GENERATED_TOKENS, STEP_TOKENS

IDS = {"trained": "ids"}  # fate -> key of prompts.jsonl, where it has another name
MAX_GROUPS = 10**5  # per batch; more are not plausible


@dataclass
class Done:
    """Draws that are used up: those below `position` except `undone`, and those in `later`."""

    position: int = 0
    later: set[int] = field(default_factory=set)
    undone: set[int] = field(default_factory=set)

    def __contains__(self, draw: int) -> bool:
        return draw in self.later or (draw < self.position and draw not in self.undone)

    @property
    def first_open(self) -> int:
        """The smallest draw that is not used up."""
        return min(self.undone, default=self.position)

    def add(self, draw: int) -> None:
        self.undone.discard(draw)
        if draw >= self.position:
            self.later.add(draw)
        while self.position in self.later:
            self.later.remove(self.position)
            self.position += 1

    def holes(self, below: int) -> int:
        """Return the number of draws below `below` that are not used up."""
        open_draws = sum(draw < below for draw in self.undone)
        return open_draws + max(0, below - self.position - sum(draw < below for draw in self.later))

    def copy(self) -> "Done":
        return Done(self.position, set(self.later), set(self.undone))


@dataclass(frozen=True)
class Facts:
    """The evidence, and what follows from the ledger's rows."""

    found: Evidence
    rows: Sequence[LedgerRow]
    parts: Sequence[PartSettings] | None
    start: Done | None  # draws before the first row; None: unknown, as for a run from another run's checkpoint
    after: Mapping[int, Done]  # step of a checkpoint -> draws
    open_draws: Mapping[int, int]  # step -> smallest draw that is not used up
    holes: int  # draws below the last one that are not used up
    drawn: Sequence[str] | str  # ids of the first prompts in the data files, or why they are unknown

    @classmethod
    def of(cls, found: Evidence, rows: Sequence[LedgerRow], drawn: Sequence[str] | str) -> "Facts":
        start = _start(found, rows)
        after, open_draws, done = {}, {}, (start or Done()).copy()
        if start and rows and rows[0].step - 1 in found.states:
            after[rows[0].step - 1] = done.copy()
        for row in rows:
            for draw in row.draws:
                done.add(draw)
            open_draws[row.step] = done.first_open
            if row.step in found.states:
                after[row.step] = done.copy()
        largest = max((draw for row in rows for draw in row.draws), default=-1)
        return cls(found, rows, found.parts, start, after, open_draws, done.holes(largest) if start else 0, drawn)

    def part(self, step: int) -> PartSettings | None:
        """Return the part of the run that has `step`; None if it is unknown."""
        return next((part for part in reversed(self.parts or ()) if part.first <= step), None)

    def bound(self, step: int) -> int | None:
        """Return `async_generation_ratio` in a step; None if neither the settings nor a later checkpoint have it."""
        part = self.part(step)
        if part is not None:
            return part.bound
        saved = min((saved for saved in self.found.states if saved >= step), default=None)
        bounds = () if saved is None else self.found.states[saved].bounds
        return next((bound for first, bound in reversed(bounds) if first <= step), None)

    def window(self, row: LedgerRow) -> int | None:
        """Return the largest window in which a group may overtake older ones; None if it is unknown.

        Failed prompts hide the exact number of groups per batch, so all numbers up to `groups` are tried.
        """
        part = self.part(row.step)
        if part is None or part.bound is None:
            return None
        return _window(min(self.groups, MAX_GROUPS), part.bound, part.depth)

    @property
    def ids(self) -> Iterator[tuple[int, str]]:
        """Yield (draw, id of its prompt)."""
        for row in self.rows:
            ids = (self.found.prompts or {}).get(row.step, {})
            for fate, draws in row.fates.items():
                yield from zip(draws, ids.get(IDS.get(fate, fate), ()), strict=False)

    @cached_property
    def groups(self) -> int:
        """The largest number of trained and failed draws in a row: at least the number of groups per batch."""
        return max((len(row.fates["trained"]) + len(row.fates.get("failed", ())) for row in self.rows), default=0)


@cache
def _window(groups: int, bound: int, depth: int | None) -> int | None:
    try:
        return max(Pace.of(number, bound, depth).window for number in range(1, groups + 1)) if groups else None
    except ValueError:
        return None


def _start(found: Evidence, rows: Sequence[LedgerRow]) -> Done | None:
    """Return the draws that were used up before the first row."""
    if not rows or rows[0].step == 1:
        return Done()
    first = rows[0].step
    step = min((step for step in found.states if first - 1 <= step <= rows[-1].step), default=None)
    if step is None:
        return None
    state, own = found.states[step], {draw for row in rows if row.step <= step for draw in row.draws}
    return Done(state.position, set(state.passed - own), {draw for draw in own if draw < state.position})


def compare_samples(facts: Facts) -> Iterator[str]:
    """Yield the contradictions between logged samples and the other files."""
    assert facts.found.samples is not None
    ids = dict(facts.ids)
    for row in facts.rows:
        logged = facts.found.samples.get(row.step, ())
        sampled = [sample for sample in logged if not sample.demonstration and sample.prompt is not None]
        versions = dict(zip(row.fates["trained"], row.versions, strict=False))
        kept = {*row.fates["trained"], *row.fates.get("failed", ())}
        bound, version = facts.bound(row.step), row.step - 1
        for sample in sampled:
            if sample.draw not in kept:
                yield f"step {row.step}: {SAMPLES} has a sample of draw {sample.draw}, but {LEDGER} has not trained it"
                continue
            if ids.get(sample.draw, sample.prompt) != sample.prompt:
                yield (
                    f"step {row.step}: draw {sample.draw} is the prompt {sample.prompt!r} in {SAMPLES}, but"
                    f" {ids[sample.draw]!r} in {PROMPTS}"
                )
            if sample.versions is None:
                continue
            oldest, newest = sample.versions
            known = versions.get(sample.draw)
            if known and not known[0] <= oldest <= newest <= known[1]:
                yield (
                    f"step {row.step}: draw {sample.draw} was sampled with versions {oldest} to {newest} in {SAMPLES},"
                    f" but with {known[0]} to {known[1]} in {LEDGER}"
                )
            elif newest > version:
                yield f"step {row.step} trained on a sample of draw {sample.draw} of a later version, {newest}"
            elif bound is not None and version - oldest > bound:
                yield (
                    f"step {row.step}: a sample of draw {sample.draw} has age {version - oldest}, but"
                    f" async_generation_ratio was {bound}"
                )
        yield from _tokens(facts, row, logged)


def _tokens(facts: Facts, row: LedgerRow, logged: Sequence[LoggedSample]) -> Iterator[str]:
    """Compare the logged samples of a step with its metrics. If all samples are logged, the counts are equal."""
    metrics, part = (facts.found.metrics or {}).get(row.step, {}), facts.part(row.step)
    sampled = [sample for sample in logged if not sample.demonstration]
    is_whole = bool(
        part
        and part.samples
        and not row.fates.get("failed")
        and len(logged) == len(sampled) == len(row.fates["trained"]) * part.samples
    )
    sums = {STEP_TOKENS: sum(sample.tokens for sample in logged)}
    sums[GENERATED_TOKENS] = sum(sample.actions for sample in sampled)
    for name, tokens in sums.items():
        counted = metrics.get(name)
        is_equal = is_whole and not (name == GENERATED_TOKENS and row.fates["filtered"])
        if counted is not None and (tokens > counted or (is_equal and tokens != counted)):
            yield f"step {row.step}: {SAMPLES} has {tokens} tokens, but {METRICS} has {counted:g} ({name})"
    if is_whole and part:
        of_draws: dict[int, list[LoggedSample]] = {}
        for sample in sampled:
            of_draws.setdefault(sample.draw, []).append(sample)
        for draw, of_draw in of_draws.items():
            if len(of_draw) != part.samples:
                count = len(of_draw)
                yield f"step {row.step}: draw {draw} has {count} samples in {SAMPLES}, but {part.samples} were sampled"
        for draw, known in zip(row.fates["trained"], row.versions, strict=False):
            pairs = [sample.versions for sample in of_draws.get(draw, ()) if sample.versions]
            if pairs and known != (min(first for first, _ in pairs), max(last for _, last in pairs)):
                yield f"step {row.step}: the versions of draw {draw} in {LEDGER} are not those of its samples"
