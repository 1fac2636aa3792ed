"""The fraction of a step's tokens that each teacher scores. A warning is logged if a teacher scores no tokens."""

import logging
from collections import Counter
from collections.abc import Sequence

from roll_opd.samples.sample import Sample

STARVED = 10  # number of steps without a token after which a warning is logged

_log = logging.getLogger(__name__)


class TokenShares:
    """Computes the fraction of each step's tokens that a teacher scored.

    A warning is logged if a teacher scored no tokens in the last `STARVED` steps.
    """

    def __init__(self) -> None:
        self._without: Counter[str] = Counter()  # teacher -> number of consecutive steps without a token

    def metrics(self, samples: Sequence[Sample], teachers: Sequence[str]) -> dict[str, float]:
        """Return the metrics `opd/teacher/NAME/token_share`.

        Each of them is the fraction of the step's action tokens that are in samples scored by the teacher.
        """
        total = sum(sample.action_tokens for sample in samples)
        found = {}
        for name in teachers:
            scored = sum(sample.action_tokens for sample in samples if name in sample.teacher_logprobs)
            found[f"opd/teacher/{name}/token_share"] = scored / total if total else 0.0
            self._without[name] = 0 if scored or not total else self._without[name] + 1
            if self._without[name] == STARVED:
                _log.warning(
                    "teacher %s has scored no token in the last %d steps: no sample had a tag of this teacher; check"
                    " tag_included and domain_interleave_probs",
                    name,
                    STARVED,
                )
        return found
