"""From a command line to a run: plan, check, start, and end with an exit code that says what happened.

0 done; 2 what the user gave cannot work (message on stderr, nothing started); 1 anything else; 130 interrupted.
"""

import argparse
import asyncio
import errno
import gc
import os
import sys
import traceback
from collections.abc import Sequence

from roll_opd.algorithms.registry import AlgorithmError
from roll_opd.cli import add_config_arguments
from roll_opd.config.build import load_plan, miscounted
from roll_opd.config.errors import ConfigError
from roll_opd.config.plan import DataPlan, RunPlan
from roll_opd.hf.model_info import ModelFilesError
from roll_opd.pipelines.checkpoints import Checkpoint, CheckpointError, Checkpoints, find
from roll_opd.pipelines.fit import misfits_of_checkpoint, misfits_of_machine

DONE, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130


def main(
    description: str,
    *,
    pure: bool | None = None,
    pipeline: str | None = None,
    arguments: Sequence[str] | None = None,
) -> int:
    """Run what the command line asks for and return the exit code; `pure` and `pipeline` are those of `load_plan`."""
    parser = argparse.ArgumentParser(description=description)
    add_config_arguments(parser)
    parsed = parser.parse_intermixed_args(arguments)
    try:
        plan = load_plan(parsed.config_path, parsed.config_name, parsed.overrides, pure=pure, pipeline=pipeline)
        return _launch(plan)
    except (ConfigError, CheckpointError) as error:
        return _refused(error)
    except KeyboardInterrupt:
        print("roll-opd: interrupted", file=sys.stderr)
        return INTERRUPTED


def _launch(plan: RunPlan) -> int:
    from roll_opd.data.rows import DataError
    from roll_opd.rewards.interface import RewardError
    from roll_opd.tracking.registry import TrackerError

    if plan.num_nodes > 1 and not os.environ.get("RAY_ADDRESS"):
        raise ConfigError(
            [f"num_nodes is {plan.num_nodes}: start Ray on every node (ray start) and set RAY_ADDRESS to its head"]
        )
    os.environ |= {name: str(value) for name, value in plan.env.items()}
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    try:
        resume = find(plan.checkpoint, plan.output_dir, plan.exp_name)
        _check_fit(plan, resume)
        return _run(plan, resume)
    except (AlgorithmError, DataError, ModelFilesError, RewardError, TrackerError) as error:
        return _refused(error)


def _check_fit(plan: RunPlan, resume: Checkpoint | None) -> None:
    misfits = misfits_of_checkpoint(plan, resume) if resume else []
    if not os.environ.get("RAY_ADDRESS"):  # what somebody else's cluster has shows when it is joined
        import torch

        misfits += misfits_of_machine(plan, torch.cuda.device_count())
    if misfits:
        raise ConfigError(misfits)


