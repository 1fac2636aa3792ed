"""Fraction of a run's text that teachers with other tokenizers score: checks of the preflight and of every step."""

from collections import Counter
from collections.abc import Sequence

from roll_opd.base.failures import RunError
from roll_opd.samples.sample import Sample
from roll_opd.teachers.teacher_checks import Check
from roll_opd.tracking.alignment_metrics import Cut, cut_of

MAX_UNCOVERED = 0.05  # share of action tokens without a teacher log-prob
ENOUGH = 1000  # action tokens of a run before its share counts


class Coverage:
    """Counts the action tokens of each teacher with another tokenizer since the start of the run."""

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._uncovered: Counter[str] = Counter()

    def add(self, samples: Sequence[Sample]) -> None:
        """Count samples. RunError if over `MAX_UNCOVERED` of a teacher's action tokens have no credit."""
        for sample in samples:
            for name, alignment in sample.alignments.items():
                self._tokens[name] += sample.action_tokens
                self._uncovered[name] += alignment.uncovered
        for name, tokens in self._tokens.items():
            share = self._uncovered[name] / max(tokens, 1)
            if tokens >= ENOUGH and share > MAX_UNCOVERED:
                raise RunError(f"teacher {name} scores too little of the answers: {_uncovered(share)}")


def coverage_checks(samples: Sequence[Sample], teacher: str) -> list[Check]:
    """Return the preflight's rows for a teacher with another tokenizer."""
    cut = cut_of(samples, teacher)
    return [
        Check(
            "aligned 1:1",
            f"{1 - cut.chunked_bytes:.0%} of bytes, {cut.chunks} chunks",
            "ok",
            "bytes in tokens that both tokenizers cut alike; a chunk ends where a token of both ends",
        ),
        Check("longest chunk", f"{cut.longest_chunk} student tokens", "ok", "tokens from one such end to the next"),
        _covered(cut),
    ]


def _covered(cut: Cut) -> Check:
    value = f"{cut.uncovered:.2%} of action tokens"
    if cut.uncovered > MAX_UNCOVERED:
        return Check("uncovered tokens", value, "failed", _uncovered(cut.uncovered))
    meaning = "tokens without a teacher log-prob and without credit: special tokens and bytes that the teacher lacks"
    return Check("uncovered tokens", value, "ok", meaning)


def _uncovered(share: float) -> str:
    return (
        f"{share:.1%} of the action tokens have no teacher log-prob (at most {MAX_UNCOVERED:.0%}): its tokenizer"
        " has no token for their bytes or for a special token; use a teacher whose tokenizer covers all bytes, or a"
        " template with special tokens that both have"
    )
