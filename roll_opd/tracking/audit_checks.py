"""Compare the ledger of a run with all other files of its directory. Each check yields contradictions, as sentences.

A legal run has none of them: it may be killed, resumed, resumed with other settings, or continue from the checkpoint of
another run. In every step, a run writes its samples, its row of the ledger, its prompts and its metrics, in this order.
So a killed run may lack at most the last rows of the later files.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, groupby, islice, pairwise
from typing import Any

from roll_opd.tracking.audit_facts import IDS, Done, Facts, compare_samples
from roll_opd.tracking.audit_records import Evidence, SourcePosition, steps_of
from roll_opd.tracking.ledger import ledger_checksum
from roll_opd.tracking.run_directory import LEDGER, METRICS, PROMPTS, RUN_FACTS, SAMPLES
from roll_opd.tracking.summary import FAILED_PROMPTS, summarize

EPOCH = "data/epoch"
# metric -> fate; a step without failures has no metric of them
COUNTS = {"rollout/filtered_prompts": "filtered", FAILED_PROMPTS: "failed"}
LARGEST_AGE = "rollout/async/age_max"
TIMES = ("wall_seconds", "startup_seconds", "last_startup_seconds", "phase_seconds")  # they may have other sums
SHOWN = 3  # draws in a sentence
MAX_PROMPTS = 10**8  # the order of a larger set is not computed


@dataclass(frozen=True)
class Comparison:
    """A comparison. It needs files, by their name, and parts of the facts that may be unknown."""

    what: str
    errors: Callable[[Facts], Iterator[str]]
    needs: tuple[str, ...] = ()  # fields of the evidence, and keys of `UNKNOWN`

    def lacks(self, facts: Facts) -> str | None:
        """Return the reason why the check cannot be made, or None."""
        absent = [FILES[name] for name in self.needs if name in FILES and getattr(facts.found, name) is None]
        if absent:
            return f"{' and '.join(absent)} cannot be read or is missing"
        if "drawn" in self.needs and isinstance(facts.drawn, str):
            return facts.drawn
        unknown = (reason for name, (known, reason) in UNKNOWN.items() if name in self.needs and not known(facts))
        return next(unknown, None)


FILES = {
    "ledger": LEDGER,
    "metrics": METRICS,
    "prompts": PROMPTS,
    "samples": SAMPLES,
    "facts": RUN_FACTS,
    "config": "config.yaml",
    "summary": "summary.json",
}
# what follows from several files -> whether it is known, and why not
UNKNOWN: dict[str, tuple[Callable[[Facts], Any], str]] = {
    "parts": (
        lambda facts: facts.parts,
        f"{RUN_FACTS} or config.yaml is missing, damaged or of another start, so the settings are unknown",
    ),
    "bounds": (
        lambda facts: facts.parts or any(state.bounds for state in facts.found.states.values()),
        "neither the settings of the run nor a checkpoint are known",
    ),
    "start": (
        lambda facts: facts.start is not None,
        "the run continues from another run's checkpoint, and it has saved no checkpoint",
    ),
    "order": (lambda facts: _order_of(facts.found), "no checkpoint has the seed and the number of prompts"),
    "checksum": (
        lambda facts: facts.found.config or (facts.found.is_config_foreign and facts.found.is_ended),
        "config.yaml is missing, damaged or of another start, as after a kill during a resume",
    ),
    "end": (
        lambda facts: facts.found.is_ended,
        f"summary.json is of an earlier start than {RUN_FACTS} or of an earlier version, or a resume was killed",
    ),
}


def _chain(facts: Facts) -> Iterator[str]:
    last = 0
    for number, row in enumerate(facts.rows, 1):
        last = ledger_checksum(row.content, last)
        if last != row.checksum:
            yield f"row {number} (step {row.step}) has a wrong checksum: a row was changed or removed"
            last = row.checksum
        if row.run is not None and number > 1:
            yield f"row {number} (step {row.step}) is the first row of run {row.run!r}: two ledgers were joined"


def _identity(facts: Facts) -> Iterator[str]:
    assert facts.found.facts is not None
    own, of_ledger = facts.found.facts.get("id"), facts.rows[0].run if facts.rows else None
    if facts.rows and own != of_ledger:
        yield f"{LEDGER} is of the run {of_ledger!r}, but {RUN_FACTS} is of the run {own!r}"


def _steps(facts: Facts) -> Iterator[str]:
    found = facts.found
    steps: dict[str, list[int]] = {} if found.ledger is None else {LEDGER: [row.step for row in found.ledger]}
    steps |= {} if found.prompts is None else {PROMPTS: steps_of(found.prompts)}
    steps |= {} if found.metrics is None else {METRICS: steps_of(found.metrics)}
    for name, of_file in steps.items():
        unwritten = found.unwritten if name == METRICS else ()
        for before, step in pairwise(of_file):
            if step - before != 1 + sum(before < lost < step for lost in unwritten):
                yield f"{name}: step {step} follows step {before}"
    written = [of_file for of_file in steps.values() if of_file]
    if not written:
        yield from _without_steps(found)
        return
    first = min(min(of_file) for of_file in written)
    if found.metrics and 0 in found.metrics and first > 1:
        yield f"the first step is {first}, but {METRICS} has the state before step 1: earlier steps are missing"
    elif first > 1 and found.config is not None and not found.config.get("resume_from_checkpoint"):
        yield f"the first step is {first}, but the run has not been resumed: earlier steps are missing"
    for name, of_file in steps.items():
        if of_file and min(of_file) > first:
            yield f"{name} begins with step {min(of_file)}, but the run has step {first}: its first rows are missing"
    yield from _ends(facts, {name: max(of_file, default=first - 1) for name, of_file in steps.items()})


def _without_steps(found: Evidence) -> Iterator[str]:
    """Compare a run whose files have no step with its checkpoints and its summary."""
    newest, ended = max(found.states, default=0), (found.summary or {}).get("steps")
    if newest and found.config is not None and not found.config.get("resume_from_checkpoint"):
        yield f"no file has a step, but the run has the checkpoint of step {newest}"
    if ended and found.is_ended:
        yield f"no file has a step, but summary.json has {ended} steps"


def _ends(facts: Facts, ends: Mapping[str, int]) -> Iterator[str]:
    """Compare the last steps of the files. `ends` has the last step of each file that the run has."""
    found, newest = facts.found, max(facts.found.states, default=0)
    order = [name for name in (LEDGER, PROMPTS, METRICS) if name in ends]
    for place, name in enumerate(order):
        later = {other: ends[other] for other in order[place + 1 :]} | {f"the checkpoint of step {newest}": newest}
        other = max(later, key=lambda other: later[other])
        if ends[name] < later[other]:
            yield f"{name} ends with step {ends[name]}, but {other} has step {later[other]}: its last rows are missing"
            return
    first = order[0]
    for name in order[1:]:
        behind = ends[first] - ends[name]
        waits = name == METRICS and (found.config is None or bool(found.config.get("validation_engines")))
        behind -= sum(step > ends[name] for step in found.unwritten) if name == METRICS else 0
        is_truncated = ends[name] == newest > 0  # killed while it resumed
        if behind > 0 and (found.is_ended or not (behind == 1 or waits or is_truncated)):
            yield f"{name} ends with step {ends[name]}, but {first} has step {ends[first]}: its last rows are missing"
    last_sample, config = max(found.samples or {}, default=0), found.config or {}
    if last_sample > ends[first] + (not found.is_ended):
        yield f"{first} ends with step {ends[first]}, but {SAMPLES} has step {last_sample}: its last rows are missing"
    logs_samples = last_sample and found.config is not None and config.get("logged_samples_per_step") != 0
    if first == LEDGER and logs_samples and last_sample < ends[first] and not {last_sample, ends[first]} & {newest}:
        yield f"{SAMPLES} ends with step {last_sample}, but {LEDGER} has step {ends[first]}"
    last = facts.parts[-1] if facts.parts else None
    if last and last.max_steps and facts.rows and _ends_at_max_steps(found):
        if found.is_ended and ends[first] < last.max_steps:
            yield f"{first} ends with step {ends[first]}, but the run has ended after step {last.max_steps} (max_steps)"
        if ends[first] > max(last.max_steps, last.first - 1):
            yield f"{first} ends with step {ends[first]}, but the run has only {last.max_steps} steps (max_steps)"


def _ends_at_max_steps(found: Evidence) -> bool:
    """Whether the loop of the run is one of this package: a loop of the user may end earlier."""
    return "." not in str((found.facts or {}).get("pipeline", "."))


def _once(facts: Facts) -> Iterator[str]:
    times = Counter(draw for row in facts.rows for draw in row.draws)
    yield from (f"draw {draw} occurs {count} times" for draw, count in sorted(times.items()) if count > 1)
    if facts.start:
        for row in facts.rows:
            yield from (
                f"draw {draw} of step {row.step} was used up before step {facts.rows[0].step}"
                for draw in row.draws
                if draw in facts.start
            )


def _prompts(facts: Facts) -> Iterator[str]:
    assert facts.found.prompts is not None
    for row in facts.rows:
        ids = facts.found.prompts.get(row.step)
        if ids is None:
            continue  # `_steps` compares the steps
        for fate, draws in row.fates.items():
            named = ids.get(IDS.get(fate, fate), [])
            if len(named) != len(draws):
                yield f"step {row.step}: {LEDGER} has {len(draws)} {fate} draws, but {PROMPTS} has {len(named)} ids"


def _same_prompts(facts: Facts) -> Iterator[str]:
    """Compare the ids of the prompts with the order in which the seed draws them."""
    from roll_opd.data.prompt_source import epoch_order

    seed, size = _order_of(facts.found) or (0, 1)
    known = sorted(facts.ids)
    id_of: dict[int, str] = {}
    number_of: dict[str, int] = {}
    for epoch, of_epoch in groupby(known, lambda pair: pair[0] // size):
        order = epoch_order(seed, epoch, 0, size)
        for draw, name in of_epoch:
            number = int(order[draw % size])
            if id_of.setdefault(number, name) != name:
                yield f"draw {draw} is the prompt {name!r}, but another epoch has {id_of[number]!r} in its place"
            elif number_of.setdefault(name, number) != number:
                yield f"draw {draw} is the prompt {name!r}, but this prompt has another place in the order of the seed"


def _data(facts: Facts) -> Iterator[str]:
    for draw, name in facts.ids:
        if draw < len(facts.drawn) and name != facts.drawn[draw]:
            yield f"draw {draw} is the prompt {name!r} in {PROMPTS}, but {facts.drawn[draw]!r} in the data files"


def _order_of(found: Evidence) -> tuple[int, int] | None:
    """Return the seed and the number of prompts of a run that draws its prompts from a single stream, or None."""
    known = ((state.seed, state.size) for state in found.states.values())
    return next(((seed, size) for seed, size in known if seed is not None and size and size <= MAX_PROMPTS), None)


def _order(facts: Facts) -> Iterator[str]:
    """Find draws that were left out for longer than the window permits."""
    assert facts.start is not None
    done, largest = facts.start.copy(), max(facts.start.later, default=-1)
    for row in facts.rows:
        for draw in row.draws:
            done.add(draw)
        top, window = max(row.draws, default=-1), facts.window(row)
        holes = done.holes(top) if top > largest else 0
        largest = max(largest, top)
        if window is not None and holes >= window:
            yield (
                f"step {row.step} has draw {top}, but {holes} earlier draws, from draw {done.first_open}, are in no"
                f" row; at most {window - 1} may be missing"
            )
            return
    last = facts.parts[-1] if facts.parts else None
    if not facts.rows or last is None or last.max_steps is None or facts.rows[-1].step < last.max_steps:
        return
    top = max((draw for row in facts.rows if row.step >= last.first for draw in row.draws), default=-1)
    if holes := done.holes(top):
        yield f"the run has ended, but {holes} draws before draw {top}, from draw {done.first_open}, are in no row"


def _versions(facts: Facts) -> Iterator[str]:
    for row in facts.rows:
        trained, version = row.fates["trained"], row.step - 1
        if row.versions and len(row.versions) != len(trained):
            yield f"step {row.step}: {LEDGER} has {len(row.versions)} versions of {len(trained)} trained draws"
        for draw, (oldest, newest) in zip(trained, row.versions, strict=False):
            if newest > version:
                yield f"step {row.step} trained on a draw that was sampled with weights of a later step"
            elif oldest > newest:
                yield f"step {row.step}: the versions {oldest} to {newest} of draw {draw} are in the wrong order"


def _ages(facts: Facts) -> Iterator[str]:
    for row in facts.rows:
        bound = facts.bound(row.step)
        if bound is None:
            continue
        largest = max((row.step - 1 - oldest for oldest, _ in row.versions), default=0)
        if largest > bound:
            yield f"step {row.step} trained on samples of age {largest}, but async_generation_ratio was {bound}"
        if bound and row.fates["trained"] and not row.versions:
            yield f"step {row.step} has no versions, but async_generation_ratio was {bound}"


def _metrics(facts: Facts) -> Iterator[str]:
    assert facts.found.metrics is not None
    for row in facts.rows:
        metrics = facts.found.metrics.get(row.step, {})
        for name, fate in COUNTS.items():
            logged = metrics.get(name, 0 if metrics and fate in row.fates and fate != "filtered" else None)
            if logged is not None and facts.found.ledger is not None and logged != len(row.fates.get(fate, ())):
                draws = len(row.fates.get(fate, ()))
                yield f"step {row.step}: {LEDGER} has {draws} {fate} draws, but {METRICS} has {logged:g} ({name})"
        ages = [row.step - 1 - oldest for oldest, _ in row.versions]
        logged = metrics.get(LARGEST_AGE)
        if logged is not None and row.fates["trained"] and not ages:
            yield f"step {row.step}: {METRICS} has ages of samples, but {LEDGER} has no versions"
        elif metrics and ages and logged is None and (max(ages) > 0 or facts.bound(row.step)):
            yield f"step {row.step}: {LEDGER} has versions, but {METRICS} has no ages of samples"
        elif logged is not None and ages:  # the samples of failed draws count in the metric
            failed = bool(row.fates.get("failed"))
            if max(ages) > logged or (max(ages) < logged and not failed):
                yield f"step {row.step}: the largest age is {max(ages)}, but {METRICS} has {logged:g} ({LARGEST_AGE})"


def _positions(facts: Facts) -> Iterator[str]:
    """Compare the oldest draw that is not used up with the logged epoch, which is this draw / number of prompts."""
    metrics = facts.found.metrics or {}
    known = [
        (step, draw, epoch)
        for step, draw in facts.open_draws.items()
        if (epoch := metrics.get(step, {}).get(EPOCH)) is not None
    ]
    sizes = Counter(round(draw / epoch, 6) for _, draw, epoch in known if epoch > 0)
    written = next((float(state.size) for state in facts.found.states.values() if state.size), None)
    size = written or (sizes.most_common(1)[0][0] if sizes else None)
    for step, draw, epoch in known:
        if (size is None and draw) or (size is not None and not math.isclose(draw, epoch * size, abs_tol=1e-4)):
            logged = f" of {size:g} prompts" if size else ""
            yield (
                f"step {step}: draw {draw} is the first that is in no row up to this step, but {METRICS} has"
                f" {epoch:g} epochs{logged} ({EPOCH})"
            )
            return


def _checkpoints(facts: Facts) -> Iterator[str]:
    for step, done in facts.after.items():
        state = facts.found.states[step]
        there = Done(state.position, set(state.passed))
        missing = _first(chain(range(done.position, state.position), done.undone, state.passed), there, done)
        extra = _first(chain(range(state.position, done.position), done.later), done, there)
        if missing or extra:
            yield (
                f"the checkpoint of step {step} disagrees with the ledger: draws {missing} are done only in the"
                f" checkpoint, and draws {extra} are done only in the ledger"
            )
        for first, bound in state.bounds:
            part = facts.part(first)
            if part and part.bound is not None and part.bound != bound:
                yield (
                    f"the checkpoint of step {step} has async_generation_ratio {bound} from step {first} on, but"
                    f" config.yaml and {RUN_FACTS} give {part.bound}"
                )
    yield from _same_source(facts.found.states, (facts.found.config or {}).get("seed"))


def _same_source(states: Mapping[int, SourcePosition], seed: Any) -> Iterator[str]:
    seeds = {state.seed for state in states.values()} | ({seed} if type(seed) is int and states else set())
    for name, values in (("seed", seeds), ("number of prompts", {state.size for state in states.values()})):
        if len(known := sorted(value for value in values if value is not None)) > 1:
            yield f"checkpoints and config.yaml have more than one {name}: {', '.join(map(str, known))}"


def _first(draws: Iterable[int], inside: Done, outside: Done) -> list[int]:
    return sorted(set(islice((draw for draw in draws if draw in inside and draw not in outside), SHOWN)))


def _configuration(facts: Facts) -> Iterator[str]:
    if facts.found.is_config_foreign and facts.found.is_ended:
        yield f"config.yaml was changed after the start: {RUN_FACTS} has another checksum"


def _summary(facts: Facts) -> Iterator[str]:
    found = facts.found
    assert found.summary is not None and found.metrics is not None
    ledger = found.summary.get("ledger")
    if isinstance(ledger, dict) and found.ledger is not None:
        last = found.ledger[-1].checksum if found.ledger else 0
        if ledger.get("rows") != len(found.ledger) or ledger.get("checksum") != last:
            yield (
                f"{LEDGER} has {len(found.ledger)} rows and the checksum {last}, but at the end of the run it had"
                f" {ledger.get('rows')} rows and the checksum {ledger.get('checksum')} (summary.json)"
            )
    try:
        computed = summarize([{"step": step, **row} for step, row in found.metrics.items()])
    except (TypeError, ValueError, ArithmeticError):
        return
    for name, value in computed.items():
        stored = found.summary.get(name)
        if name in found.summary and name not in TIMES and not _close(value, stored):
            yield f"summary.json has {name} {str(stored)[:40]}, but {METRICS} gives {str(value)[:40]}"


def _close(value: Any, stored: Any) -> bool:
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (value, stored))
    return math.isclose(value, stored, rel_tol=1e-9) if numbers else value == stored


CHECKS = (
    Comparison(f"checksums of {LEDGER}", _chain, ("ledger",)),
    Comparison(f"id of the run in {LEDGER} and {RUN_FACTS}", _identity, ("ledger", "facts")),
    Comparison(f"checksum of config.yaml in {RUN_FACTS}", _configuration, ("facts", "checksum")),
    Comparison("steps of all files", _steps),
    Comparison("each draw has one fate", _once),
    Comparison(f"number of draws of each fate in {PROMPTS}", _prompts, ("prompts",)),
    Comparison("ids of the prompts in the order of the seed", _same_prompts, ("prompts", "order")),
    Comparison("ids of the prompts in the data files", _data, ("prompts", "drawn")),
    Comparison("draws that were left out", _order, ("parts", "start")),
    Comparison("versions of the samples", _versions, ("ledger",)),
    Comparison("ages of the samples against async_generation_ratio", _ages, ("ledger", "bounds")),
    Comparison(f"fates and ages in {METRICS}", _metrics, ("metrics",)),
    Comparison(f"positions in {METRICS}", _positions, ("metrics", "start")),
    Comparison(f"draws, prompts, versions and tokens of {SAMPLES}", compare_samples, ("samples", "ledger")),
    Comparison("positions in checkpoints", _checkpoints, ("start",)),
    Comparison("summary.json", _summary, ("summary", "facts", "metrics", "end")),
)


def unchecked(facts: Facts) -> Iterator[str]:
    """Yield what cannot be checked, and why."""
    found = facts.found
    if found.ledger is None:
        yield f"{LEDGER}: the run draws its rows in order and has none"
    for check in CHECKS:
        if not (found.ledger is None and "ledger" in check.needs) and (reason := check.lacks(facts)):
            yield f"{check.what}: {reason}"
    if facts.rows and found.ledger is not None and facts.rows[0].run is None:
        yield f"id of the run: {LEDGER} has none, as an earlier version wrote its first row"
    last = max(found.metrics or {}, default=0)
    if found.metrics is not None and facts.rows and last < facts.rows[-1].step:
        yield f"steps {last + 1} to {facts.rows[-1].step} in {METRICS}: the run ended before it had written them"
    yield "weights and finished groups of checkpoints: a resume checks them"
