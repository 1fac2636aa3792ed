"""The engine check: a run ends if its engines do not sample from the student. See docs/engine-check.md.

The preflight tests samples of the first step before the first update. Each later step tests the samples of its first
update in the forward pass of this update.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from roll_opd.base.failures import RunError
from roll_opd.base.terminal import warn
from roll_opd.config.plan import RunPlan
from roll_opd.models.engine_options import CHECKED_OPTIONS
from roll_opd.objective.engine_columns import evidence_in, evidence_of, marked
from roll_opd.objective.engine_evidence import DIFFERENCE, FALSE_ALARMS, EngineEvidence
from roll_opd.samples.sample import Sample
from roll_opd.teachers.teacher_checks import Check
from roll_opd.workers.student import Student

PREFLIGHT_TOKENS = 4096  # maximum response tokens of the samples that the preflight tests
FOREIGN = "drawn from the student"
DIFFERS = "log-probs of the engine"


class EngineCheck:
    """The tests of a run."""

    def __init__(
        self,
        plan: RunPlan,
        student: Student,
        report: Callable[[str, Sequence[Check]], None],
        *,
        ends_run: bool,
    ) -> None:
        """Create the tests.

        Args:
            plan: the plan of the run.
            student: the student, which computes the moments for the preflight.
            report: prints and stores the rows of the preflight.
            ends_run: whether a failed test ends the run; otherwise it causes a warning.
        """
        self._plan, self._student, self._report, self._ends_run = plan, student, report, ends_run
        self._settings = plan.objective.engine_check
        self._tests = 0
        self._is_due = self._settings is not None  # whether the preflight is still to come
        self._warned: set[str] = set()

    async def preflight(self, samples: Sequence[Sample], temperature: float, version: int) -> None:
        """Test the first samples of the run. Samples that no engine drew are left for a later step.

        Raises RunError if a test fails and ends the run.

        Args:
            version: version of the student's weights.
        """
        if not self._is_due:
            return
        assert self._settings and self._plan.rollout
        chosen = marked(_first(samples), version, self._settings)
        evidence = evidence_of(chosen, await self._student.moments(chosen, temperature, self._settings))
        if evidence is None:
            return
        self._is_due = False
        found = self._faults(evidence)
        self._report(self._plan.rollout.name, _rows(evidence, found))
        self._act(found, "the first samples")

    def after(self, metrics: Mapping[str, float], step: int) -> None:
        """Judge the evidence in the metrics of a step.

        Raises RunError if a test fails and ends the run.
        """
        evidence = evidence_in(metrics)
        if evidence is not None:
            self._act(self._faults(evidence), f"the samples of step {step}")

    def _faults(self, evidence: EngineEvidence) -> dict[str, str]:
        """Return the meaning of each test that fails, by the name of its row."""
        self._tests += 1
        dtype, found = self._student.plan.model.dtype, {}
        if evidence.is_foreign(self._tests, dtype):
            found[FOREIGN] = (
                f"their log-probs are {abs(evidence.bias):.3g} nats per token"
                f" {'below' if evidence.bias < 0 else 'above'} the mean of the student's distribution (z"
                f" {evidence.z:.3g} over {evidence.tokens:.0f} tokens; a student's own samples reach this evidence in"
                f" less than {FALSE_ALARMS:g} of all runs)"
            )
        if evidence.differs(dtype):
            found[DIFFERS] = (
                f"log-probs of engine and student differ by {evidence.difference:.3g} nats per token on average, more"
                f" than the {DIFFERENCE[dtype]:g} of {dtype}, for the same tokens and weights"
            )
        return found

    def _act(self, found: Mapping[str, str], samples: str) -> None:
        if not found:
            return
        assert self._plan.rollout
        text = (
            f"the engine does not sample from the student, by {samples}: {'; '.join(found.values())}. {self._cause()}"
        )
        if self._ends_run:
            raise RunError(f"{text}. To train on these samples nevertheless, set engine_check: warn")
        if new := found.keys() - self._warned:
            self._warned |= new
            warn(f"{text} (each test warns once)")

    def _cause(self) -> str:
        """Return the options of the engines that may be the cause, and what to do."""
        assert self._plan.rollout
        options = {name: value for name, value in self._plan.rollout.engine_args.items() if name in CHECKED_OPTIONS}
        if options:
            shown = ", ".join(f"{name}: {value}" for name, value in options.items())
            return f"Remove the engine options that change the distribution ({shown})"
        if self._plan.workflow:
            return (
                "Let the workflow sample with the run's temperature, top_p and top_k; otherwise the engine computes"
                " another distribution than the student, which is a fault of the engine or of its weights"
            )
        return (
            "No option of the engine explains this: the engine has other weights or another computation than the"
            " student; run roll-opd check-model on the student, and look for variables (system_envs) and plugins that"
            " change vLLM"
        )


def _first(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples, evenly spread over the step, with at most about `PREFLIGHT_TOKENS` response tokens."""
    stride = max(1, math.ceil(sum(sample.response_length for sample in samples) / PREFLIGHT_TOKENS))
    return list(samples[::stride])


def _rows(evidence: EngineEvidence, found: Mapping[str, str]) -> list[Check]:
    """Return the rows of the preflight's table."""
    rows = {
        FOREIGN: f"mean {evidence.bias:+.2g} nats, z {evidence.z:+.2g}, {evidence.tokens:.0f} tokens",
        DIFFERS: f"differ by {evidence.difference:.1e} at {evidence.compared:.0f} tokens"
        if evidence.compared
        else "not compared: tokens have importance weights",
    }
    sound = {
        FOREIGN: "mean of log-prob plus entropy under the student; 0 for its own samples",
        DIFFERS: "mean difference from the student's log-probs, with the same weights",
    }
    return [Check(n, value, "failed" if n in found else "ok", found.get(n, sound[n])) for n, value in rows.items()]
