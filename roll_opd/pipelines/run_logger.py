"""Log a step's metrics and samples to the console, to trackers and to JSON Lines files in the run directory."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from roll_opd.base.entry_points import entries
from roll_opd.base.terminal import warn
from roll_opd.cluster.lost_processes import Loss
from roll_opd.config.plan import RunPlan
from roll_opd.data.prompt_source import TaskSource
from roll_opd.data.templates import load_tokenizer
from roll_opd.models.tokenizer_files import has_chat_template
from roll_opd.objective.external_advantages import token_level_rewards
from roll_opd.pipelines.checkpoints import HF
from roll_opd.pipelines.run_facts import note_end, write_facts
from roll_opd.pipelines.run_hooks import RunHooks
from roll_opd.pipelines.sample_texts import (
    as_f32,
    example_prompt,
    logprobs_of,
    of_actions,
    teacher_cuts_of,
    teacher_prompts_of,
    text_of,
    topk_hits,
)
from roll_opd.pipelines.settings_history import History
from roll_opd.rollout.workflow_runs import Batch
from roll_opd.samples.sample import Sample
from roll_opd.teachers.logprob_checks import Check, table
from roll_opd.tracking.console import Console, Progress, validation
from roll_opd.tracking.ledger import Ledger
from roll_opd.tracking.metrics_writer import MetricsWriter
from roll_opd.tracking.phase_clock import PhaseClock, time_metrics
from roll_opd.tracking.results_table import SHORT, loading
from roll_opd.tracking.run_directory import (
    LEDGER,
    LOSSES,
    PROMPTS,
    SAMPLES,
    SKIPPED_SAMPLES,
    VALIDATION_SAMPLES,
    RunDirectory,
    read_jsonl,
)
from roll_opd.tracking.stdout_tee import StdoutTee
from roll_opd.tracking.summary import (
    ACCURACY,
    OF_TEACHER,
    STEP_TOKENS,
    VAL_REWARD,
    summarize,
    with_rewards,
    write_summary,
)
from roll_opd.tracking.throughput import TrainingFlops, memory_metrics, throughput_metrics
from roll_opd.workers.worker_progress import running_calls

# settings on which the advantages of a sample depend
OBJECTIVE_FIELDS = (
    "opd_objective",
    "opd_divergence",
    "adv_estimator",
    "gamma",
    "lambd",
    "opd_kl_discount",
    "reward_bounds",
    "reward_clip",
    "advantage_clip",
    "kl_penalty",
)
EPOCH = "data/epoch"
PLAN_AND_DATA = "plan and data"  # time until the first process starts
STUDENT = "student"  # the model that answered held-out prompts; teachers are `teacher/NAME`


class RunLogger:
    """Logs a run to the console, to trackers and to files. Its `clock` measures the time of each step."""

    def __init__(
        self,
        plan: RunPlan,
        run: RunDirectory,
        writer: MetricsWriter,
        tokenizer: PreTrainedTokenizerBase,
        source: TaskSource,
        tee: StdoutTee,
        history: History,
        done: int = 0,
    ) -> None:
        """`done` is the number of steps that the resumed checkpoint has completed, or 0 for a new run."""
        self.clock = PhaseClock(began=tee.began)
        self.progress = Progress()
        self._done = done
        self._plan, self._run, self._writer, self.tokenizer = plan, run, writer, tokenizer
        self._other_tokenizers = {t.name: load_tokenizer(t.tokenizer) for t in plan.teachers if t.tokenizer}
        self._source, self._tee, self._history = source, tee, history
        self._flops = TrainingFlops(plan.student, plan.objective.ppo_epochs)
        self._has_failed_prompts = False
        self._teachers: dict[str, Mapping[str, float]] = {}
        self._startup: dict[str, float] = {}
        self._read_earlier()
        # duration of each part of the start-up, s
        self.startup_parts = {PLAN_AND_DATA: time.perf_counter() - tee.began}

    def _read_earlier(self) -> None:
        """Continue the records of the steps that are in the run directory."""
        self._ledger, self._hooks = Ledger(self._run), RunHooks(self._plan, self._run)
        self._console = Console(self._plan.max_steps, frozen=_word_for_scorers(self._plan))
        for metrics in read_jsonl(self._run.metrics_file) if self._done else []:
            self._console.with_grading(metrics)
            if metrics["step"]:
                self._hooks.after_step(metrics)

    @property
    def is_begun(self) -> bool:
        """Whether the state before the first step was logged, by this process or by the run that it resumes."""
        return self._run.metrics_file.exists()

    @property
    def steps_done(self) -> int:
        """Number of logged steps."""
        return self._done

    def rewind(self, step: int) -> None:
        """Remove the records of all steps after `step`, and continue after it."""
        facts = self._run.read_facts()
        RunDirectory.resume(self._run.path, step)
        self._writer.reopen(step)
        self._done = step
        self._read_earlier()
        write_facts(self._run, facts)

    def loss(self, loss: Loss) -> None:
        """Warn of the loss of processes, and record it."""
        where = f" (in the phase {loss.phase})" if loss.phase else ""
        warn(f"{loss.why}{where}; {loss.remedy} ({loss.seconds:.1f} s)")
        self._run.append_jsonl(LOSSES, [{"after_step": self._done, "time": time.time(), **asdict(loss)}])

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.note(text)

    def teacher_accuracy(self, name: str, metrics: Mapping[str, float]) -> None:
        """Print and store a teacher's validation metrics."""
        if ACCURACY in metrics:
            self._teachers[name] = metrics
            self.note(f"Teacher {name}: {validation(self._console.with_grading(metrics))}")

    def preflight(self, name: str, rows: Sequence[Check]) -> None:
        """Print the results of a teacher's preflight, and write them to a file of the run."""
        self._preflight(f"Teacher preflight: {name}", name, rows)

    def engine_preflight(self, name: str, rows: Sequence[Check]) -> None:
        """Print the results of the engine check before the first update, and write them to a file of the run."""
        self._preflight(f"Engine preflight: {name}", name, rows)

    def _preflight(self, title: str, name: str, rows: Sequence[Check]) -> None:
        self.note(table(title, rows))
        self._run.write_preflight(name, [asdict(row) for row in rows])

    def start(self, metrics: Mapping[str, float]) -> None:
        """Log the state before the first step, as step 0."""
        row = {**metrics, **{f"val_correct/teacher/{name}": of[ACCURACY] for name, of in self._teachers.items()}}
        graded = {name: of[VAL_REWARD] for name, of in self._teachers.items() if VAL_REWARD in of}
        row |= {f"val/reward/teacher/{name}": reward for name, reward in graded.items()}
        if self._teachers:
            best = max(self._teachers.values(), key=lambda of: with_rewards(of)[VAL_REWARD])
            row |= {theirs: best[own] for own, theirs in OF_TEACHER.items() if own in best}
        if ACCURACY in metrics:
            self.note(f"Student before training: {validation(self._console.with_grading(metrics))}")
        self.restart()
        row |= self._startup
        self._startup = {}
        self._writer.log(0, row)

    def restart(self) -> None:
        """Record the time so far as `time/startup`, so that it does not count as part of a step.

        The time of the validation is recorded separately as `time/validate`.
        """
        lap = self.clock.lap()
        self._startup = {"time/startup": lap["step"] - lap["validate"]}
        if lap["validate"]:
            self._startup["time/validate"] = lap["validate"]

    def step(self, step: int, batch: Batch, samples: Sequence[Sample], metrics: Mapping[str, float]) -> None:
        """Log a finished step with its batch."""
        row = {
            **metrics,
            EPOCH: batch.epochs,
            "rollout/generated_tokens": float(batch.generated_tokens),
            "rollout/filtered_prompts": float(len(batch.filtered)),
            STEP_TOKENS: float(sum(len(sample.tokens) for sample in samples)),
            **self._flops.of_step(samples),
        }
        shown = samples[:: max(1, len(samples) // max(1, self._plan.logged_samples_per_step))]
        self._run.append_jsonl(SAMPLES, self._samples(step, shown[: self._plan.logged_samples_per_step]))
        if batch.draws or batch.failed_draws:
            self._ledger.append(step, batch.draws, batch.filtered_draws, batch.sampled_by, batch.failed_draws)
        if batch.failed and not self._has_failed_prompts:
            self._has_failed_prompts = True
            warn(
                f"Step {step} has not trained on {len(batch.failed)} prompts, because runs or rewards failed. The lines"
                f" of the steps show the share of failed runs; {PROMPTS} and {LEDGER} list such prompts as failed"
            )
        self.log(step, _prompt_ids(batch), row)

    def answers(self, step: int, by: str, answers: Sequence[Sample]) -> None:
        """Write answers to held-out prompts to a file, and print the student's first answer.

        `by` names the model that gave the answers: the student after `step` steps, or a teacher.
        """
        rows = [
            {"step": step, "by": by, **text_of(answer, self.tokenizer), **logprobs_of(answer)} for answer in answers
        ]
        self._run.append_jsonl(VALIDATION_SAMPLES, rows)
        if rows and by == STUDENT:
            self._console.example(step, rows[0])

    def log(self, step: int, drawn: Mapping[str, Sequence[str]], metrics: Mapping[str, float]) -> None:
        """Log a finished step: its metrics and the ids of its prompts."""
        row = {EPOCH: self._source.epochs, **metrics, **self._startup, **memory_metrics()}
        row |= time_metrics(self.clock.lap())
        row |= throughput_metrics(row)
        row |= self._flops.utilisation(row)
        self._startup = {}
        self._run.append_jsonl(PROMPTS, [{"step": step, **drawn}])
        for text in self._hooks.after_step(row):
            warn(text)
        self._writer.log(step, row)
        if not self._done:
            self._run.link_latest()
        self._done = step
        if step % max(1, self._plan.logging_steps) == 0 or step == self._plan.max_steps:
            self._console.step(step, row)
        else:
            self._console.count(row)

    def hold(self) -> None:
        """Keep the rows of the next step and of later steps until `release`."""
        self._writer.hold()

    def release(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add validation metrics to the row of `step`, the first kept row, and write all kept rows."""
        self._writer.release(metrics)
        if ACCURACY in metrics:
            self.note(f"Validation after step {step}: {validation(self._console.with_grading(metrics))}")

    def skipped(self, samples: Sequence[Sample]) -> Path:
        """Write the samples of a skipped update to a file. Return the path of the file."""
        step = self._done + 1
        is_sampled = self._plan.rollout is not None
        rows = self._samples(step, samples) if is_sampled else [self._supervised_sample(step, one) for one in samples]
        self._run.append_jsonl(SKIPPED_SAMPLES, [{**row, "not_finite": not_finite(row)} for row in rows])
        return self._run.path / SKIPPED_SAMPLES

    def unfinished_step(self) -> tuple[float, str] | None:
        """Return (seconds, text): the duration of the running step so far, and a status line.

        Returns None after the last step. Before the first step, None is returned unless a phase is running.
        """
        moment = self.clock.moment()
        is_before = not moment.laps
        if self._done == self._plan.max_steps or (is_before and moment.phase is None):
            return None
        seconds = moment.phase_seconds if is_before else moment.lap_seconds
        counts = ", ".join(filter(None, [self.progress.text(), *_micro_batches()]))
        step = 0 if is_before else self._done + 1
        return seconds, self._console.unfinished(step, seconds, moment.phase, counts)

    def model_files(self, step: int) -> dict[str, str]:
        """Return the texts that hooks add to the model, as of the logged step `step`."""
        summary = summarize(read_jsonl(self._run.metrics_file)) | {"parts": self._history.as_facts(step)}
        return self._hooks.model_files(step, summary, self._history.up_to(step))

    def finish(self) -> None:
        """Write `summary.json` and the files of the hooks. Print the last table, and how to load the model."""
        warnings = (*(" ".join(text.split()) for text in self._plan.warnings), *self._tee.warnings)
        summary = write_summary(
            self._run,
            seed=self._plan.seed,
            end_seconds=self.clock.lap()["step"],
            startup_parts=self.startup_parts,
            warnings=warnings,
            parts=self._history.as_facts(self._done),
            ledger={"rows": self._ledger.rows, "checksum": self._ledger.checksum} if self._ledger.rows else None,
        )
        self._console.finish(summary)
        model = self._run.checkpoint(self._done) / HF
        if model.is_dir():
            script = loading(model, example_prompt(self._plan), is_chat=has_chat_template(model))
            print("", *script, "", sep="\n", flush=True)
        self.note(f"Run directory: {self._run.path}")
        self.close()

    def close(self, ended_by: BaseException | None = None) -> None:
        """Record the error that ended the run early, and let the hooks of the run write their files."""
        if ended_by:
            note_end(self._run, ended_by)
        for text in self._hooks.at_end(ended_by):
            self.note(text)
        if "report" not in entries("run_hooks"):
            self.note("No report was written, because no installed package writes one.")

    def _supervised_sample(self, step: int, sample: Sample) -> dict:
        return {
            "step": step,
            "prompt": self.tokenizer.decode(sample.tokens[: sample.prompt_length]),
            "response": self.tokenizer.decode(sample.tokens[sample.prompt_length :]),
            "tokens": sample.tokens,
            "prompt_length": sample.prompt_length,
            "action_mask": sample.action_mask,
            "student_logprobs": sample.old_logprobs,
            "ref_logprobs": sample.ref_logprobs,
        }

    def _samples(self, step: int, samples: Sequence[Sample]) -> list[dict]:
        return [self._sample(step, one) for one in samples]

    def _sample(self, step: int, sample: Sample) -> dict:
        teachers, objective = self._plan.teachers, self._plan.objective
        return {
            "step": step,
            **text_of(sample, self.tokenizer),
            "group_id": sample.group_id,
            "demonstration": sample.demonstration,
            **teacher_prompts_of(sample, self.tokenizer, self._other_tokenizers),
            **teacher_cuts_of(sample),
            **logprobs_of(sample),
            "student_logprobs": of_actions(sample, sample.old_logprobs),
            "opd_kl_coef": {t.name: t.opd_kl_coef for t in teachers if t.name in sample.teacher_logprobs},
            "teacher_topk_hits": topk_hits(sample) if objective.opd_topk_source == "teacher" else {},
            "values": of_actions(sample, sample.values),
            "token_level_rewards": as_f32(token_level_rewards(sample, objective)),
            "external_advantages": as_f32(sample.advantages),
            "advantages": sample.total_advantages,
            "loss_mask": sample.loss_mask,
            "importance_weights": of_actions(sample, sample.importance_weights),
            **sample.metrics,
            **{name: getattr(objective, name) for name in OBJECTIVE_FIELDS},
        }


def _word_for_scorers(plan: RunPlan) -> str:
    """Return the console's label for the time that teachers and reference take."""
    words = [SHORT["teacher"]] if plan.teachers or not plan.reference else []
    return "+".join([*words, *(["reference"] if plan.reference else [])])


def _micro_batches() -> list[str]:
    calls = running_calls().items()
    return [f"micro-batches of {role} {begun}/{total}" for role, (begun, total) in calls]


def not_finite(row: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return a map from the name of each array to the indices of its NaN and infinite values at action tokens.

    The indices are stored because JSON cannot represent these values.
    """
    arrays = {name: value for name, value in row.items() if isinstance(value, np.ndarray)}
    acted = np.asarray(row["action_mask"])
    cuts = row.get("teacher_cuts", {})
    for name, value in row.get("teacher_logprobs", {}).items():
        covered = np.full(acted.shape, name not in cuts)
        for first, count, _ in cuts.get(name, ()):  # the teacher has no log-prob for tokens outside its chunks
            covered[first : first + count] = True
        arrays[f"teacher_logprobs.{name}"] = np.where(covered, value, 0) if name in cuts else value
    places = {
        name: np.flatnonzero(acted & ~np.isfinite(array)).tolist()
        for name, array in arrays.items()
        if array.shape == acted.shape
    }
    return {name: positions for name, positions in places.items() if positions}


def _prompt_ids(batch: Batch) -> dict[str, list[str]]:
    drawn = {
        "ids": batch.prompts,
        "filtered": batch.filtered,
        **({"failed": batch.failed} if batch.failed else {}),
        **({"demonstrations": batch.demonstrations} if batch.demonstrations else {}),
    }
    return {name: [prompt.id for prompt in prompts] for name, prompts in drawn.items()}
