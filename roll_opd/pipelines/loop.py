"""What every pipeline shares: how a run starts or resumes, validates, saves, logs and ends.

A pipeline is a module with `async def train(run: Run)`; `RunPlan.pipeline` is its name in this package, or its dotted
path.
"""

import asyncio
import gc
import importlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from roll_opd.base.command_line import tell_run_directory
from roll_opd.base.failures import ConfigError, os_sentence
from roll_opd.base.full_disk import DiskFull, full_disk
from roll_opd.base.run_errors import RunError, SkippedUpdates
from roll_opd.cluster import placement, runtime
from roll_opd.cluster.liveness import watched
from roll_opd.cluster.multihost.hosts import Hosts
from roll_opd.cluster.startup_progress import ClusterError, ProcessDied, StartUp
from roll_opd.config.plan import RunPlan
from roll_opd.data.dataset import Prompt
from roll_opd.data.prompt_source import Source
from roll_opd.data.rows import DataError
from roll_opd.pipelines.checkpoints import Checkpoint, CheckpointError, Checkpoints, Save, find
from roll_opd.pipelines.history import History
from roll_opd.pipelines.preflight import Inputs
from roll_opd.pipelines.run_facts import run_facts, write_facts
from roll_opd.pipelines.run_logger import RunLogger
from roll_opd.pipelines.shutdown import Ending
from roll_opd.planner.device_mapping import short_devices
from roll_opd.tracking.clock import PhaseClock
from roll_opd.tracking.progress import Progress, shown_while_long
from roll_opd.tracking.run_directory import RunDirectory
from roll_opd.tracking.run_lock import only_driver
from roll_opd.tracking.stdout_tee import Recording, recorded
from roll_opd.tracking.trackers import Trackers

Validate = Callable[[], Awaitable[dict[str, float]]]


@dataclass(frozen=True)
class Run:
    """One run, as its pipeline gets it."""

    plan: RunPlan
    placement: placement.Placement
    source: Source
    held_out: list[Prompt]
    logger: RunLogger
    checkpoints: Checkpoints
    resumed: Checkpoint | None  # None: the run is a new one
    history: History  # of its settings
    ending: Ending

    @property
    def clock(self) -> PhaseClock:
        return self.logger.clock

    @property
    def progress(self) -> Progress:
        return self.logger.progress

    @property
    def steps_done(self) -> int:
        """Steps that the run had made when it was saved."""
        return self.resumed.step if self.resumed else 0

    @property
    def steps(self) -> Iterator[int]:
        """The steps to make, counted from 1 over the whole run.

        Garbage is collected between two of them, when a step's samples are gone, and else never: see
        `without_collections`.
        """
        for step in range(self.steps_done + 1, self.plan.max_steps + 1):
            yield step
            gc.collect()

    async def restore(self, load: Callable[[Path], Awaitable[None]]) -> None:
        """Have the state of a resumed run loaded."""
        if self.resumed:
            await self.placement.starting.of(f"the state after step {self.resumed.step}", load(self.resumed.path))

    async def log_start(self, validate: Validate) -> None:
        """Log how good the student is before the first step; a resumed run has that on record."""
        if self.resumed:
            self.logger.restart()
        else:
            with self.clock.phase("validate"):
                metrics = await validate() if self.held_out else {}
            self.logger.start(metrics)
        self.logger.startup_parts |= self.placement.starting.parts
        self.ending.is_training = True  # from now on there is something to be saved

    async def validation(self, step: int, validate: Validate) -> dict[str, float]:
        """Return the metrics of `validate` every `eval_steps` steps and after the last one, else none."""
        every, is_last = self.plan.eval_steps, step == self.plan.max_steps
        if not (self.held_out and every and (step % every == 0 or is_last)):
            return {}
        with self.clock.phase("validate"):
            return await validate()

    @asynccontextmanager
    async def checkpoint(self, step: int, save: Save, kl_coef: float | None = None) -> AsyncIterator[None]:
        """Write a checkpoint, if one is due, before the block, which logs the step; make it valid after the block.

        So a checkpoint's run has all its steps on record. With `async_save`, it becomes valid after a later step, the
        last one's at once. `kl_coef` is that of the next step. Terminated, after a checkpoint, where SIGTERM has come.
        """

        async def write() -> None:
            with self.clock.phase("checkpoint"):
                await self.checkpoints.write(step, save, self.source.state_dict(), kl_coef)

        is_written = self.checkpoints.due(step) or self.ending.is_asked_for
        if is_written:
            await write()
        yield
        if self.ending.is_asked_for and not is_written:  # while the step was logged
            await write()
            is_written = True
        if is_written:
            self.checkpoints.put_on_record(self.logger.model_card(step))
        ends = self.ending.is_asked_for or step == self.plan.max_steps
        await self.checkpoints.settle(wait=ends or not self.plan.checkpoint.async_save)
        if self.ending.is_asked_for and step < self.plan.max_steps:
            raise self.ending.saved(step)


def run(plan: RunPlan, inputs: Inputs, hosts: Hosts | None = None) -> None:
    """Make the run directory, start Ray and train to the end. RunError for what stops a run on its way.

    `hosts` are those that were launched for it, where it has others than this one. A run that ends before its start-up
    is over leaves nothing behind.
    """
    with recorded() as recording, own_directory(plan, inputs.resumed, inputs.history) as directory:
        _run(plan, inputs, directory, recording, hosts)


