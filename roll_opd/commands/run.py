"""`roll-opd run`: plan, check and run a configuration, and return an exit code.

Exit codes: 0 done; 2 invalid input (message on stderr, nothing started); 1 any other failure; 130 interrupted; 143
ended by SIGTERM.

The launchers in `examples/` and `python -m roll_opd.commands.run` also use this module. If the command is launched on
several hosts, host 0 runs the driver, and the other hosts run workers. These hosts exit with the driver's exit code.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from roll_opd.base import hub
from roll_opd.base.command_line import (
    DONE,
    FAILED,
    RUN_DIRECTORY_FILE,
    SESSION_SOCKET,
    add_config_arguments,
    configuration,
    pipeline_arguments,
    safe_output,
    use_utf8,
    without_collections,
    write_run_directory,
)
from roll_opd.base.failures import (
    ConfigError,
    DiskFull,
    RunError,
    Terminated,
)
from roll_opd.base.installed import refuse_shadowing_files
from roll_opd.base.paths import report_temp_directory, use_cache_of_compilers
from roll_opd.base.terminal import echo
from roll_opd.cluster.forkserver.forkserver_start import ForkServer, fork_server, wanted_by
from roll_opd.cluster.lost_processes import ClusterError
from roll_opd.cluster.multihost.host_facts import LaunchedHost, LaunchError, forget, launched
from roll_opd.cluster.multihost.hosts import Hosts, dismiss
from roll_opd.cluster.multihost.multihost_worker import serve
from roll_opd.commands.exit_codes import exit_code
from roll_opd.commands.restarts import is_attempt, restarted, restarts_left
from roll_opd.config.plan import RunPlan
from roll_opd.inference.failed_start import die_with_parent
from roll_opd.pipelines.checkpoints import CheckpointError
from roll_opd.pipelines.named_inputs import with_inputs
from roll_opd.planner.load_plan import load_plan
from roll_opd.tracking.stdout_tee import tee_output


def main(
    description: str,
    *,
    pure: bool | None = None,
    pipeline: str | None = None,
    arguments: Sequence[str] | None = None,
) -> int:
    """Run the command line, and return the exit code.

    Args:
        description: text for the command's help.
        pure, pipeline: arguments of `load_plan`. If both are None, the first argument of the command line may name the
            pipeline, as in `roll-opd run`.
        arguments: the command line. None: the arguments of this process.
    """
    parser = argparse.ArgumentParser(description=description)
    is_open = pure is None and pipeline is None
    add_config_arguments(parser, takes_pipeline=is_open)
    refuse_shadowing_files()
    if not is_open:  # a launcher; `roll-opd` has reported it
        report_temp_directory()
    if arguments is None:
        use_utf8()
    parsed = parser.parse_intermixed_args(arguments)
    chosen = pipeline_arguments(parsed) if is_open else {"pure": pure, "pipeline": pipeline}
    return launch(parsed, **chosen)


def launch(
    parsed: argparse.Namespace,
    *,
    pure: bool | None = None,
    pipeline: str | None = None,
) -> int:
    """Run the configuration that `parsed` selects, and return the exit code.

    `parsed` has the arguments that `add_config_arguments` adds to a parser.
    """
    safe_output()
    use_cache_of_compilers(os.environ)
    if RUN_DIRECTORY_FILE in os.environ:  # a run must end if the script or notebook that started it ends
        die_with_parent()
    try:
        host = launched(os.environ)
    except LaunchError as error:
        return exit_code(error)
    if host is None:
        forget(os.environ)  # on one host, libraries would read torchrun's variables
    elif host.rank:
        forget(os.environ)
        return serve(host, lambda text: echo(text, sys.stderr))
    with tee_output(), without_collections():
        done = _launch(parsed, pure, pipeline, host)
    if isinstance(done, int):
        return done
    code = restarted(done.max_restarts)
    if host and code and done.max_restarts:
        dismiss(host, code)  # otherwise the other hosts wait for another attempt
    return code


def _launch(
    parsed: argparse.Namespace,
    pure: bool | None,
    pipeline: str | None,
    host: LaunchedHost | None,
) -> int | RunPlan:
    """Run the configuration and return the exit code. If the run must be a separate process, only return its plan."""
    is_here = host is None or is_attempt()  # a process that only supervises attempts needs no imports
    with fork_server() if is_here else nullcontext(ForkServer()) as server:
        try:
            named = configuration(parsed)
            plan = with_inputs(lambda: load_plan(*named, pure=pure, pipeline=pipeline, say=echo), echo)
            if SESSION_SOCKET in os.environ:
                plan = _for_session(plan)
            _check_number(plan, host)
        except (Exception, KeyboardInterrupt) as error:
            code = exit_code(error, is_started=False)
            if host and not isinstance(error, KeyboardInterrupt):
                dismiss(host, code)
            return code
        if (host or plan.max_restarts) and not is_attempt():
            return plan
        if host is None:
            return _served(plan, server, None)
        try:
            hosts = Hosts(host, again=plan.host_timeout_s if restarts_left() else 0.0)
        except LaunchError as error:
            return exit_code(error)
        signal.signal(signal.SIGTERM, _terminated)  # the handler until the run installs another handler
        code = FAILED
        try:
            code = _served(plan, server, hosts)
        except Terminated as error:  # a SIGTERM after the run, before the exit
            code = exit_code(error)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):  # other hosts send them; this run is already ending
                signal.signal(number, signal.SIG_IGN)
            hosts.end(code, again=code == FAILED and restarts_left() > 0)
        return code


def _served(plan: RunPlan, server: ForkServer, hosts: Hosts | None) -> int:
    if hosts:
        forget(os.environ)
        try:
            hosts.gather(plan.host_timeout_s, echo)
            models = sorted({role.model.path for role in plan.roles().values()})
            with hub.environment(plan.env):
                hosts.download(models)
            hosts.check(models, plan.output_dir, plan.devices_per_node)
        except ClusterError as error:
            return exit_code(RunError(str(error)))
        except (LaunchError, Terminated, OSError, KeyboardInterrupt) as error:
            return exit_code(error, is_started=False)
        hosts.warm = wanted_by(plan)
    server.serve(plan, echo)
    os.environ |= {name: str(value) for name, value in plan.env.items()}  # torch and workers read them
    return _run(plan, hosts)


def _terminated(*_: object) -> None:
    raise Terminated("ended by SIGTERM before the start of the run")


def _for_session(plan: RunPlan) -> RunPlan:
    """Return the plan of a run that executes a session's calls. Raises ConfigError if the student does not sample."""
    if plan.rollout is None:
        raise ConfigError([f"a session samples from the student, but {plan.pipeline} trains on given answers"])
    return replace(plan, pipeline="roll_opd.pipelines.session", max_restarts=0)


