"""What planning found out: problems (the run is refused) and warnings (the run goes on).

Every check writes into one `Findings`, so that a user sees all problems of a configuration at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


class ConfigError(Exception):
    """The user's configuration is wrong. `problems` holds one sentence each; nothing has been started."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(problems)
        self.problems = list(problems)

    def __str__(self) -> str:
        many = len(self.problems) > 1
        head = f"the configuration has {len(self.problems)} problems:" if many else "the configuration has a problem:"
        return "\n".join([head, *(f"  {index}. {text}" for index, text in enumerate(self.problems, start=1))])


@dataclass
class Findings:
    """Collects problems and warnings; knows where each key was written ("file.yaml:12" or "command line")."""

    origins: Mapping[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def problem(self, key: str, text: str) -> None:
        """Add a problem about `key` (a dotted path), once."""
        self._add(self.problems, f"{key}: {text}{self.where(key)}")

    def warn(self, text: str) -> None:
        """Add a warning, once."""
        self._add(self.warnings, text)

    def where(self, key: str) -> str:
        """Return " (file.yaml:12)" for the key or its nearest written ancestor, "" if nobody wrote it."""
        while key:
            if key in self.origins:
                return f" ({self.origins[key]})"
            key = key.rpartition(".")[0]
        return ""

    def raise_if_any(self) -> None:
        """Raise `ConfigError` with every problem found so far."""
        if self.problems:
            raise ConfigError(self.problems)

    @staticmethod
    def _add(sentences: list[str], text: str) -> None:
        if text not in sentences:
            sentences.append(text)
