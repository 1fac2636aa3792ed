"""`guess_number`: guess a number within a few turns, with the hints higher and lower."""

from collections.abc import Sequence

from roll_opd.extras.games.environment_interface import ENVIRONMENTS, EnvironmentFailure
from roll_opd.extras.games.game import PATTERN, SPECIAL_TOKENS, Game, Turn, at_least, random_numbers

INSTRUCTION = (
    "Guess a whole number from {low} to {high}; you have {turns} guesses, and are told whether the number is higher or"
    " lower. Give one guess a turn, in this form: <answer>7</answer>"
)


@ENVIRONMENTS.register("guess_number")
class GuessNumber(Game):
    """Number guessing. The reward is 1 for the right number, else 0. An invalid guess counts as a turn."""

    def __init__(
        self,
        min_number: int = 1,
        max_number: int = 20,
        max_steps: int = 5,
        env_instruction: str | None = None,
        format_penalty: float = 0.0,
        action_pattern: str = PATTERN,
        special_token_list: Sequence[str] | None = SPECIAL_TOKENS,
    ) -> None:
        """`max_steps` is the number of guesses.

        With bisection, this many guesses are enough for 2 ** `max_steps` - 1 numbers.
        """
        if max_number <= min_number:
            raise EnvironmentFailure(f"max_number is {max_number}; it must be greater than min_number ({min_number})")
        if max_number - min_number >= 2**62:
            raise EnvironmentFailure("max_number - min_number must be below 2^62; narrow the range")
        at_least("max_steps", max_steps, 1)
        self._low, self._high, self._number, self._observation = min_number, max_number, min_number, ""
        super().__init__(
            instruction=INSTRUCTION.format(low=min_number, high=max_number, turns=max_steps)
            if env_instruction is None
            else env_instruction,
            action_lookup=None,
            max_steps=max_steps,
            format_penalty=format_penalty,
            action_pattern=action_pattern,
            special_token_list=special_token_list,
        )

    def begin(self, seed: int | None) -> None:
        """Draw the number."""
        self._number = self._low + int(random_numbers(seed).integers(self._high - self._low + 1))
        self._found, self._observation = False, "What is your first guess?"
        self._known = (self._low, self._high)

    def play(self, action: str) -> Turn:
        """Compare a guess."""
        guess = whole_number(action)
        if guess is None or not self._low <= guess <= self._high:
            self._observation = f"That is no whole number from {self._low} to {self._high}."
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