def _run(plan: RunPlan, inputs: Inputs, directory: RunDirectory, recording: Recording, hosts: Hosts | None) -> None:
    pipeline = importlib.import_module(plan.pipeline if "." in plan.pipeline else f"roll_opd.pipelines.{plan.pipeline}")
    resumed = inputs.resumed
    tell_run_directory(directory.path)
    recording.keep_in(directory.path)
    checkpoints = Checkpoints(directory, plan.checkpoint, plan.max_steps, inputs.began, inputs.history)
    trackers = Trackers.open(plan.trackers, directory, resumed.step if resumed else None, plan.tracker_args)
    done = resumed.step if resumed else 0
    logger = RunLogger(plan, directory, trackers, inputs.tokenizer, inputs.source, recording, inputs.history, done)
    logger.note(f"{plan.exp_name}: {plan.title}, {plan.kind} pipeline")
    logger.note(f"Run directory: {directory.path}" + (f", resumed after step {resumed.step}" if resumed else ""))
    if inputs.history.line:
        logger.note(inputs.history.line)
    if directory.set_aside:
        logger.note(f"Set aside, as they came after that step: {', '.join(map(str, directory.set_aside))}")
    # what is imported by now stays; a full garbage collection over it would stall some step for 0.3 s. There is none
    # here either: a Ctrl-C that came in a destructor would be ignored
    gc.freeze()
    starting = StartUp(plan.startup_seconds, logger.note)
    ending = Ending(checkpoints, plan.grace_seconds, logger.note)
    try:
        with (
            ending.before_the_loop(),
            runtime.ray_cluster(plan.devices_per_node, starting, hosts),
            watched(ending.lose),
        ):
            ending.start_up_is_over()
            if hosts:
                ending.hear_all_hosts()
                hosts.watch(ending.lose)
            devices = placement.Placement(
                plan.num_nodes,
                plan.devices_per_node,
                starting,
                deterministic=plan.deterministic,
                addresses=hosts.addresses if hosts else (),
            )
            if plan.num_nodes > 1:
                logger.note(f"Devices: {told(devices.hosts())}")
            opened = Run(
                plan, devices, inputs.source, inputs.held_out, logger, checkpoints, resumed, inputs.history, ending
            )
            live = recording.show_live if recording.is_live else None
            with shown_while_long(logger.under_way, logger.note, live):
                asyncio.run(_trained(pipeline.train, opened))
    except KeyboardInterrupt:
        raise ending.interrupted() from None
    except SkippedUpdates as error:
        raise RunError(f"{error}: {logger.skipped(error.samples)}") from error
    except ProcessDied as error:
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
        trackers.close()  # a run that fails or is interrupted keeps what it has logged, too
        gc.unfreeze()  # or some libraries complain, at exit, of what was not collected
        if directory.has_begun and (ended_by := sys.exception()):
            logger.report(ended_by)
    logger.finish()


def _full(error: Exception, directory: RunDirectory, ending: Ending) -> DiskFull | None:
    """Return the error of a run that ends because a disk is full; None for other errors."""
    said = full_disk(error, directory.path, Path(tempfile.gettempdir()), Path("/dev/shm"))
    return DiskFull(f"{said}; free space or change output_dir{ending.how_to_go_on()}") if said else None


def told(devices: Mapping[str, Sequence[int]]) -> str:
    """Return which devices are on which host, in words."""
    return ", ".join(f"{short_devices(numbers)} on {address}" for address, numbers in devices.items())


async def _trained(train: Callable[[Run], Awaitable[None]], run: Run) -> None:
    with run.ending.of_the_loop():
        await train(run)


@contextmanager
def own_directory(plan: RunPlan, resumed: Checkpoint | None, history: History) -> Iterator[RunDirectory]:
    """Have a resumed run's own directory if it belongs to this experiment, else a new one, to this process.

    A new one in which nothing has begun goes with it. RunError where the run to resume has gone on meanwhile.
    """
    experiment = os.path.realpath(os.path.join(plan.output_dir, plan.exp_name))
    with ExitStack() as ends:
        try:
            if resumed and str(resumed.run.parent) == experiment:
                ends.enter_context(only_driver(resumed.run))
                if find(plan.checkpoint, plan.output_dir, plan.exp_name) != resumed:  # its last driver was still saving
                    raise RunError(f"{resumed.run} has gone on since {resumed.path} was read: start this command again")
                directory = RunDirectory.resume(resumed.run, resumed.step)
            else:
                directory = RunDirectory.create(plan.output_dir, plan.exp_name)
                ends.callback(_discard_unbegun, directory)
                ends.enter_context(only_driver(directory.path))  # ends first: NFS keeps a directory with an open file
            directory.checkpoints.mkdir(exist_ok=True)
            directory.write_config(plan.config_yaml)
            write_facts(directory, run_facts(plan, history))
        except OSError as error:
            raise ConfigError([f"output_dir: {os_sentence(error)}"]) from error
        yield directory


def _discard_unbegun(directory: RunDirectory) -> None:
    if not directory.has_begun:
        directory.discard()
