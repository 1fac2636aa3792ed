"""Check that a teacher with another tokenizer scores enough of a run's text, in the preflight and in every step."""

from collections import Counter
from collections.abc import Sequence

from roll_opd.base.failures import RunError
from roll_opd.samples.sample import Sample
from roll_opd.teachers.teacher_checks import Check
from roll_opd.tracking.opd_metrics import Cut, cut_of

MAX_UNCOVERED = 0.05  # largest allowed fraction of action tokens without a teacher log-prob
ENOUGH = 1000  # the fraction is checked from this number of action tokens on


class Coverage:
    """Counts the action tokens with and without a log-prob, for each teacher with another tokenizer.

    The counts are over the whole run.
    """

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._uncovered: Counter[str] = Counter()

    def add(self, samples: Sequence[Sample]) -> None:
        """Add samples to the counts.

        Raises RunError if too many action tokens have no log-prob of a teacher: more than the fraction `MAX_UNCOVERED`,
        out of at least `ENOUGH` action tokens.
        """
        for sample in samples:
            for name, alignment in sample.alignments.items():
                self._tokens[name] += sample.action_tokens
                self._uncovered[name] += alignment.uncovered
        for name, tokens in self._tokens.items():
            share = self._uncovered[name] / max(tokens, 1)
            if tokens >= ENOUGH and share > MAX_UNCOVERED:
                raise RunError(f"teacher {name} scores too little of the answers: {_uncovered(share)}")


def coverage_checks(samples: Sequence[Sample], teacher: str) -> list[Check]:
    """Return the rows of the preflight's table for a teacher with another tokenizer."""
    cut = cut_of(samples, teacher)
    return [
        Check(
            "aligned 1:1",
            f"{1 - cut.chunked_bytes:.0%} of bytes, {cut.chunks} chunks",
            "ok",
            "fraction of bytes in tokens that are the same in both tokenizers, and number of chunks; a chunk ends at a"
            " byte at which both a student token and a teacher token end",
        ),
        Check(
            "longest chunk",
            f"{cut.longest_chunk} student tokens",
            "ok",
            "number of student tokens in the longest chunk",
        ),
        _covered(cut),
    ]


def _covered(cut: Cut) -> Check:
    value = f"{cut.uncovered:.2%} of action tokens"
    if cut.uncovered > MAX_UNCOVERED:
        return Check("uncovered tokens", value, "failed", _uncovered(cut.uncovered))
    meaning = (
        "tokens without a teacher log-prob, which get no credit: special tokens and bytes that the teacher's"
        " tokenizer lacks"
    )
    return Check("uncovered tokens", value, "ok", meaning)


def _uncovered(share: float) -> str:
    return (
        f"{share:.1%} of the action tokens have no log-prob from the teacher (at most {MAX_UNCOVERED:.0%} may lack"
        " one): the teacher's tokenizer has no token for their bytes or for a special token; use a teacher whose"
        " tokenizer covers all bytes, or a template whose special tokens exist in both tokenizers"
    )
