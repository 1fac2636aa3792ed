"""Compare the logged samples of a run with its ledger, its prompts and its metrics."""

from collections.abc import Iterator, Sequence

from roll_opd.tracking.evidence import LedgerRow, LoggedSample
from roll_opd.tracking.ledger_facts import Facts
from roll_opd.tracking.run_directory import LEDGER, METRICS, PROMPTS, SAMPLES
from roll_opd.tracking.summary import GENERATED_TOKENS, STEP_TOKENS


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
