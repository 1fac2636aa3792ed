"""`number_sum`: each turn shows one more number; the model answers with the sum so far."""

from collections.abc import Sequence

from roll_opd.extras.games.environment_interface import ENVIRONMENTS, EnvironmentFailure
from roll_opd.extras.games.game import PATTERN, SPECIAL_TOKENS, Game, Turn, at_least, random_numbers
from roll_opd.extras.games.guess_number import whole_number

INSTRUCTION = (
    "You are shown {turns} numbers, one a turn. Each turn give the sum of all numbers so far, in this form:"
    " <answer>12</answer>"
)


@ENVIRONMENTS.register("number_sum")
class NumberSum(Game):
    """Running sum. Each right sum gives the reward 1 / `turns`. The episode succeeds if all sums are right."""

    def __init__(
        self,
        turns: int = 4,
        min_number: int = 1,
        max_number: int = 9,
        env_instruction: str | None = None,
        format_penalty: float = 0.0,
        action_pattern: str = PATTERN,
        special_token_list: Sequence[str] | None = SPECIAL_TOKENS,
    ) -> None:
        """Each of the `turns` numbers is drawn between `min_number` and `max_number`, both included."""
        at_least("turns", turns, 1)
        if max_number < min_number or max(abs(min_number), abs(max_number)) >= 2**62:
            raise EnvironmentFailure(
                f"min_number is {min_number} and max_number is {max_number}; set max_number to at least min_number, and"
                " both below 2**62 in absolute value"
            )
        self._turns, self._low, self._high = turns, min_number, max_number
        self._numbers: list[int] = []
        super().__init__(
            instruction=INSTRUCTION.format(turns=turns) if env_instruction is None else env_instruction,
            action_lookup=None,
            max_steps=turns,
            format_penalty=format_penalty,
            action_pattern=action_pattern,
            special_token_list=special_token_list,
        )

    def begin(self, seed: int | None) -> None:
        """Draw the numbers."""
        drawn = random_numbers(seed).integers(self._low, self._high, size=self._turns, endpoint=True)
        self._numbers, self._shown, self._right = list(map(int, drawn)), 1, 0

    def play(self, action: str) -> Turn:
        """Check a sum and show the next number."""
        right = whole_number(action) == sum(self._numbers[: self._shown])
        self._right += right
        return Turn(right / self._turns, effective=right, over=self._is_last())

    def idle(self) -> Turn:
        """Show the next number after an invalid action."""
        return Turn(over=self._is_last())

    def _is_last(self) -> bool:
        self._shown += 1
        return self._shown > self._turns

    @property
    def succeeded(self) -> bool:
        """Whether all sums of the episode were right."""
        return self._right == self._turns

    def render(self) -> str:
        """Return the number of this turn."""
        if self._shown > self._turns:
            return f"{self._right} of {self._turns} sums were right."
        return f"Number {self._shown} of {self._turns}: {self._numbers[self._shown - 1]}"

    def solve(self) -> list[str]:
        """Return the remaining sums."""
        return [str(sum(self._numbers[:count])) for count in range(self._shown, self._turns + 1)]
