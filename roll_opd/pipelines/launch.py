"""From a command line to a run: plan, check, start, and end with an exit code that says what happened.

0 done; 2 what the user gave cannot work (message on stderr, nothing started); 1 anything else; 130 interrupted;
143 ended by SIGTERM.
"""

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Sequence

from roll_opd.algorithms.registry import AlgorithmError
from roll_opd.command_line import DONE, FAILED, INTERRUPTED, TERMINATED, USER_ERROR, add_config_arguments, safe_output
from roll_opd.config.build import load_plan
from roll_opd.config.errors import ConfigError
from roll_opd.data.rows import DataError
from roll_opd.failures import os_sentence, shortened, tell
from roll_opd.hf.model_info import ModelFilesError
from roll_opd.pipelines.checkpoints import CheckpointError
from roll_opd.rewards.interface import RewardError
from roll_opd.tracking.registry import TrackerError
from roll_opd.workers.errors import RunError, Terminated

# what the user can put right
REFUSALS = (AlgorithmError, CheckpointError, ConfigError, DataError, ModelFilesError, RewardError, TrackerError)


def main(
    description: str, *, pure: bool | None = None, pipeline: str | None = None, arguments: Sequence[str] | None = None
) -> int:
    """Run what the command line asks for and return the exit code; `pure` and `pipeline` are those of `load_plan`."""
    parser = argparse.ArgumentParser(description=description)
    add_config_arguments(parser)
    return launch(parser.parse_intermixed_args(arguments), pure=pure, pipeline=pipeline)


def launch(parsed: argparse.Namespace, *, pure: bool | None = None, pipeline: str | None = None) -> int:
    """Run the configuration that `add_config_arguments` parsed and return the exit code."""
    safe_output()
    try:
        plan = load_plan(parsed.config_path, parsed.config_name, parsed.overrides, pure=pure, pipeline=pipeline)
        os.environ |= {name: str(value) for name, value in plan.env.items()}  # torch and workers read them
        # imports torch: a wrong configuration is refused without waiting for that
        from roll_opd.pipelines.preflight import preflight

        inputs = preflight(plan)
        if inputs.resumed and inputs.resumed.step >= plan.max_steps:
            done, path = inputs.resumed.step, inputs.resumed.path
            print(f"{path} is after step {done} of {plan.max_steps}: nothing is left to do")
            return DONE
    except (Exception, KeyboardInterrupt) as error:
        return exit_code(error, is_started=False)
    try:
        from roll_opd.pipelines.loop import run  # imports Ray

        run(plan, inputs)
    except (Exception, KeyboardInterrupt) as error:
        return exit_code(error, refusals=(CheckpointError, ConfigError))
    return DONE


def exit_code(
    error: BaseException, refusals: tuple[type[Exception], ...] = REFUSALS, *, is_started: bool = True
) -> int:
    """Tell the user what has ended the run, and return the exit code; `refusals` are what the user can put right.

    A traceback is shown of a run alone: before one `is_started`, every error is a sentence.
    """
    if isinstance(error, Terminated):
        return _ended(str(error), TERMINATED)
    if isinstance(error, KeyboardInterrupt):
        return _ended(str(error) or "interrupted", INTERRUPTED)
    if isinstance(error, refusals):
        return _ended(str(error), USER_ERROR)
    if isinstance(error, RunError):
        return _ended(str(error), FAILED)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        hint = "free space or change output_dir, then use resume_from_checkpoint=true"
        return _ended(f"{error}; {hint}", USER_ERROR)
    if is_started:
        traceback.print_exception(error)
        return FAILED
    if isinstance(error, OSError):
        return _ended(os_sentence(error), USER_ERROR)
    tell(error)
    return FAILED


def _ended(message: str, code: int) -> int:
    print(f"roll-opd: {shortened(message)}", file=sys.stderr)
    return code
