"""Reads how a run mixes its prompts: `domain_interleave_probs` by reward domain or tag, `interleave_probs` by file."""

import difflib
from collections.abc import Sequence
from pathlib import Path

from roll_opd.config.errors import Findings
from roll_opd.config.plan import DataPlan, RewardPlan, StreamPlan
from roll_opd.config.prompt_files import find_prompt_files, tags_in
from roll_opd.config.schema import DataArgs

TOLERANCE = 0.01  # thirds written as 0.33 are meant to be thirds


def read_streams(
    args: DataArgs, path: str, data: DataPlan, rewards: Sequence[RewardPlan], findings: Findings
) -> tuple[StreamPlan, ...]:
    """Return the streams of prompts with weights that sum to 1; none where nothing is mixed.

    As in ROLL, `interleave_probs` counts for nothing beside `domain_interleave_probs`, and one probability of 1 is
    accepted whatever the number of files.
    """
    if args.domain_interleave_probs:
        if not rewards and len(args.domain_interleave_probs) == 1:
            return ()  # one domain and no rewards that could say what belongs to it: everything
        if len(args.interleave_probs) > 1:
            findings.warn(f"{path}.interleave_probs has no effect beside domain_interleave_probs")
        return _by_domain(args.domain_interleave_probs, f"{path}.domain_interleave_probs", data, rewards, findings)
    if args.interleave_probs:
        return _by_file(args, f"{path}.interleave_probs", findings)
    return ()


def _by_domain(
    shares: dict[str, float], key: str, data: DataPlan, rewards: Sequence[RewardPlan], findings: Findings
) -> tuple[StreamPlan, ...]:
    domains = {reward.domain: reward.tags for reward in rewards}
    tags, complete = tags_in(data)
    streams: list[StreamPlan] = []
    for (name, share), weight in zip(shares.items(), _weights(list(shares.values()), key, findings), strict=True):
        if name not in domains and name not in tags and complete:
            known = sorted({*domains, *tags})
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else "; write one of those that exist:"
            findings.problem(
                f"{key}.{name}",
                f"{share:g} is given to {name!r}, which is neither a domain of rewards nor a tag of the data{hint}"
                f" Known: {', '.join(known)}",
            )
            continue
        stream = StreamPlan(name, weight, domains.get(name, (name,)))
        for other in streams:
            if (shared := _shared(stream, other)) is not None:
                findings.problem(f"{key}.{name}", f"{shared} also belongs to {other.name!r}; a row has one domain")
        if weight and complete and stream.tags is not None and not tags.intersection(stream.tags):
            findings.warn(
                f"{key}.{name}: no row of the data has one of its tags ({', '.join(stream.tags)}); a run with this"
                " data will be refused"
            )
        streams.append(stream)
    return tuple(streams)


def _by_file(args: DataArgs, key: str, findings: Findings) -> tuple[StreamPlan, ...]:
    weights = _weights(args.interleave_probs, key, findings)
    if len(weights) == 1:
        return ()
    if len(weights) != len(args.file_name):
        findings.problem(
            key,
            f"{len(weights)} probabilities for {len(args.file_name)} entries of file_name; write one for each",
        )
        return ()
    streams: list[StreamPlan] = []
    short = [Path(name).name for name in args.file_name]
    for name, weight in zip(args.file_name, weights, strict=True):
        files = tuple(map(str, find_prompt_files(name, args.dataset_dir)))
        for other in streams:
            if shared := set(files).intersection(other.files):
                findings.problem(key, f"{min(shared)} is in two entries of file_name; name each file once")
        label = Path(name).name if short.count(Path(name).name) == 1 else name
        streams.append(StreamPlan(label, weight, files=files))
    return tuple(streams)


def _weights(shares: Sequence[float], key: str, findings: Findings) -> list[float]:
    total = sum(shares)
    if abs(total - 1) > TOLERANCE + 1e-9:
        written = ", ".join(f"{share:g}" for share in shares)
        findings.problem(key, f"{written} sum to {total:g}; change them so that they sum to 1")
        return list(shares)
    return [share / total for share in shares]


def _shared(one: StreamPlan, other: StreamPlan) -> str | None:
    if one.tags is None or other.tags is None:
        return "every tag (no tag_included is written)"
    return next((f"tag {tag!r}" for tag in one.tags if tag in other.tags), None)
