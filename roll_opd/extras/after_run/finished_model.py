"""Find the model of a run, and how its prompts are rendered. Imports no torch."""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from roll_opd.config.plan import DataPlan, RunPlan, SamplingPlan
from roll_opd.extras.report.run_files import find_run
from roll_opd.models.model_info import ModelFilesError, read_model
from roll_opd.models.weight_files import weight_problems
from roll_opd.pipelines.checkpoints import HF
from roll_opd.planner.load_plan import plan_of_run
from roll_opd.tracking.run_directory import RunDirectory, complete_checkpoints

ANSWER_TOKENS = 512  # of a model without a run


class NotUsable(Exception):
    """There is no complete model at the path, or it cannot be used; the message is shown to the user."""


@dataclass(frozen=True)
class FinishedModel:
    """A model on disk, with the templates and sampling settings of its run."""

    path: Path
    title: str
    data: DataPlan
    sampling: SamplingPlan  # of the run's validation; greedy if it has none
    plan: RunPlan | None = None  # None: a model directory without a run
    run: Path | None = None
    step: int | None = None


def add_place(parser: argparse.ArgumentParser, metavar: str = "RUN") -> None:
    """Add the arguments that select a model."""
    parser.add_argument("run", metavar=metavar, help="directory of a run, of its experiment, or of a model")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint after step N (default: the newest one)")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that replace the sampling settings of the run."""
    parser.add_argument("--temperature", type=float, metavar="T", help="0: greedy (default: as the run validates)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="maximum tokens of an answer (default: the run's)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")


def finished_model(place: Path, step: int | None = None, *, with_plan: bool = True) -> FinishedModel:
    """Return the model at `place`: the newest checkpoint of a run, or the one after `step`, or a model directory.

    Without the plan of the run, its templates and sampling settings are defaults. Raises NotUsable, NoRun, ConfigError
    or ModelFilesError.
    """
    if (place / "config.json").is_file():
        if step is not None:
            raise NotUsable(f"--step {step}: {place} is a model, not a run; leave --step out")
        found = _plain(place, place.resolve().name)
    else:
        run = find_run(place)
        path, chosen = _checkpoint(run, step)
        found = replace(_plain(path, f"{run.parent.name}, step {chosen}"), run=run, step=chosen)
        found = _as_planned(found) if with_plan else found
    if problems := weight_problems(read_model(found.path)):
        raise ModelFilesError("; ".join(problems))
    return found


def with_arguments(sampling: SamplingPlan, arguments: argparse.Namespace) -> SamplingPlan:
    """Return the sampling settings with those of the command line. Raises NotUsable for a value out of range."""
    temperature, most = arguments.temperature, arguments.max_tokens
    if temperature is not None and not (temperature == 0 or 0.01 <= temperature <= 2):
        raise NotUsable(f"--temperature {temperature:g} is not 0 (greedy) or a number from 0.01 to 2; correct it")
    if most is not None and most < 1:
        raise NotUsable(f"--max-tokens {most} is not a number of tokens; give 1 or more")
    sampling = sampling if temperature is None else replace(sampling, temperature=temperature)
    return sampling if most is None else replace(sampling, max_new_tokens=most)


def _plain(path: Path, title: str) -> FinishedModel:
    data = DataPlan(files=(), prompt_length=read_model(path).max_positions)
    return FinishedModel(path, title, data, _greedy(SamplingPlan(max_new_tokens=ANSWER_TOKENS)))


def _checkpoint(run: Path, step: int | None) -> tuple[Path, int]:
    """Return the model of a checkpoint and its step."""
    steps = {int(path.name.rpartition("_")[2]): path for path in complete_checkpoints(run)}
    if not steps:
        raise NotUsable(f"{run} has no complete checkpoint; train until one is written (save_steps)")
    if step is not None and step not in steps:
        raise NotUsable(f"--step {step}: {run} has complete checkpoints after {', '.join(map(str, sorted(steps)))}")
    chosen = max(steps) if step is None else step
    return steps[chosen] / HF, chosen


def _as_planned(found: FinishedModel) -> FinishedModel:
    assert found.run is not None
    plan, sampling = plan_of_run(found.run, RunDirectory(found.run).read_facts()), found.sampling
    if plan.rollout:
        sampling = _greedy(plan.rollout.sampling)
        sampling = replace(plan.validation.sampling, n=1) if plan.validation else sampling
    return replace(found, plan=plan, data=plan.data, sampling=sampling)


def _greedy(sampling: SamplingPlan) -> SamplingPlan:
    return replace(sampling, temperature=0.0, n=1)
