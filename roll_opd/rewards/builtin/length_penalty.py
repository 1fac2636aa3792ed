"""`length_penalty`: a reward term that penalizes long responses.

Add it to another reward. For a response of L tokens, DAPO's soft overlong punishment (arXiv 2503.14476, equation 13) is

    0                                            L <= max_tokens - cache_tokens
    (max_tokens - cache_tokens - L)/cache_tokens      in between
    -1                                           L >  max_tokens

Key `coef` adds ROLL's penalty for short responses, multiplied by `coef`. This penalty is -0.5 up to 100 tokens. It then
rises linearly and is 0 from 400 tokens on.
"""

from collections.abc import Sequence

from roll_opd.rewards.interface import RewardError, RewardSample, Score, number
from roll_opd.rewards.reward_registry import register

SHORT, LONG_ENOUGH = 100, 400  # ROLL's term rises between these token counts
SHORT_VALUE = -0.5


@register("length_penalty")
class LengthPenalty:
    """Penalty for the length of a response, counted in sampled tokens.

    The part `tokens` is the number of sampled tokens.
    """

    def __init__(
        self, max_tokens: int | None = None, cache_tokens: int | None = None, coef: float | None = None
    ) -> None:
        if (max_tokens is None) != (cache_tokens is None) or (max_tokens is None and coef is None):
            raise RewardError(
                f"reward length_penalty: max_tokens is {max_tokens}, cache_tokens {cache_tokens}, coef {coef}; write"
                " max_tokens and cache_tokens, or coef"
            )
        self.coef = 0.0 if coef is None else number("length_penalty", "coef", coef)
        self.limit = None
        if max_tokens is not None:
            cache = number("length_penalty", "cache_tokens", cache_tokens, least=1)
            self.limit = number("length_penalty", "max_tokens", max_tokens, least=cache), cache

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        return [self._score(response_tokens(sample)) for sample in samples]

    def _score(self, tokens: int | None) -> Score:
        if tokens is None:
            return Score(None, reason="no tokens to count")
        value = self.coef * shortness(tokens)
        if self.limit is not None:
            value += overlong(tokens, *self.limit)
        return Score(value, {"tokens": float(tokens)})


def response_tokens(sample: RewardSample) -> int | None:
    """Return the number of sampled tokens; None if only the text is known."""
    return None if sample.tokenized is None else sample.tokenized.action_tokens


def overlong(tokens: int, max_tokens: float, cache_tokens: float) -> float:
    """Return DAPO's soft overlong punishment, from 0 down to -1."""
    return max(-1.0, min(0.0, (max_tokens - cache_tokens - tokens) / cache_tokens))


def shortness(tokens: int) -> float:
    """Return ROLL's penalty for short answers.

    It is -0.5 up to 100 tokens, rises linearly, and is 0 from 400 tokens on.
    """
    return SHORT_VALUE * max(0.0, min(1.0, (LONG_ENOUGH - tokens) / (LONG_ENOUGH - SHORT)))
