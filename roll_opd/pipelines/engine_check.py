"""The engine check: a run ends if its engines do not sample from the student. See docs/engine-check.md.

The preflight tests samples of the first step before the first update. Each later step tests the samples of its first
update in the forward pass of this update.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from roll_opd.base.failures import RunError
from roll_opd.base.terminal import warn
from roll_opd.config.plan import RunPlan
from roll_opd.models.engine_options import ALTERING_OPTIONS, CHECKED_OPTIONS
from roll_opd.objective.engine_evidence import (
    DIFFERENCE,
    FALSE_ALARMS,
    ROOT_MEAN_SQUARE,
    SAMPLED_BY,
    EngineEvidence,
    compared_metrics,
    evidence_in,
    evidence_of,
    marked,
)
from roll_opd.samples.call_settings import CALL_SETTINGS, FIELDS, UNKNOWN
from roll_opd.samples.sample import Sample
from roll_opd.teachers.logprob_checks import Check
from roll_opd.workers.sampler import Sampler
from roll_opd.workers.student import Student

PROBES, PROBE_TOKENS = 4, 64  # samples and response tokens of each that `after_update` compares
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
            ends_run: whether a failed test ends the run; otherwise it causes a warning. With an option that may change
                the distribution of samples, it always ends the run.
        """
        self._plan, self._student, self._report = plan, student, report
        options = plan.rollout.engine_args if plan.rollout else {}
        self._needs_evidence = not ALTERING_OPTIONS.keys().isdisjoint(options)
        self._ends_run = ends_run or self._needs_evidence
        self._settings = plan.objective.engine_check
        dtypes = {role.model.dtype for role in (student.plan, plan.rollout) if role and self._settings}
        self._dtype = min(dtypes - {"fp32"}, default="fp32")  # of the one that rounds more
        self._tests = 0
        self._is_due = self._settings is not None  # whether the preflight is still to come
        self._has_compared = True  # whether log-probs of the last step's samples were compared
        self._warned: set[str] = set()

    async def preflight(self, samples: Sequence[Sample], temperature: float, version: int) -> None:
        """Test the first samples of the run. Samples that no engine drew are left for a later step.

        Raises RunError if a test fails and ends the run.

        Args:
            version: version of the student's weights.
        """
        self._note_settings(samples)
        if not self._is_due:
            return
        assert self._settings and self._plan.rollout
        chosen = marked(_first(samples), version, self._settings)
        if not any(sample.columns[SAMPLED_BY].any() for sample in chosen):
            return
        evidence = evidence_of(chosen, await self._student.moments(chosen, temperature, self._settings))
        assert evidence is not None
        self._is_due = False
        found = self._faults(evidence)
        self._report(self._plan.rollout.name, _rows(evidence, found))
        self._act(found, "the first samples")

    def _note_settings(self, samples: Sequence[Sample]) -> None:
        """Warn once if calls sampled with other settings than those with which the update computes log-probs."""
        rows = [sample.columns[CALL_SETTINGS] for sample in samples if CALL_SETTINGS in sample.columns]
        if not rows or CALL_SETTINGS in self._warned:
            return
        self._warned.add(CALL_SETTINGS)
        own = np.concatenate(rows)
        own = own[~np.isnan(own).all(1)]
        first = next((row for row in own if (row != UNKNOWN).any()), own[0])
        shown = ", ".join(f"{name} {value:g}" for name, value in zip(FIELDS, first, strict=True) if value == value)
        share = len(own) / sum(sample.response_length for sample in samples)
        warn(
            f"calls of the workflow sample with other settings ({shown}; {share:.0%} of the tokens of a"
            " step), but the update computes log-probs with the run's generating_args; let the calls sample with the"
            " run's settings, or switch train_infer_correction on (warned once)"
        )

    def after(self, metrics: Mapping[str, float], step: int) -> None:
        """Judge the evidence in the metrics of a step.

        Raises RunError if a test fails and ends the run.
        """
        evidence = evidence_in(metrics)
        if evidence is not None:
            self._act(self._faults(evidence), f"the samples of step {step}")
        self._has_compared = evidence is not None and evidence.compared > 0

    async def after_update(self, samples: Sequence[Sample], sampler: Sampler, version: int) -> dict[str, float]:
        """Compare the engines' log-probs of some samples with the student's, after engines have received its weights.

        Returns the metrics `rollout/engine/*` of the comparison. Nothing is compared, and the result is empty, if
        `after` has compared tokens of the last step: then the next step will have such tokens, too. Steps whose tokens
        are all of older weights, or have a repetition penalty, have none.

        Raises RunError if the log-probs differ and this ends the run.

        Args:
            version: version of the weights.
        """
        if not self._settings or self._settings.is_corrected or self._has_compared:
            return {}
        longer = [sample for sample in samples if sample.response_length > 1 and not sample.demonstration]
        probes = [_probe(sample) for sample in sorted(longer, key=lambda sample: sample.prompt_length)[:PROBES]]
        if not probes:
            return {}
        of_engines, of_student = await asyncio.gather(
            asyncio.gather(*[sampler.prompt_logprobs(probe.tokens.tolist()) for probe in probes]),
            self._student.compute_logprobs(probes),
        )
        apart = [
            values[probe.prompt_length - 1 :] - own
            for probe, own, found in zip(probes, of_student, of_engines, strict=True)
            for values in found
        ]
        if not apart:  # every engine has been lost, and the next step compares
            return {}
        evidence = EngineEvidence.of_differences(np.concatenate(apart))
        self._act(self._differences(evidence), f"the log-probs after the update to version {version}")
        return compared_metrics(evidence)

    def _faults(self, evidence: EngineEvidence) -> dict[str, str]:
        """Return the meaning of each test that fails, by the name of its row."""
        self._tests += 1
        dtype, found = self._dtype, {}
        if evidence.is_foreign(self._tests, dtype):
            found[FOREIGN] = (
                f"their log-probs are {abs(evidence.bias):.3g} nats per token"
                f" {'below' if evidence.bias < 0 else 'above'} the mean of the student's distribution (z"
                f" {evidence.z:.3g} over {evidence.tokens:.0f} tokens; a student's own samples reach this evidence in"
                f" less than {FALSE_ALARMS:g} of all runs)"
            )
        return found | self._differences(evidence)

    def _differences(self, evidence: EngineEvidence) -> dict[str, str]:
        dtype, found = self._dtype, {}
        if evidence.differs(dtype):
            found[DIFFERS] = (
                f"log-probs of engine and student differ by {evidence.difference:.3g} nats per token on average (root"
                f" mean square: {evidence.root_mean_square:.3g}) for the same tokens and weights; in {dtype} they may"
                f" differ by {DIFFERENCE[dtype]:g} ({ROOT_MEAN_SQUARE[dtype]:g})"
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
            way_out = "" if self._needs_evidence else ". To train on these samples nevertheless, set engine_check: warn"
            raise RunError(text + way_out)
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
        return (
            "No option of the engine explains this: the engine has other weights or another computation than the"
            " student; run roll-opd check-model on the student, and look for variables (system_envs) and plugins that"
            " change vLLM"
        )


def _first(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples, evenly spread over the step, with at most about `PREFLIGHT_TOKENS` response tokens."""
    stride = max(1, math.ceil(sum(sample.response_length for sample in samples) / PREFLIGHT_TOKENS))
    return list(samples[::stride])


def _probe(sample: Sample) -> Sample:
    """Return the prompt and the first `PROBE_TOKENS` response tokens; an engine must be able to add another token."""
    length = min(sample.prompt_length + PROBE_TOKENS, len(sample.tokens) - 1)
    return Sample(sample.tokens[:length], sample.prompt_length)


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