def _run(plan: RunPlan, resume: Checkpoint | None) -> int:
    from roll_opd.algorithms.registry import advantage, policy_loss
    from roll_opd.data.coverage import check_coverage
    from roll_opd.data.rows import DataError
    from roll_opd.data.source import MixedSource, PromptSource
    from roll_opd.data.templates import load_tokenizer
    from roll_opd.rewards.registry import REWARDS, check
    from roll_opd.tracking.registry import find as find_tracker
    from roll_opd.tracking.trackers import JSONL, Trackers

    terms = [term for reward in plan.rewards for term in reward.terms]
    for term in terms:
        check(term.worker, dict(term.args))  # a name that means nothing is told now, not by a worker
    objective = plan.objective
    policy_loss(objective.policy_loss, objective.policy_loss_args)
    if plan.rollout and plan.mode != "pure":
        advantage(objective.adv_estimator, objective.advantage_args)
    for tracker in plan.trackers:
        if tracker != JSONL:
            find_tracker(tracker)
    tokenizer = load_tokenizer(plan.student.model.path)
    data_sets = {
        "training": plan.data,
        **({"validation": plan.validation.data} if plan.validation else {}),
        **({"demonstrations": plan.demonstrations.data} if plan.demonstrations else {}),
    }
    prompts = dict(zip(data_sets, _prompts(list(data_sets.values()), tokenizer), strict=True))
    training, validation = prompts["training"], prompts.get("validation")
    if warning := miscounted(plan, len(training)):
        print(f"warning: {warning}", file=sys.stderr)
    if plan.rollout:
        held_out_tags = validation.by_tag() if validation else {}
        needing_truth = {term.worker for term in terms if REWARDS.facts(term.worker).needs_ground_truth}
        check_coverage(plan.mode, plan.teachers, plan.rewards, training.by_tag(), held_out_tags, needing_truth)
    source = (
        MixedSource(training, prompts["demonstrations"], plan.seed)
        if plan.demonstrations
        else PromptSource(training, plan.seed)
    )
    held_out = validation.all() if validation else []
    if resume:
        source.load_state_dict(resume.source_state)
        if resume.step >= plan.max_steps:
            print(f"{resume.path} is after step {resume.step} of {plan.max_steps}: nothing is left to do")
            return DONE

    from roll_opd.cluster.runtime import ClusterError, ray_cluster
    from roll_opd.pipelines.dpo import run_dpo
    from roll_opd.pipelines.rlvr import run_rlvr
    from roll_opd.pipelines.run_logger import RunLogger
    from roll_opd.pipelines.sft import run_sft
    from roll_opd.tracking.run_directory import RunDirectory
    from roll_opd.workers.errors import RunError, SkippedUpdates

    run = _directory(plan, resume, RunDirectory)
    checkpoints = Checkpoints(run, plan.checkpoint, plan.max_steps)
    trackers = Trackers.open(plan.trackers, run, resume.step if resume else None, plan.tracker_args)
    record = RunLogger(plan, run, trackers, tokenizer, resume.step if resume else 0)
    record.note(f"Run directory: {run.path}" + (f", resumed after step {resume.step}" if resume else ""))
    # what is imported by now stays; a full garbage collection over it would stall some step for 0.3 s
    gc.collect()
    gc.freeze()
    try:
        with ray_cluster(plan.devices_per_node):
            run_pipeline = {"rlvr": run_rlvr, "sft": run_sft, "dpo": run_dpo}[plan.pipeline]
            asyncio.run(run_pipeline(plan, source, held_out, record, checkpoints, resume))
    except (KeyboardInterrupt, CheckpointError):
        raise
    except SkippedUpdates as error:
        print(f"roll-opd: {error}: {record.skipped(error.samples)}", file=sys.stderr)
        return FAILED
    except (RunError, ClusterError, DataError) as error:
        print(f"roll-opd: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _refused(f"{error}; free space or change output_dir, then use resume_from_checkpoint=true")
    except Exception:
        traceback.print_exc()
        return FAILED
    finally:
        trackers.close()  # a run that fails or is interrupted keeps what it has logged, too
        gc.unfreeze()  # or some libraries complain, at exit, of what was not collected
    record.finish()
    return DONE


def _prompts(data_sets: Sequence[DataPlan], tokenizer) -> list:
    """Open every data set; what is wrong with any of them is told together."""
    from roll_opd.data.prompts import open_prompts
    from roll_opd.data.rows import DataError

    opened, refusals = [], []
    for data in data_sets:
        try:
            prompts, report = open_prompts(data, tokenizer)
        except DataError as error:
            refusals.append(str(error))
        else:
            opened.append(prompts)
            print(report.summary())
    if refusals:
        raise DataError("\n".join(refusals))
    return opened


def _directory(plan: RunPlan, resume: Checkpoint | None, directories):
    """A resumed run goes on in its own directory if that belongs to this experiment; else a new one is made."""
    experiment = os.path.realpath(os.path.join(plan.output_dir, plan.exp_name))
    if resume and str(resume.run.parent) == experiment:
        run = directories.resume(resume.run, resume.step)
    else:
        run = directories.create(plan.output_dir, plan.exp_name)
    run.checkpoints.mkdir(exist_ok=True)
    run.write_config(plan.config_yaml)
    return run


def _refused(error: Exception | str) -> int:
    print(f"roll-opd: {error}", file=sys.stderr)
    return USER_ERROR