def _check_number(plan: RunPlan, host: LaunchedHost | None) -> None:
    """Raise LaunchError if the number of launched hosts differs from `num_nodes`."""
    size = host.size if host else 1
    if os.environ.get("RAY_ADDRESS") or plan.num_nodes == size:
        return
    if plan.num_nodes > size:
        wanted = (
            f"launch it on all {plan.num_nodes} hosts (torchrun --nnodes {plan.num_nodes}, srun or mpirun), or start"
            " Ray on them (ray start) and set RAY_ADDRESS to its head"
        )
    else:
        wanted = f"write num_nodes={size} and give roles devices on all hosts, or launch the run on fewer hosts"
    raise LaunchError([f"num_nodes is {plan.num_nodes}, but the run was launched on {size}: {wanted}"])


def _run(plan: RunPlan, hosts: Hosts | None) -> int:
    try:
        # imports torch; a wrong configuration is rejected earlier
        from roll_opd.pipelines.start_checks import preflight

        inputs = preflight(plan)
        if inputs.resumed and inputs.resumed.step >= plan.max_steps:
            done, path = inputs.resumed.step, inputs.resumed.path
            echo(f"the checkpoint {path} is after step {done} of {plan.max_steps}: the run is complete")
            write_run_directory(inputs.resumed.run)
            return DONE
    except (Exception, KeyboardInterrupt) as error:
        return exit_code(error, is_started=False)
    try:
        from roll_opd.pipelines.run_pipeline import run  # imports Ray

        run(plan, inputs, hosts)
    except (Exception, KeyboardInterrupt) as error:
        return exit_code(error, refusals=(CheckpointError, ConfigError, DiskFull))
    return DONE


if __name__ == "__main__":
    sys.exit(main("Train: plan and check a configuration, and run it to its end."))
