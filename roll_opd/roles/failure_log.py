"""The failed jobs of a pool: the first of each kind is a warning, and a run in which all fail ends."""

from dataclasses import dataclass, field

from roll_opd.base.failures import RunError
from roll_opd.base.terminal import warn

MAX_INITIAL_FAILURES = 32  # jobs that fail before the first success: then the jobs are not the cause


@dataclass
class FailureLog:
    """Failed jobs of a pool: warns about the first of each kind, and ends the run if it cannot go on.

    Kinds are counted elsewhere.
    """

    jobs: str  # what the jobs are, for messages
    consequence: str  # of a failure: "are left out"
    metric: str  # prefix of the counts by kind
    remedy: str | None = None  # of a failure that ends the run; None: failures do not
    must_succeed: bool = True  # the run ends if the first MAX_INITIAL_FAILURES all fail
    _initial: int | None = 0  # failures before the first success; None after it
    _kinds: set[str] = field(default_factory=set)

    def add_success(self) -> None:
        """Note that a job succeeded."""
        self._initial = None

    def add_failure(self, kind: str, text: str) -> None:
        """Warn if `kind` is new. RunError if the failure ends the run."""
        if self.remedy:
            raise RunError(f"{text}; {self.remedy}")
        if self._initial is not None:
            self._initial += 1
            if self._initial == MAX_INITIAL_FAILURES and self.must_succeed:
                raise RunError(f"the first {self._initial} {self.jobs} have all failed; the last one: {text}")
        if kind not in self._kinds:
            self._kinds.add(kind)
            warn(f"{text}\nSuch {self.jobs} {self.consequence}, and are counted as {self.metric}/{kind}")
