"""Run a pipeline to its last step: set up the run directory, Ray and the workers, and handle errors that end a run.

A pipeline is a module with `async def train(run: Run, workers: RunWorkers)`. `user_code.pipeline_module` finds the
module of `RunPlan.pipeline`.
"""

import asyncio
import copy
import gc
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from roll_opd.base.command_line import write_run_directory
from roll_opd.base.failures import ConfigError, DiskFull, RunError, SkippedUpdates, full_disk, os_sentence
from roll_opd.cluster import ray_runtime
from roll_opd.cluster.lost_processes import ClusterError, Losses, ProcessDied, RayLost
from roll_opd.cluster.multihost.hosts import Hosts
from roll_opd.cluster.placement import Placement
from roll_opd.cluster.stall_watchdog import watchdog
from roll_opd.cluster.startup_progress import StartupProgress
from roll_opd.config.plan import RunPlan
from roll_opd.data.row_formats import DataError
from roll_opd.pipelines.check_user_code import loop_of
from roll_opd.pipelines.checkpoints import Checkpoint, CheckpointError, Checkpoints, find
from roll_opd.pipelines.resume_in_place import Revival
from roll_opd.pipelines.run_context import Run
from roll_opd.pipelines.run_facts import run_facts, write_facts
from roll_opd.pipelines.run_logger import RunLogger
from roll_opd.pipelines.run_workers import RunWorkers
from roll_opd.pipelines.server_reach import check_reach
from roll_opd.pipelines.settings_history import History
from roll_opd.pipelines.shutdown import Ending
from roll_opd.pipelines.start_checks import Inputs
from roll_opd.pipelines.start_run import begin
from roll_opd.planner.device_mapping import short_devices
from roll_opd.tracking.console import show_progress
from roll_opd.tracking.metrics_writer import MetricsWriter
from roll_opd.tracking.run_directory import RunDirectory, checksum, lock_run
from roll_opd.tracking.stdout_tee import CONSOLE_LOG, StdoutTee, tee_output
from roll_opd.workers.liveness import watched
from roll_opd.workers.worker_progress import running_calls


def run(plan: RunPlan, inputs: Inputs, hosts: Hosts | None = None) -> None:
    """Create the run directory, start Ray, and train to the last step.

    `hosts` are the launched hosts of a multi-host run. If the run fails during start-up, its directory is removed.
    Raises RunError if the run cannot continue.
    """
    with tee_output() as tee, own_directory(plan, inputs.resumed, inputs.history) as directory:
        try:
            _run(plan, inputs, directory, tee, hosts)
        finally:
            if not directory.has_begun:
                tee.leave(directory.path)


def _run(
    plan: RunPlan,
    inputs: Inputs,
    directory: RunDirectory,
    tee: StdoutTee,
    hosts: Hosts | None,
) -> None:
    train = loop_of(plan.pipeline)
    resumed = inputs.resumed
    write_run_directory(directory.path)
    logs = _logs(plan, directory)
    tee.write_to(directory.path, *filter(None, [logs]))
    checkpoints = Checkpoints(directory, plan.checkpoint, plan.max_steps, inputs.began, inputs.history)
    writer = MetricsWriter.open(plan.trackers, directory, resumed.step if resumed else None, plan.tracker_args)
    done = resumed.step if resumed else 0
    logger = RunLogger(plan, directory, writer, inputs.tokenizer, inputs.source, tee, inputs.history, done)
    logger.note(plan.heading)
    logger.note(f"Run directory: {directory.path}" + (f", resumed after step {resumed.step}" if resumed else ""))
    if inputs.history.line:
        logger.note(inputs.history.line)
    if directory.set_aside:
        logger.note(f"Superseded checkpoints of later steps: {', '.join(map(str, directory.set_aside))}")
    # imported modules are permanent; a full garbage collection over them would stall a step for 0.3 s. Do not collect
    # here either: a Ctrl-C inside a destructor would be ignored
    gc.freeze()
    starting = StartupProgress(plan.startup_timeout_s, logger.note)
    ending = Ending(checkpoints, plan.shutdown_timeout_s, logger.note)
    try:
        check_reach(plan, starting)
        with (
            ending.before_the_loop(),
            ray_runtime.ray_cluster(plan.devices_per_node, starting, hosts, logs),
            watched(ending.lose, plan.hang_timeout_s, logger.note),
        ):
            ending.start_up_is_over()
            if hosts:
                ending.hear_all_hosts()
                hosts.watch(ending.lose)
            devices = Placement(
                plan.num_nodes,
                plan.devices_per_node,
                starting,
                deterministic=plan.deterministic,
                addresses=hosts.addresses if hosts else (),
                losses=Losses(plan.max_lost_workers, logger.loss, phase=logger.clock.phase_of_failure),
            )
            if plan.num_nodes > 1:
                logger.note(f"Devices: {devices_text(devices.hosts())}")
            opened = Run(
                plan,
                devices,
                inputs.source,
                inputs.held_out,
                logger,
                checkpoints,
                resumed,
                inputs.history,
                ending,
                first_state=copy.deepcopy(inputs.source.state_dict()),
            )
            live = tee.show_live if tee.is_live else None
            watching = watchdog(
                logger.note, ending.lose, plan.stall_timeout_s, running_calls, is_on=lambda: ending.is_training
            )
            with show_progress(logger.unfinished_step, logger.note, live), watching:
                asyncio.run(_trained(train, opened))
    except KeyboardInterrupt:
        raise ending.interrupted() from None
    except SkippedUpdates as error:
        raise RunError(f"{error}: {logger.skipped(error.samples)}") from error
    except (ProcessDied, RayLost) as error:
        raise _full(error, directory, ending) or RunError(f"{error}{ending.how_to_go_on()}") from error
    except (ClusterError, DataError) as error:
        raise _full(error, directory, ending) or RunError(str(error)) from error
    except CheckpointError:
        raise
    except Exception as error:
        if full := _full(error, directory, ending):
            raise full from error
        raise
    finally:
        writer.close()  # a failed or interrupted run also keeps its metrics
        gc.unfreeze()  # otherwise some libraries warn of uncollected objects at exit
        if directory.has_begun and (ended_by := sys.exception()):
            logger.close(ended_by)
    logger.finish()


