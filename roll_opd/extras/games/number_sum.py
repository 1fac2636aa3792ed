"""`number_sum`: each turn shows one more number; the model answers with the sum so far."""

from dataclasses import dataclass, field

from roll_opd.extras.games.environment_interface import ENVIRONMENTS, EnvironmentFailure
from roll_opd.extras.games.game import Game, Turn, at_least, random_numbers
from roll_opd.extras.games.guess_number import whole_number

INSTRUCTION = (
    "You are shown {turns} numbers, one a turn. Each turn give the sum of all numbers so far, in this form:"
    " <answer>12</answer>"
)


@ENVIRONMENTS.register("number_sum")
@dataclass(eq=False)
class NumberSum(Game):
    """Running sum. Each right sum gives the reward 1 / `turns`. The episode succeeds if all sums are right.

    Each of the `turns` numbers is drawn between `min_number` and `max_number`, both included.
    """

    turns: int = 4
    min_number: int = 1
    max_number: int = 9
    max_steps: int = field(init=False)  # `turns`

    def __post_init__(self) -> None:
        """Check the arguments."""
        low, high = self.min_number, self.max_number
        at_least("turns", self.turns, 1)
        if high < low or max(abs(low), abs(high)) >= 2**62:
            raise EnvironmentFailure(
                f"min_number is {low} and max_number is {high}; set max_number to at least min_number, and both below"
                " 2**62 in absolute value"
            )
        self._numbers: list[int] = []
        self.max_steps = self.turns
        self.set_up(INSTRUCTION.format(turns=self.turns))

    def begin(self, seed: int | None) -> None:
        """Draw the numbers."""
        drawn = random_numbers(seed).integers(self.min_number, self.max_number, size=self.turns, endpoint=True)
        self._numbers, self._shown, self._right = list(map(int, drawn)), 1, 0

    def play(self, action: str) -> Turn:
        """Check a sum and show the next number."""
        right = whole_number(action) == sum(self._numbers[: self._shown])
        self._right += right
        return Turn(right / self.turns, effective=right, over=self._is_last())

    def idle(self) -> Turn:
        """Show the next number after an invalid action."""
        return Turn(over=self._is_last())

    def _is_last(self) -> bool:
        self._shown += 1
        return self._shown > self.turns

    @property
    def succeeded(self) -> bool:
        """Whether all sums of the episode were right."""
        return self._right == self.turns

    def render(self) -> str:
        """Return the number of this turn."""
        if self._shown > self.turns:
            return f"{self._right} of {self.turns} sums were right."
        return f"Number {self._shown} of {self.turns}: {self._numbers[self._shown - 1]}"

    def solve(self) -> list[str]:
        """Return the remaining sums."""
        return [str(sum(self._numbers[:count])) for count in range(self._shown, self.turns + 1)]
