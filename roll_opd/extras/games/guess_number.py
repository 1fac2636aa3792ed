"""`guess_number`: guess a number within a few turns, with the hints higher and lower."""

from dataclasses import dataclass

from roll_opd.extras.games.environment_interface import ENVIRONMENTS, EnvironmentFailure
from roll_opd.extras.games.game import Game, Turn, random_numbers

INSTRUCTION = (
    "Guess a whole number from {low} to {high}; you have {turns} guesses, and are told whether the number is higher or"
    " lower. Give one guess a turn, in this form: <answer>7</answer>"
)


@ENVIRONMENTS.register("guess_number")
@dataclass(eq=False)
class GuessNumber(Game):
    """Number guessing. The reward is 1 for the right number, else 0. An invalid guess counts as a turn.

    `max_steps` is the number of guesses. With bisection, this many guesses are enough for 2 ** `max_steps` - 1 numbers.
    """

    min_number: int = 1
    max_number: int = 20
    max_steps: int = 5

    def __post_init__(self) -> None:
        """Check the arguments."""
        low, high = self.min_number, self.max_number
        if high <= low:
            raise EnvironmentFailure(f"max_number is {high}; it must be greater than min_number ({low})")
        if high - low >= 2**62:
            raise EnvironmentFailure("max_number - min_number must be below 2^62; narrow the range")
        self._number, self._observation = low, ""
        self.set_up(INSTRUCTION.format(low=low, high=high, turns=self.max_steps))

    def begin(self, seed: int | None) -> None:
        """Draw the number."""
        self._number = self.min_number + int(random_numbers(seed).integers(self.max_number - self.min_number + 1))
        self._found, self._observation = False, "What is your first guess?"
        self._known = (self.min_number, self.max_number)

    def play(self, action: str) -> Turn:
        """Compare a guess."""
        guess = whole_number(action)
        if guess is None or not self.min_number <= guess <= self.max_number:
            self._observation = f"That is no whole number from {self.min_number} to {self.max_number}."
            return Turn()
        low, high = self._known
        self._found = guess == self._number
        if guess < self._number:
            self._observation, self._known = f"The number is higher than {guess}.", (max(low, guess + 1), high)
        elif guess > self._number:
            self._observation, self._known = f"The number is lower than {guess}.", (low, min(high, guess - 1))
        else:
            self._observation = f"{guess} is the number."
        return Turn(float(self._found), effective=low <= guess <= high, over=self._found)

    def idle(self) -> Turn:
        """Show the required form of a guess again."""
        self._observation = "There was no guess; write one in this form: <answer>7</answer>"
        return Turn()

    @property
    def succeeded(self) -> bool:
        """Whether the number was guessed."""
        return self._found

    def render(self) -> str:
        """Return the hint after the last guess."""
        return self._observation

    def solve(self) -> list[str]:
        """Return the guesses of a bisection until the number is found."""
        guesses: list[int] = []
        low, high = self._known
        while not guesses or guesses[-1] != self._number:
            guesses.append((low + high) // 2)
            low, high = (guesses[-1] + 1, high) if guesses[-1] < self._number else (low, guesses[-1] - 1)
        return list(map(str, guesses))


def whole_number(text: str) -> int | None:
    """Return the integer in a text, or None if the text is not an integer of at most 30 characters."""
    try:
        return int(text) if len(text) <= 30 else None
    except ValueError:
        return None