def _logs(plan: RunPlan, directory: RunDirectory) -> Path | None:
    """Make and return the run's directory in `logging_dir`, or return None without this key."""
    if plan.logging_dir is None:
        return None
    logs = Path(plan.logging_dir).absolute() / f"{plan.exp_name}-{directory.path.name}"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / CONSOLE_LOG).open("a").close()
    except OSError as error:
        raise ConfigError([f"logging_dir: {os_sentence(error)}"]) from error
    return logs


def _full(error: Exception, directory: RunDirectory, ending: Ending) -> DiskFull | None:
    """Return a DiskFull error if `error` was caused by a full disk, else None."""
    why = full_disk(error, directory.path, Path(tempfile.gettempdir()), Path("/dev/shm"))
    return DiskFull(f"{why}; free space or change output_dir{ending.how_to_go_on()}") if why else None


def devices_text(devices: Mapping[str, Sequence[int]]) -> str:
    """Return the devices of each host as text."""
    return ", ".join(f"{short_devices(numbers)} on {address}" for address, numbers in devices.items())


async def _trained(train: Callable[[Run, RunWorkers], Awaitable[None]], run: Run) -> None:
    with run.ending.of_the_loop():
        revival = Revival(run)
        workers = await begin(run)
        await revival.trained(train, workers)
        await workers.end()


@contextmanager
def own_directory(plan: RunPlan, resumed: Checkpoint | None, history: History) -> Iterator[RunDirectory]:
    """Lock and yield the run directory.

    A run that resumes in the same experiment uses the directory of the resumed run. Any other run gets a new directory,
    which is removed at the end if it has neither metrics nor a checkpoint. Raises RunError if the resumed run has saved
    a later checkpoint in the meantime.
    """
    experiment = os.path.realpath(os.path.join(plan.output_dir, plan.exp_name))
    with ExitStack() as ends:
        try:
            if resumed and str(resumed.run.parent) == experiment:
                ends.enter_context(lock_run(resumed.run))
                # the driver of that run has saved a checkpoint since
                if find(plan.checkpoint, plan.output_dir, plan.exp_name) != resumed:
                    raise RunError(
                        f"{resumed.run} has saved a later checkpoint since this run read {resumed.path}; start this"
                        " run again"
                    )
                directory = RunDirectory.resume(resumed.run, resumed.step)
            else:
                directory = RunDirectory.create(plan.output_dir, plan.exp_name)
                ends.callback(_discard_unbegun, directory)
                # the lock file is closed first, as NFS keeps a directory that has an open file
                ends.enter_context(lock_run(directory.path))
                if resumed:
                    directory.inherit_answers(resumed.run)
            directory.checkpoints.mkdir(exist_ok=True)
            directory.write_config(plan.config_yaml)
            record = {"id": directory.id, "config_checksum": checksum(plan.config_yaml)}
            write_facts(directory, {**record, **run_facts(plan, history)})
        except OSError as error:
            raise ConfigError([f"output_dir: {os_sentence(error)}"]) from error
        yield directory


def _discard_unbegun(directory: RunDirectory) -> None:
    if not directory.has_begun:
        directory.discard()
